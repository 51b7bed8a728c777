"""`/mcp`: AI agents, by the Model Context Protocol. What they can do is in `mcp`."""

from __future__ import annotations

import asyncio
from importlib import import_module
from typing import TYPE_CHECKING

from penstock.api.operation import Handler, Operation, Pace
from penstock.api.problems import Refused
from penstock.api.reply import AppReply

if TYPE_CHECKING:
    from penstock.api.call import Call
    from penstock.api.mcp import McpEndpoint


class Agents:
    """The MCP endpoint, created on first use: its packages take a second to import."""

    def __init__(self, max_body: int) -> None:
        self._max_body = max_body
        self._endpoint: McpEndpoint | None = None

    async def endpoint(self) -> McpEndpoint:
        if self._endpoint is None:
            try:
                found = await asyncio.to_thread(import_module, "penstock.api.mcp")
            except ImportError as error:
                raise Refused(
                    501,
                    "NOT_INSTALLED",
                    f"MCP is not installed here: {error}",
                    hint="pip install 'penstock[mcp]' on the engine's machine",
                ) from error
            if self._endpoint is None:
                self._endpoint = found.McpEndpoint(max_body=self._max_body)
        return self._endpoint

    async def close(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            await endpoint.close()


def mcp_operations(handler: Handler) -> tuple[Operation, ...]:
    return tuple(
        Operation(method, "/mcp", handler, pace=Pace.STREAMS, summary="Model Context Protocol")
        for method in ("GET", "POST", "DELETE")
    )


async def serve_mcp(call: Call) -> AppReply:
    return AppReply((await call.services.agents.endpoint()).serve)
