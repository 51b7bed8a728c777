"""Calls to an engine's HTTP API: one session, many connections, and when to try again.

A call is repeated only where that is safe: if it changes nothing, or if the engine answers
the same call twice with the same thing. Everything else is sent once; if
its answer is lost, the call raises an error.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec
from msgspec import Raw, Struct
from yarl import URL

from penstock.core.errors import (
    Conflict,
    EngineUnavailable,
    InvalidRequest,
    Misconfigured,
    NotAuthenticated,
    NotFound,
    NotPermitted,
    NotRunning,
    PenstockError,
    TooLarge,
    TooMany,
    Unavailable,
    revived,
)
from penstock.ports.clock import SystemClock, backoff
from penstock.ports.process import CALLER_TIMEOUT, keep_alive

log = logging.getLogger(__name__)

T = TypeVar("T")
_PAGE = 1000
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_JSON = "application/json"
_LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)
END = "end"
"""The kind of event that ends a stream."""
_LATE = 2.0
"""Seconds beyond a caller's own timeout after which an engine that is silent counts as lost."""
_SILENCE = 45.0
"""Seconds without a sign of life (by default an engine gives one every 15 s) after which a stream
is taken for dead."""
_LEAST_SILENCE = 10.0
"""Seconds that an engine has to answer, however short the reconnect_timeout is."""

encode = msgspec.json.Encoder().encode


class ConnectionOptions(Struct, frozen=True, kw_only=True):
    """Times are in seconds."""

    ca_file: Path | None = None
    """Certificates to trust instead of those of the system."""
    connect_timeout: float = 10.0
    read_timeout: float = 60.0
    """How long an answer may take beyond what it was asked to wait."""
    reconnect_timeout: float | None = 60.0
    """How long a call or a stream tries to reach an engine that was lost; None: for ever."""
    connections: int = 100


class Response(Struct, frozen=True):
    status: int
    headers: Mapping[str, str]
    body: bytes

    def read(self, kind: type[T], field: str = "") -> T:
        """The body as a value, or one field of it."""
        try:
            body = self.body or b"null"
            if field:
                body = msgspec.json.decode(body, type=dict[str, Raw])[field]
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, KeyError, UnicodeDecodeError, RecursionError) as error:
            raise Unavailable(
                f"the server is not a compatible engine: {error}",
                hint="check the URL, and that both ends have the same version",
            ) from error


class Request(Struct, frozen=True):
    method: str
    path: str
    query: Mapping[str, Any] | None = None
    data: bytes | None = None
    headers: Mapping[str, str] = {}

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class _Next(Struct, frozen=True):
    next: str | None = None


