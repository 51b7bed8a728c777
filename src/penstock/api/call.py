"""One request, as a handler sees it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import (
    AbstractAsyncContextManager,
    contextmanager,
    nullcontext,
)
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast
from weakref import WeakValueDictionary

from msgspec import Struct, field

from penstock.api.about import Health
from penstock.api.agents import Agents
from penstock.api.decoding import INLINE, read_json, read_query
from penstock.api.metrics import Traffic
from penstock.api.monitor import ConcurrencyLimit, Gone, Receive, RequestMonitor, RequestScope
from penstock.api.openai.models import Served
from penstock.api.options import HttpOptions
from penstock.api.problems import Refused
from penstock.api.sessions import FailedSignIns
from penstock.api.stream import EventStreams
from penstock.core.errors import TooLarge
from penstock.ports.clock import Clock
from penstock.ports.engine_api import Authenticator, Caller, EngineApi, Session

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
    monitor: RequestMonitor
    streams: ConcurrencyLimit
    waits: ConcurrencyLimit
    events: EventStreams
    traffic: Traffic
    models: Served
    document: Callable[[], bytes]
    """The OpenAPI document."""
    page: Callable[[], bytes]
    """The API documentation as HTML."""
    failed_sign_ins: FailedSignIns
    agents: Agents
    sign_ins: Authenticator | None = None
    """For browser sessions; None on a server without them."""
    room: WeakValueDictionary[str, asyncio.Semaphore] = field(default_factory=WeakValueDictionary)
    """By key: limits the number of its large bodies in memory."""
    reading: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)
    """By key: one of its large bodies is decoded at a time."""


_ROOM = nullcontext()
"""Small bodies need no permit."""


class Call:
    __slots__ = (
        "headers",
        "operation",
        "params",
        "receive",
        "scope",
        "services",
        "session",
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
        self.session: Session | None = None
        self.still_welcome: Callable[[], object] | None = None
        """For long requests: raises NotAuthenticated once the key is no longer valid."""

    # -- who ----------------------------------------------------------------------

    @property
    def api(self) -> EngineApi:
        """The caller's EngineApi, which checks roles and tenant itself."""
        assert self.session is not None
        assert self.session.api is not None
        return self.session.api

    @property
    def caller(self) -> Caller:
        assert self.session is not None
        return self.session.caller

    def tenant(self, asked: str | None = None) -> str:
        """The tenant named by the call, else the key's own."""
        return asked or self.caller.tenant or "default"

    # -- what ---------------------------------------------------------------------

    def header(self, name: bytes) -> str:
        """A header's value, or an empty text."""
        value = self.headers.get(name)
        return "" if value is None else value.decode("latin-1")

    def query(self, kind: type[S]) -> S:
        """The query, checked. `kind` is what the operation declares."""
        assert kind is self.operation.query
        pass_over = self.services.options.ignore_unknown
        return read_query(self.scope["query_string"], kind, pass_over=pass_over)

    async def json(self, kind: type[T], *, parsed_depth: int | None = None) -> T:
        """The body, decoded and checked. `kind` is what the operation declares.

        See `read_json` for `parsed_depth`."""
        assert kind is self.operation.body
        self._check_encoding()
        body = self._arrived(min(INLINE, self._max_size))
        if body is not None:
            return self._decoded(body, kind, parsed_depth)
        async with self.room():
            body = await self.body()
            if len(body) <= INLINE:
                return self._decoded(body, kind, parsed_depth)
            self.check_type(JSON_TYPE)
            return await self.read(body, kind, parsed_depth)

    def _decoded(self, body: bytes, kind: type[T], parsed_depth: int | None) -> T:
        if not body and self.operation.may_be_empty:
            return kind()
        self.check_type(JSON_TYPE)
        max_depth = self.services.options.max_depth
        read = self.operation.reader or read_json
        return cast(T, read(body, kind, max_depth=max_depth, parsed_depth=parsed_depth))

    async def read(self, data: bytes, kind: type[T], parsed_depth: int | None = None) -> T:
        """Decode and check JSON; a large one in a thread, one at a time for each key."""
        read = partial(
            self.operation.reader or read_json,
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
        """Permit to hold a large body in memory; without one, the body is not read yet."""
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
        if self.headers.get(b"content-type") == wanted.encode():
            return
        found = self.header(b"content-type").partition(";")[0].strip().lower()
        if found == wanted:
            return
        said = f"unsupported Content-Type {found!r}" if found else "Content-Type is missing"
        raise Refused(415, "WRONG_TYPE", said, hint=f"send Content-Type: {wanted}")

    async def body(self, *, at_most: int | None = None) -> bytes:
        """The whole body as bytes."""
        self._check_encoding()
        most = self._max_size if at_most is None else at_most
        body = self._arrived(most)
        if body is None:
            length = self.headers.get(b"content-length")
            body = await read_body(self.receive, length, most, self.services.options)
        return body

    @property
    def _max_size(self) -> int:
        """Maximum size of the body in bytes."""
        options = self.services.options
        return options.max_upload if self.operation.large else options.max_body

    def _arrived(self, most: int) -> bytes | None:
        """The body if it has arrived completely and within that size; most have."""
        connection = self.scope.get("penstock.connection")
        return None if connection is None else connection.body_of(self.receive, most)

    def parts(self, *, paced: bool = False) -> AsyncGenerator[bytes, None]:
        """The body as a stream, possibly endless; a `paced` one comes at the least rate."""
        self._check_encoding()
        return parts_of(self.receive, self.services.options, paced=paced)

    def attending(self) -> RequestScope:
        """Scope of a wait, after the body was read: ends when the client disconnects."""
        return self.services.monitor.attending(self.receive, self.still_welcome)

    @contextmanager
    def waiting(self) -> Generator[RequestScope]:
        """The same for an operation that waits only on request; counted from now on."""
        self.scope["penstock.waited"] = True
        with self.services.waits.passing(self.caller), self.attending() as attendance:
            yield attendance

    def _check_encoding(self) -> None:
        encoding = self.headers.get(b"content-encoding")
        if encoding is not None and encoding.strip().lower() != b"identity":
            raise Refused(
                415,
                "WRONG_ENCODING",
                "Content-Encoding is not supported",
                hint="send it without encoding",
            )


async def read_body(
    receive: Receive, length: bytes | None, most: int, options: HttpOptions
) -> bytes:
    """The whole body, if it is no larger than allowed; refused before all of it is read."""
    if length is not None and int(length) > most:
        raise too_large(most)
    return await _gather(receive, most, options)


async def _gather(receive: Receive, most: int, options: HttpOptions) -> bytes:
    parts: list[bytes] = []
    size, begun = 0, asyncio.get_running_loop().time()
    try:
        async with asyncio.timeout_at(_due(begun, size, options)) as limit:
            while True:
                message = _present(await receive())
                parts.append(message["body"])
                size += len(message["body"])
                if size > most:
                    raise too_large(most)
                if not message["more_body"]:
                    return b"".join(parts)
                limit.reschedule(_due(begun, size, options))
    except TimeoutError:
        raise slow() from None


def _due(begun: float, size: int, options: HttpOptions) -> float:
    """Deadline of the next part, given the bytes received so far."""
    return begun + min(options.body_timeout, options.body_grace + size / options.min_rate)


async def parts_of(
    receive: Receive, options: HttpOptions, *, paced: bool = False
) -> AsyncGenerator[bytes, None]:
    """Stream a body of any length, part by part: at the least rate, or with pauses."""
    now = asyncio.get_running_loop().time
    more, size, begun = True, 0, now()
    while more:
        rated = begun + options.body_grace + size / options.min_rate
        try:
            async with asyncio.timeout_at(rated if paced else now() + options.idle):
                message = _present(await receive())
        except TimeoutError:
            raise slow() from None
        more = message["more_body"]
        size += len(message["body"])
        if message["body"]:
            yield message["body"]


def _present(message: dict[str, Any]) -> dict[str, Any]:
    if message["type"] == "http.disconnect":
        raise Gone
    return message


def too_large(most: int) -> TooLarge:
    return TooLarge(
        "body",
        f"is longer than {most:,} bytes",
        hint="send large inputs to /v1/blobs and pass the pointer, or many jobs in several calls",
    )


def slow() -> Refused:
    return Refused(
        408,
        "SLOW",
        "the request body took too long",
        hint="send it faster, or in smaller requests",
        headers=((b"connection", b"close"),),
    )
