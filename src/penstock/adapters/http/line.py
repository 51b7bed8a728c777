"""A line to an engine's HTTP API: one session, many connections, and when to try again.

A call is repeated only where that is safe: if it changes nothing, or if the engine answers
the same call twice with the same thing. Everything else is sent once, and a caller whose
answer was lost is told so.
"""

from __future__ import annotations

import logging
import random
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec
from msgspec import Struct
from yarl import URL

from penstock.adapters.http.problems import error_of
from penstock.adapters.http.sse import Event, EventParser
from penstock.core.errors import (
    Misconfigured,
    NotRunning,
    PenstockError,
    TooMany,
    Unavailable,
)
from penstock.ports.clock import Clock, SystemClock

log = logging.getLogger(__name__)

T = TypeVar("T")
_TRIES = 4
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 5.0
_JSON = "application/json"
_LOST = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError)
END = "end"
"""The kind of event that ends a stream."""
_SILENCE = 60.0
"""Seconds without a sign of life after which a stream is taken for dead."""

encode = msgspec.json.Encoder().encode


class LineOptions(Struct, frozen=True, kw_only=True):
    """Times are in seconds."""

    ca_file: Path | None = None
    """Certificates to trust instead of those of the system."""
    connect_timeout: float = 10.0
    read_timeout: float = 60.0
    """How long an answer may take beyond what it was asked to wait."""
    patience: float = 60.0
    """How long a stream that was cut off tries to come back."""
    connections: int = 100


class Answer(Struct, frozen=True):
    status: int
    headers: Mapping[str, str]
    body: bytes

    def read(self, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(self.body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise Unavailable(
                f"what answers is no engine that we understand: {error}",
                hint="check the URL, and that both ends have the same version",
            ) from error


class Line:
    """Calls one engine by its URL, with one key."""

    def __init__(
        self, url: str, token: str, options: LineOptions, clock: Clock | None = None
    ) -> None:
        self.url = checked_url(url)
        self._options, self._clock = options, clock or SystemClock()
        self._token = token
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        options = self._options
        connector = aiohttp.TCPConnector(limit=options.connections, ssl=trust(options.ca_file))
        headers = {"Accept": "*/*"}
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

    async def get(
        self, path: str, kind: type[T], query: Mapping[str, Any] | None = None, wait: float = 0.0
    ) -> T:
        return (await self.call("GET", path, query=query, wait=wait, again=True)).read(kind)

    async def send(
        self,
        method: str,
        path: str,
        kind: type[T],
        body: object = None,
        *,
        again: bool = False,
        wait: float = 0.0,
    ) -> T:
        """With a JSON body; repeated after a lost answer only if `again` says it is safe."""
        data = None if body is None else encode(body)
        return (await self.call(method, path, data=data, again=again, wait=wait)).read(kind)

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
        tries: int = _TRIES,
    ) -> Answer:
        """Raises what the engine raised. `wait` is how long the answer was asked to take."""
        pause = _FIRST_PAUSE
        for left in range(tries - 1 if again else 0, -1, -1):
            try:
                return await self._once(method, path, query, data, headers, wait)
            except Unavailable as error:
                if not left:
                    raise
                log.debug("%s %s: %s; trying again", method, path, error)
            await self._clock.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, _LONGEST_PAUSE)
        raise AssertionError("unreachable")

    async def _once(
        self,
        method: str,
        path: str,
        query: Mapping[str, Any] | None,
        data: bytes | None,
        headers: Mapping[str, str] | None,
        wait: float,
    ) -> Answer:
        options = self._options
        timeout = aiohttp.ClientTimeout(
            total=None,
            sock_connect=options.connect_timeout,
            connect=options.connect_timeout + options.read_timeout,
            sock_read=options.read_timeout + wait,
        )
        given = dict(headers or {})
        if data is not None:
            given.setdefault("Content-Type", _JSON)
        try:
            async with self._opened().request(
                method,
                self._at(path, query),
                data=None if data is None else BytesIO(data),
                headers=given,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                body = await response.read()
        except aiohttp.ClientConnectorError as error:
            raise self._nobody(error) from error
        except _LOST as error:
            raise self._lost(error) from error
        if response.status >= 300:
            raise error_of(response.status, body, response.headers, self.url)
        return Answer(response.status, response.headers, body)

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
                hint="name the certificate that signed its own, as ca_file",
            )
        return NotRunning(
            f"no engine answers at {self.url}",
            hint="start one with 'penstock up --http', or check the URL",
        )

    def _lost(self, error: Exception) -> Unavailable:
        what = "took too long" if isinstance(error, TimeoutError) else "was cut off"
        return Unavailable(
            f"the answer of {self.url} {what}",
            hint="what was asked may have been done all the same: look before you ask again",
        )

    # -- streams ------------------------------------------------------------------

    async def stream(
        self, path: str, query: Mapping[str, Any] | None = None, last: str = END
    ) -> AsyncGenerator[list[Event], None]:
        """Events as they come, until one of them is the last, or the engine says there are none.

        A connection that is lost is made again, from the last event on. Raises what the
        engine raised, and NotRunning when it can't be reached for too long.
        """
        parser = EventParser()
        pause, since = _FIRST_PAUSE, self._clock.monotonic()
        while True:
            try:
                async with aclosing(self._read(path, query, parser)) as reading:
                    async for events in reading:
                        pause, since = _FIRST_PAUSE, self._clock.monotonic()
                        yield events
                        if events[-1].kind in (last, END):
                            return
            except (Unavailable, TooMany) as error:
                never = not parser.last_id
                if never or self._clock.monotonic() - since > self._options.patience:
                    raise
                log.debug("%s: %s; coming back", path, error)
            # What was sent is not asked for again, so where it began matters no more.
            parser = EventParser(parser.last_id)
            await self._clock.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(pause * 2, _LONGEST_PAUSE)

    async def _read(
        self, path: str, query: Mapping[str, Any] | None, parser: EventParser
    ) -> AsyncGenerator[list[Event], None]:
        options = self._options
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=options.connect_timeout, sock_read=_SILENCE
        )
        headers = {"Accept": "text/event-stream"}
        if parser.last_id:
            headers["Last-Event-ID"] = parser.last_id
        try:
            async with self._opened().get(
                self._at(path, query), headers=headers, timeout=timeout, allow_redirects=False
            ) as response:
                if response.status >= 300:
                    body = await response.read()
                    raise error_of(response.status, body, response.headers, self.url)
                if response.status == 204:  # nothing comes after what is known already
                    yield [Event(parser.last_id, END, b"")]
                    return
                async for data in response.content.iter_any():
                    if events := parser.feed(data):
                        yield events
        except aiohttp.ClientConnectorError as error:
            raise self._nobody(error) from error
        except _LOST as error:
            raise self._lost(error) from error


def checked_url(url: str) -> str:
    """Without a slash at its end. Raises Misconfigured."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
        raise Misconfigured(
            f"{url!r} is no URL of an engine", hint="it looks like https://jobs.example.org"
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
