"""The HTTP server of a container worker, within the worker's own event loop."""

from __future__ import annotations

import hmac
from collections.abc import Mapping

from penstock.api.application import Authenticate, token_in
from penstock.api.container.options import ContainerHttpOptions
from penstock.api.container.surface import surface
from penstock.api.server import ApiServer
from penstock.core.errors import NotAuthenticated
from penstock.ports.clock import Clock
from penstock.ports.engine_api import OWNER, Session
from penstock.workloads.container.store import ContainerApi

_SESSION = Session(OWNER)


class ContainerServer:
    """Answers under its URL from `start` to `close`."""

    def __init__(self, api: ContainerApi, options: ContainerHttpOptions, *, clock: Clock) -> None:
        self.options = options
        self._server = ApiServer(
            surface(api, options), by_token(options.token), options.http(), clock=clock
        )

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def streams(self) -> int:
        """How many streams of logs are open."""
        return self._server.streams

    @property
    def waiting(self) -> int:
        """How many requests wait."""
        return self._server.waiting

    async def start(self) -> str:
        """Listen; returns the URL. Raises Misconfigured for what can't be, or would be unsafe."""
        self.options.check()
        return await self._server.start()

    async def close(self) -> None:
        """Stop listening, end streams and waits, let the rest finish for a short while."""
        await self._server.close()


def by_token(token: str) -> Authenticate:
    """Whoever has the token; without one, whoever reaches this machine's own address."""
    expected = token.encode()

    def authenticate(headers: Mapping[bytes, bytes]) -> Session:
        if expected and not hmac.compare_digest(token_in(headers).encode("latin-1"), expected):
            raise NotAuthenticated("this is not the worker's token", hint="look at its settings")
        return _SESSION

    return authenticate