class Connection:
    """Calls one engine by its URL, with one key."""

    def __init__(self, url: str, token: str, options: ConnectionOptions) -> None:
        self.url = checked_url(url)
        self.options, self.clock = options, SystemClock()
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        options = self.options
        connector = aiohttp.TCPConnector(
            limit=options.connections, ssl=trust(options.ca_file), socket_factory=_new_socket
        )
        headers = {"Accept": "*/*", "Accept-Encoding": "identity"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers=headers,
            auto_decompress=False,
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # -- calls --------------------------------------------------------------------

    async def send(
        self,
        method: str,
        path: str,
        kind: type[T],
        body: object = None,
        *,
        query: Mapping[str, Any] | None = None,
        again: bool = False,
        wait: float = 0.0,
        until: float | None = None,
        field: str = "",
    ) -> T:
        """A value, or one field of it. Repeated after a lost answer if the call only reads, or
        if `again` says that it is safe."""
        data = None if body is None else encode(body)
        again = again or method == "GET"
        answer = await self.call(
            method, path, query=query, data=data, again=again, wait=wait, until=until
        )
        return answer.read(kind, field)

    async def pages(
        self,
        path: str,
        kind: type[T],
        query: Mapping[str, Any],
        field: str,
        size: int = _PAGE,
    ) -> list[T]:
        """Up to `limit` values of a listing, page by page."""
        found: list[T] = []
        page = dict(query)
        while (left := query["limit"] - len(found)) > 0:
            page["limit"] = min(left, size)
            response = await self.call("GET", path, query=page, again=True)
            some = response.read(list[kind], field)  # type: ignore[valid-type]
            found += some
            page["cursor"] = response.read(_Next).next
            if page["cursor"] is None:
                break
        return found

    async def call(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        data: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        again: bool = False,
        wait: float = 0.0,
        until: float | None = None,
    ) -> Response:
        """Raises what the engine raised, and EngineUnavailable if it can't be reached in time.

        `wait` is how long the answer was asked to take. `until` is when the caller's own time is
        over, on the monotonic clock.
        """
        if data is not None:
            headers = {"Content-Type": _JSON, **(headers or {})}
        request = Request(method, path, query, data, headers or {})
        began = self.clock.monotonic()
        end = self._patience_ends(began) if until is None else until
        for pause in _pauses():
            patience = wait + self._longest_silence(again)
            if until is not None:
                patience = min(patience, max(0.0, end - self.clock.monotonic()) + _LATE)
            try:
                total = None if until is None else patience
                return await self.once(request, patience, total)
            except NoAnswer as error:
                if error.was_sent and not again:
                    raise EngineUnavailable(
                        error.message,
                        hint="it may have been done all the same: look before you call it again",
                    ) from error
                left = end - self.clock.monotonic()
                if left <= 0:
                    raise self._given_up(str(request), began, error) from error
                log.debug("%s: %s; trying again", request, error)
            await self.clock.sleep(min(pause, left))
        raise AssertionError("unreachable")

    def _longest_silence(self, again: bool) -> float:
        """Seconds that an answer may take which need not wait for anything.

        With `again`, half of the time is left for another connection: this one may be dead.
        """
        options = self.options
        if options.reconnect_timeout is None:
            return options.read_timeout
        silence = options.reconnect_timeout / 2 if again else options.reconnect_timeout
        return min(options.read_timeout, max(silence, _LEAST_SILENCE))

    def _patience_ends(self, since: float) -> float:
        patience = self.options.reconnect_timeout
        return float("inf") if patience is None else since + patience

    def _given_up(self, what: str, since: float, error: NoAnswer) -> EngineUnavailable:
        waited = self.clock.monotonic() - since
        return EngineUnavailable(
            f"'{what}' failed: {error.message}, tried for {waited:.1f} s",
            hint="is the engine running? Start it, or wait longer: connect(reconnect_timeout=...)",
        )

    async def once(
        self, request: Request, patience: float | None = None, total: float | None = None
    ) -> Response:
        """One try. Raises NotRunning if nothing comes for `patience` seconds, or if it takes
        longer than `total`."""
        if patience is None:
            patience = self.options.read_timeout
        async with self._requested(request, patience, total) as response:
            return Response(response.status, response.headers, await response.read())

    @asynccontextmanager
    async def _requested(
        self, request: Request, patience: float, total: float | None = None
    ) -> AsyncGenerator[aiohttp.ClientResponse, None]:
        """An answer that began well. Raises what the engine raised, or why there is no answer."""
        connecting = min(self.options.connect_timeout, patience)
        timeout = aiohttp.ClientTimeout(
            total=total, sock_connect=connecting, connect=patience, sock_read=patience
        )
        try:
            async with self._opened().request(
                request.method,
                self._at(request.path, request.query),
                data=None if request.data is None else BytesIO(request.data),
                headers=request.headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                if response.status >= 300:
                    body = await response.read()
                    raise error_of(response.status, body, response.headers, self.url)
                yield response
        except aiohttp.ClientConnectorError as error:
            raise self._nobody(error) from error
        except _LOST as error:
            raise self._lost(error) from error

    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise NotRunning(f"not connected to {self.url}")
        return self._session

    def _at(self, path: str, query: Mapping[str, Any] | None) -> URL:
        text = self.url + path
        if query:
            pairs = [pair for name, value in query.items() for pair in _pairs(name, value)]
            if pairs:
                text += "?" + "&".join(pairs)
        return URL(text, encoded=True)

    def _nobody(self, error: aiohttp.ClientConnectorError) -> PenstockError:
        if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError):
            return Misconfigured(
                f"{self.url} can't be trusted: {error}",
                hint="set SSL_CERT_FILE to the PEM file of its certificate authority",
            )
        return NoAnswer(f"no engine answers at {self.url}", was_sent=False)

    def _lost(self, error: Exception) -> NoAnswer:
        what = "took too long" if isinstance(error, TimeoutError) else "was cut off"
        return NoAnswer(f"the answer of {self.url} {what}", was_sent=True)

    # -- streams ------------------------------------------------------------------

    async def stream(
        self, path: str, query: Mapping[str, Any] | None = None, last: str = END
    ) -> AsyncGenerator[list[Event], None]:
        """Events as they come, until one of them is the last, or the engine says there are none.

        A connection that is lost is made again, from the last event on. Raises what the
        engine raised, and EngineUnavailable when it can't be reached for too long.
        """
        parser = EventParser()
        pauses, since, is_open = _pauses(), self.clock.monotonic(), False
        while True:
            try:
                async with aclosing(self._read(path, query, parser)) as reading:
                    async for events in reading:
                        pauses, is_open = _pauses(), True
                        yield events
                        if events[-1].kind in (last, END):
                            return
            except (NoAnswer, TooMany) as error:
                if is_open:
                    since, is_open = self.clock.monotonic(), False
                if self.clock.monotonic() > self._patience_ends(since):
                    if isinstance(error, TooMany):
                        raise
                    raise self._given_up(f"GET {path}", since, error) from error
                log.debug("%s: %s; coming back", path, error)
            # What was sent is not asked for again, so where it began matters no more.
            parser = EventParser(parser.last_id)
            await self.clock.sleep(next(pauses))

    async def _read(
        self, path: str, query: Mapping[str, Any] | None, parser: EventParser
    ) -> AsyncGenerator[list[Event], None]:
        headers = {"Accept": "text/event-stream"}
        if parser.last_id:
            headers["Last-Event-ID"] = parser.last_id
        request = Request("GET", path, query, headers=headers)
        async with self._requested(request, _SILENCE) as response:
            if response.status == 204:  # nothing comes after what is known already
                yield [Event(parser.last_id, END, b"")]
                return
            async for data in response.content.iter_any():
                if events := parser.feed(data):
                    yield events


def checked_url(url: str) -> str:
    """Without a slash at its end. Raises Misconfigured."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise Misconfigured(
            f"{url!r} is not the URL of an engine", hint="it looks like https://jobs.example.org"
        )
    if parts.username is not None or parts.password is not None:
        raise Misconfigured("a URL must not hold a key", hint="give the key as the token")
    return url.rstrip("/")


def trust(ca_file: Path | None) -> ssl.SSLContext | bool:
    if ca_file is None:
        return True
    try:
        return ssl.create_default_context(cafile=str(ca_file))
    except OSError as error:
        raise Misconfigured(
            f"can't use the certificates in {ca_file}: {error}", hint="it must be in PEM form"
        ) from error


def _new_socket(address: tuple[Any, ...]) -> socket.socket:
    made = socket.socket(*address[:3])
    keep_alive(made, CALLER_TIMEOUT)
    return made


def segment(text: str) -> str:
    """Any text as one part of a path."""
    return quote(text, safe="")


def _pairs(name: str, value: Any) -> list[str]:
    if value is None:
        return []
    if isinstance(value, tuple | list):
        return [pair for one in value for pair in _pairs(name, one)]
    said = str(value).lower() if isinstance(value, bool) else str(value)
    return [f"{quote(name, safe='')}={quote(said, safe='')}"]


# -- errors -----------------------------------------------------------------------


def _pauses() -> Iterator[float]:
    return backoff(_FIRST_PAUSE, _LONGEST_PAUSE, jitter=0.5)


class NoAnswer(NotRunning):
    """There is no answer: nothing listens there, or the connection was lost."""

    def __init__(self, message: str, *, was_sent: bool) -> None:
        super().__init__(message, hint="start one with 'penstock up --http', or check the URL")
        self.was_sent = was_sent


class NoSuchPart(PenstockError):
    """A part of a blob was asked for that lies beyond its end."""


class ProblemDocument(Struct, frozen=True):
    """What we read of a problem document."""

    code: str = ""
    detail: str = ""
    hint: str = ""
    field: str = ""
    problem: str = ""
    retry_after: float | None = None
    running: str = ""


def error_of(status: int, body: bytes, headers: Mapping[str, str], url: str) -> PenstockError:
    """The exception that an answer stands for."""
    try:
        told = msgspec.json.decode(body, type=ProblemDocument)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        told = ProblemDocument()
    if not told.code and status in _BY_PROXY:
        return NoAnswer(f"{url} answered {status}: no engine is behind it", was_sent=True)
    if not told.code:
        return Unavailable(
            f"{url} answered {status}, and not as an engine does",
            hint="check the URL, and any proxy in between",
        )
    if told.code == EngineUnavailable.code:
        return NoAnswer(f"{url}: {told.detail}", was_sent=True)
    facts: dict[str, object] = {"retry_after": told.retry_after, "running": told.running}
    if told.field:
        facts |= {"field": told.field, "problem": told.problem}
    if status == 401:
        hint = told.hint if told.hint and not told.hint.startswith("send ") else _KEY_HINT
        return NotAuthenticated(told.detail, hint=hint)
    if status == 416:
        return NoSuchPart(told.detail)
    error = revived(told.code, told.detail, told.hint, facts)
    if type(error) is PenstockError and status in _BY_STATUS:
        return revived(_BY_STATUS[status].code, told.detail, told.hint)
    return error


_BY_PROXY = (502, 503, 504)
"""What a proxy answers while the engine behind it is away."""
_KEY_HINT = "give a key: connect(url, token=...), or 'penstock key create' makes one"


_BY_STATUS: dict[int, type[PenstockError]] = {
    400: InvalidRequest,
    403: NotPermitted,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    422: InvalidRequest,
    429: TooMany,
    503: Unavailable,
}
"""For codes that only HTTP knows."""


# -- server-sent events -----------------------------------------------------------

_LARGEST = 16 << 20
"""Bytes of one event, beyond which the other end can't be an engine."""


class Event(Struct, frozen=True, gc=False):
    id: str
    """Where to resume after it."""
    kind: str
    """Empty for one that only tells how far the stream is."""
    data: bytes


class EventParser:
    """Cuts a stream of bytes into events, as they become whole."""

    def __init__(self, last_id: str = "") -> None:
        self.last_id = last_id
        self._rest = b""

    def feed(self, data: bytes) -> list[Event]:
        text = (self._rest + data).replace(b"\r\n", b"\n")
        *blocks, self._rest = text.split(b"\n\n")
        if len(self._rest) > _LARGEST:
            raise ValueError("an event without an end")
        return [event for block in blocks if (event := self._read(block)) is not None]

    def _read(self, block: bytes) -> Event | None:
        kind, data, told = "", [], False
        for line in block.split(b"\n"):
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            match name:
                case b"id":
                    self.last_id, told = value.decode(), True
                case b"event":
                    kind = value.decode()
                case b"data":
                    data.append(value)
        if data:
            return Event(self.last_id, kind or "message", b"\n".join(data))
        return Event(self.last_id, "", b"") if told else None
