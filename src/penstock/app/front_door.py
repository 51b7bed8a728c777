"""What an engine answers itself while another one owns its database: reads of jobs.

It knows the keys, so it can tell whose jobs a caller may see. All else is the owner's to answer;
so is whatever comes with a key that is not known here.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, cast

import aiohttp
from yarl import URL

from penstock.adapters.link.relay import Reads
from penstock.adapters.link.server import api_methods
from penstock.adapters.postgres.store import PostgresBackend
from penstock.api.about import Health
from penstock.api.application import abort, token_in
from penstock.api.monitor import Receive
from penstock.api.operation import Router
from penstock.api.operations import OPERATIONS
from penstock.api.options import HttpOptions
from penstock.api.reply import SECURITY, Send
from penstock.api.server import HttpServer
from penstock.app.parts import open_blobs
from penstock.config import Settings
from penstock.control.follower import Follower, FollowingEngineApi
from penstock.control.guard import KeyRegistry
from penstock.control.home import HomeFacts
from penstock.core.errors import NotAuthenticated, PenstockError, WrongShard
from penstock.core.shards import Shard
from penstock.ports.clock import Clock, SystemClock
from penstock.ports.engine_api import OWNER, Authenticator, Caller, EngineApi, Session, SignedIn

_READS = frozenset(
    {
        *("get_job", "list_jobs", "list_dead", "get_counts", "get_history", "get_logs"),
        *("get_steps", "count_steps", "count_children", "healthz", "readyz"),
    }
)
"""Operations of the HTTP API."""
_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade"),
        *(b"proxy-authorization", b"proxy-connection", b"proxy-authenticate", b"expect"),
    }
)
"""Headers of one connection, which are not forwarded."""
_OURS = _HOP | {b"date", *(name for name, _ in SECURITY)}
"""Headers of an answer that are not forwarded: the server adds its own."""
_CONNECT = 5.0
"""Seconds that a connection to the owner may take."""
_MOST_CALLERS = 1000


class Reader:
    """Authenticates callers, and reads for them. See `penstock.ports.engine_api.Authenticator`."""

    def __init__(
        self, settings: Settings, token: str, opens: Callable[[str], bool], shard: Shard, home: str
    ) -> None:
        """`opens` tells whether a digest is of the token of another engine of the database. `home`
        is the URL of shard 0's database, if that is another one."""
        self._clock: Clock = SystemClock()
        self._home = PostgresBackend(home, readers=1) if home else None
        self._store = Follower(
            PostgresBackend(settings.store),
            shard=shard,
            home=None if self._home is None else HomeFacts(self._home.facts),
        )
        self._blobs = open_blobs(settings)
        self.shard = shard.number
        self.keys = KeyRegistry(self._store, self._clock, token)
        self.keys.opens = opens
        self._sessions: dict[Caller, Session] = {}
        self._reads: dict[Caller, Reads] = {}

    async def renew(self) -> None:
        """Learn of new and revoked keys. Raises StoreFailed."""
        await self.keys.load_keys()

    async def close(self) -> None:
        await self._store.close()
        if self._home is not None:
            await self._home.close()

    def authenticate(self, token: str) -> Session:
        return self._session(self.keys.authenticate(token))

    def _session(self, caller: Caller) -> Session:
        if (known := self._sessions.get(caller)) is not None:
            return known
        if len(self._sessions) >= _MOST_CALLERS:
            self._sessions.clear()
            self._reads.clear()
        api: Any = FollowingEngineApi(self._store, self._blobs, caller, self._clock)
        made = Session(caller, cast(EngineApi, api), None, lambda: self.keys.is_current(caller))
        self._sessions[caller], self._reads[caller] = made, api_methods(api)
        return made

    def resume(self, token: str) -> Session:
        raise NotAuthenticated("browser sessions are the owner's")

    async def sign_in(self, *, key: str = "", link: str = "") -> SignedIn:
        raise NotAuthenticated("browser sessions are the owner's")

    async def sign_out(self, token: str) -> None:
        raise NotAuthenticated("browser sessions are the owner's")

    def reads_of(self, token: str, *, is_private: bool) -> Reads | None:
        """What a caller can read over a link; on a private socket, nobody needs a token."""
        try:
            caller = OWNER if is_private and not token else self.keys.authenticate(token)
        except (NotAuthenticated, WrongShard):
            return None
        self._session(caller)
        return self._reads[caller]


OwnerUrl = Callable[[int], Awaitable[str]]
"""Waits for the URL of the owner of a shard. Raises TimeoutError."""


