"""`penstock mcp`: the engine's topics as tools of an AI agent."""

from __future__ import annotations

import logging

import click

from penstock.cli.engine import EngineRef, on_engine
from penstock.cli.options import waits
from penstock.core.errors import Misconfigured


@click.command()
@waits("30s", "How long a call waits for its job before it returns the job's id.")
@on_engine
def mcp(engine: EngineRef, wait_timeout: float) -> None:
    """Serve topics as tools of an AI agent (MCP).

    Speaks the Model Context Protocol over standard input and output, for an agent that starts this
    command. Agents elsewhere use the engine's HTTP server at /mcp, with a key. Needs the extra:
    pip install 'penstock[mcp]'.
    """
    try:
        from penstock.api.mcp import serve_stdio
    except ImportError as error:
        raise Misconfigured(
            f"MCP is not installed: {error}", hint="pip install 'penstock[mcp]'"
        ) from error
    logging.basicConfig(level=logging.WARNING)
    engine.ask(lambda api: serve_stdio(api, wait=wait_timeout))
