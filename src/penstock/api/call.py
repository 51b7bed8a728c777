"""One request, as a handler sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    contextmanager,
    nullcontext,
)
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote
from weakref import WeakValueDictionary

from msgspec import Struct, field

from penstock.api.attendance import Attendance, Turnstile, Watchman
from penstock.api.body import Receive, parts_of, read_body
from penstock.api.health import Health
from penstock.api.metrics import Traffic
from penstock.api.options import HttpOptions
from penstock.api.parameters import read_query
from penstock.api.problems import Refused
from penstock.api.served import Served
from penstock.api.stream import EventStreams
from penstock.api.strict import INLINE, read_json
from penstock.core.caller import Caller
from penstock.ports.clock import Clock
from penstock.ports.desk import Desk
from penstock.ports.door import Guest

if TYPE_CHECKING:
    from penstock.api.operation import Operation

T = TypeVar("T")
S = TypeVar("S", bound=Struct)

JSON_TYPE = "application/json"
_LARGE_AT_ONCE = 8


class Services(Struct):
    """What handlers need besides the call itself."""

    options: HttpOptions
    clock: Clock
    health: Callable[[], Health]
    watchman: Watchman
    streams: Turnstile
    waits: Turnstile
    events: EventStreams
    traffic: Traffic
    models: Served
    document: Callable[[], bytes]
    """The OpenAPI document."""
    page: Callable[[], bytes]
    """The same, to be read by people."""
    room: WeakValueDictionary[str, asyncio.Semaphore] = field(default_factory=WeakValueDictionary)
    """By key, while it is used: for its large bodies in memory."""
    reading: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    """By key, while it is used: held while one of its large bodies is read."""


_ROOM = nullcontext()
"""For a small body there always is."""


class Call:
    __slots__ = (
        "guest",
        "headers",
        "operation",
        "params",
        "receive",
        "scope",
        "services",
        "still_welcome",
    )

    def __init__(
        self,
        scope: dict[str, Any],
        headers: dict[bytes, bytes],
        receive: Receive,
        services: Services,
        operation: Operation,
        params: dict[str, str],
    ) -> None:
        self.scope, self.headers, self.receive = scope, headers, receive
        self.services, self.operation, self.params = services, operation, params
        self.guest: Guest | None = None
        self.still_welcome: Callable[[], object] | None = None
        """For what takes its time: raises NotAuthenticated once the key opens nothing."""

    # -- who ----------------------------------------------------------------------

    @property
    def desk(self) -> Desk:
        """That of the caller: it checks by itself what they may do and see."""
        assert self.guest is not None
        assert self.guest.desk is not None
        return self.guest.desk

    @property
    def caller(self) -> Caller:
        assert self.guest is not None
        return self.guest.caller

    def tenant(self, asked: str | None = None) -> str:
        """Whose things are meant: as the call says, else the key's own tenant's."""
        return asked or self.caller.tenant or "default"

    # -- what ---------------------------------------------------------------------

    def header(self, name: bytes) -> str:
        """A header's value, or an empty text."""
        value = self.headers.get(name)
        return "" if value is None else value.decode("latin-1")

    def query(self, kind: type[S]) -> S:
        """The query, checked. `kind` is what the operation declares."""
        assert kind is self.operation.query
        pass_over = self.services.options.passes_over
        return read_query(self.scope["query_string"], kind, pass_over=pass_over)

    async def json(self, kind: type[T], *, parsed_depth: int | None = None) -> T:
        """The body, decoded and checked. `kind` is what the operation declares.

        See `read_json` for `parsed_depth`."""
        assert kind is self.operation.body
        async with self.room():
            body = await self.body()
            if not body and self.operation.may_be_empty:
                return kind()
            self.check_type(JSON_TYPE)
            return await self.read(body, kind, parsed_depth)

    async def read(self, data: bytes, kind: type[T], parsed_depth: int | None = None) -> T:
        """Decode and check JSON; a large one in a thread, one at a time for each key."""
        read = partial(
            read_json,
            data,
            kind,
            max_depth=self.services.options.max_depth,
            parsed_depth=parsed_depth,
        )
        if len(data) <= INLINE:
            return read()
        async with self.services.reading.setdefault(self._key, asyncio.Lock()):
            return await asyncio.to_thread(read)

    def room(self) -> AbstractAsyncContextManager[object]:
        """To be held while the body is in memory. Until there is some, it stays on the wire."""
        length = self.headers.get(b"content-length", b"0")
        if len(length) <= len(str(INLINE)) and int(length) <= INLINE and not self._is_chunked:
            return _ROOM
        return self.services.room.setdefault(self._key, asyncio.Semaphore(_LARGE_AT_ONCE))

    @property
    def _is_chunked(self) -> bool:
        return b"transfer-encoding" in self.headers

    @property
    def _key(self) -> str:
        return self.caller.key_id or self.caller.principal

    def check_type(self, wanted: str) -> None:
        given = self.header(b"content-type")
        if given == wanted:
            return
        found = given.partition(";")[0].strip().lower()
        if found == wanted:
            return
        said = f"the body is {found!r}" if found else "the type of the body is missing"
        raise Refused(415, "WRONG_TYPE", said, hint=f"say Content-Type: {wanted}")

    async def body(self) -> bytes:
        """The whole body, as it came."""
        options, headers = self.services.options, self.headers
        self._check_encoding()
        most = options.max_upload if self.operation.large else options.max_body
        connection = self.scope.get("penstock.connection")
        if connection is not None:
            body: bytes | None = connection.body_of(self.receive, most)
            if body is not None:
                return body
        return await read_body(self.receive, headers.get(b"content-length"), most, options)

    def parts(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes, for one that may never end."""
        self._check_encoding()
        return parts_of(self.receive, self.services.options)

    def attending(self) -> AbstractContextManager[Attendance]:
        """For waits, after the body was read: broken off when the client leaves."""
        return self.services.watchman.attending(self.receive, self.still_welcome)

    @contextmanager
    def waiting(self) -> Generator[Attendance]:
        """The same for an operation that waits only when it is asked to: it is counted now."""
        self.scope["penstock.waited"] = True
        with self.services.waits.passing(self.caller), self.attending() as attendance:
            yield attendance

    def _check_encoding(self) -> None:
        encoding = self.headers.get(b"content-encoding", b"identity")
        if encoding.strip().lower() != b"identity":
            raise Refused(
                415, "WRONG_ENCODING", "the body is encoded", hint="send it without encoding"
            )


def unescaped(segment: str) -> str:
    """A part of a path. Raises UnicodeDecodeError for what is no UTF-8."""
    return unquote(segment, errors="strict") if "%" in segment else segment