class ForwardingServer(HttpServer):
    """Forwards requests of a tenant of another shard to the owner of that."""

    def __init__(
        self,
        sign_ins: Authenticator,
        options: HttpOptions,
        keys: KeyRegistry,
        owner_url: OwnerUrl,
        *,
        health: Callable[[], Health],
        clock: Clock,
    ) -> None:
        super().__init__(sign_ins, options, clock=clock, health=health)
        self._keys, self._owner_url = keys, owner_url
        self._session: aiohttp.ClientSession | None = None

    @property
    def asgi(self) -> Callable[..., Awaitable[None]]:
        return self._answer

    async def close(self) -> None:
        await super().close()
        if self._session is not None:
            await self._session.close()

    async def _answer(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        shard = self._answered_by(scope) if scope["type"] == "http" else None
        if shard is None:
            await self.application(scope, receive, send)
        else:
            await self._forward(scope, receive, send, shard)

    def _answered_by(self, scope: Mapping[str, Any]) -> int | None:
        """The shard whose owner answers a request; None answers it here."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        try:
            if b"cookie" not in headers:
                self._keys.authenticate(token_in(headers))
        except WrongShard as error:
            return error.shard
        except PenstockError:
            pass
        return None

    # -- forwarding ---------------------------------------------------------------

    async def _forward(
        self, scope: dict[str, Any], receive: Receive, send: Send, shard: int
    ) -> None:
        sent = asyncio.Event()
        work = asyncio.ensure_future(self._exchange(scope, receive, send, shard, sent))
        watch = asyncio.ensure_future(_disconnected(receive, sent))
        try:
            await asyncio.wait((work, watch), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, watch):
                task.cancel()
            await asyncio.gather(work, watch, return_exceptions=True)
            if work.cancelled() or work.exception() is not None:
                abort(scope)  # the owner was lost or replaced, or the client has gone

    async def _exchange(
        self, scope: dict[str, Any], receive: Receive, send: Send, shard: int, sent: asyncio.Event
    ) -> None:
        session = self._opened()
        query = scope["query_string"].decode("latin-1")
        path = scope["raw_path"].decode("ascii") + (f"?{query}" if query else "")
        headers = [
            (name.decode("latin-1"), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in _HOP
        ]
        names = {name for name, _ in scope["headers"]}
        has_body = bool(names & {b"content-length", b"transfer-encoding"})
        if not has_body:
            sent.set()
        while True:
            url = URL(await self._owner_url(shard) + path, encoded=True)
            body = _body(receive, sent) if has_body else None
            try:
                request = session.request(
                    scope["method"], url, headers=headers, data=body, allow_redirects=False
                )
                async with request as answer:
                    kept = [pair for pair in answer.raw_headers if pair[0].lower() not in _OURS]
                    head = {"status": answer.status, "headers": kept}
                    await send({"type": "http.response.start", **head})
                    async for part in answer.content.iter_any():
                        await send({"type": "http.response.body", "body": part, "more_body": True})
                    await send({"type": "http.response.body", "body": b""})
                return
            except aiohttp.ClientConnectorError:
                await asyncio.sleep(0.1)  # nothing was sent: the next owner gets it

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                auto_decompress=False,
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT),
            )
        return self._session


class FrontDoor(ForwardingServer):
    """Answers reads, and forwards all other requests to the owner."""

    def __init__(
        self,
        reader: Reader,
        options: HttpOptions,
        owner_url: OwnerUrl,
        health: Callable[[], Health],
    ) -> None:
        sign_ins: Authenticator = reader
        super().__init__(
            sign_ins, options, reader.keys, owner_url, health=health, clock=SystemClock()
        )
        self._reader = reader
        self._router = Router(OPERATIONS)

    def _answered_by(self, scope: Mapping[str, Any]) -> int | None:
        other = super()._answered_by(scope)
        return self._reader.shard if other is None and not self._is_read(scope) else other

    def _is_read(self, scope: Mapping[str, Any]) -> bool:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if scope["method"] not in ("GET", "HEAD") or b"cookie" in headers:
            return False
        try:
            operation, _ = self._router.find(scope["method"], scope["raw_path"].decode("ascii"))
            if operation.id not in _READS or b"why=" in scope["query_string"]:
                return False
            if operation.path.startswith("/v1/"):
                self._reader.authenticate(token_in(headers))
        except PenstockError:
            return False
        return True


async def _body(receive: Receive, sent: asyncio.Event) -> AsyncIterator[bytes]:
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError("the client has gone")
        more = message.get("more_body", False)
        if message["body"]:
            yield message["body"]
    sent.set()


async def _disconnected(receive: Receive, sent: asyncio.Event) -> None:
    """Return when the client has gone, after it has sent its request."""
    await sent.wait()
    while (await receive())["type"] != "http.disconnect":
        pass
