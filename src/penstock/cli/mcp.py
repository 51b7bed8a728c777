"""`penstock mcp`: the engine's topics as tools of an AI agent."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from penstock.app.engine import http_options
from penstock.app.service import Stop
from penstock.cli.engine import EngineRef
from penstock.cli.groups import command
from penstock.cli.options import options
from penstock.cli.output import banner, echo
from penstock.core.errors import Misconfigured

if TYPE_CHECKING:
    from penstock.config import Settings


@command()
@options(
    """
    --http HOST:PORT             Serve streamable HTTP there, at /mcp, and not standard input and
            output.
    --wait-timeout DURATION=30s  How long a call waits for its job before it returns the job's id.
    """
)
async def mcp(engine: EngineRef, http: str | None, wait_timeout: float) -> None:
    """Serve topics as tools of an AI agent (MCP).

    Speaks the Model Context Protocol over standard input and output, for an agent that starts this
    command. With --http it listens for agents until Ctrl-C. They send the engine's token, or the
    one given with --token, and have the rights of this command. The engine's own HTTP server has
    /mcp, too, where each agent has the rights of its key. Needs the extra: pip install
    'penstock[mcp]'.
    """
    try:
        from penstock.api.mcp import http_server, serve_stdio
    except ImportError as error:
        raise Misconfigured(
            f"MCP is not installed: {error}", hint="pip install 'penstock[mcp]'"
        ) from error
    logging.basicConfig(level=logging.WARNING)
    async with engine.api() as api:
        if http is None:
            await serve_stdio(api, wait=wait_timeout)
            return
        stop, settings = Stop(), engine.settings(http__listen=http)
        stop.listen()
        token = engine.secret or _own_token(settings)
        async with http_server(api, token, http_options(settings), wait=wait_timeout) as url:
            agents = "send the token of --token" if engine.secret else str(settings.token_file)
            echo(banner("MCP server", [("listening", url), ("token", agents)]))
            await stop.asked.wait()


def _own_token(settings: Settings) -> str:
    try:
        return settings.token_file.read_text("utf-8").strip()
    except OSError as error:
        raise Misconfigured(
            f"can't read the engine's token: {error}", hint="give one with --token @FILE"
        ) from error
