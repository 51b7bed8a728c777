"""One client's connection: uvicorn's protocol with limits on sizes, times and numbers.

A head must be there in time and within a size, a connection may idle only so long, and there
are only so many. One look over all connections, about once a second, keeps the times; a
request costs no timer for it. What every request passes is written out here, without what
uvicorn offers besides (WebSockets, access log, limits of its own).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from penstock.api.monitor import Receive
from penstock.api.options import HttpOptions
from penstock.api.problems import ProblemReply, Refused, problem_reply
from penstock.api.reply import SECURITY, Reply
from penstock.ports.engine_api import Session

log = logging.getLogger("uvicorn.error")

_ASGI = {"version": "3.0", "spec_version": "2.3"}
_NEVER = float("inf")
_LINGER = 5.0
"""Seconds to read on after a refused body, so that the client gets the answer."""


class Connection(HttpToolsProtocol):
    """Made by `protocol_with`, which gives it its options."""

    cycle: Exchange
    options: HttpOptions
    problem: ProblemReply
    constant_source: list[tuple[bytes, bytes]] | None = None
    constant = b""
    mail: list[tuple[asyncio.Transport, bytes]]
    """Replies that are ready to send, of all connections, in order."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.deadline = _NEVER
        """Deadline of the client's next step."""
        self.session: Session | None = None
        """Session of the last request, reused for the next one with the same key."""
        self.authorization = b""
        """The header that opened the session."""
        self._in_head = True
        self._begun = False
        self._head = 0

    # -- the connection -----------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.deadline = self.loop.time() + self.options.head_timeout
        if len(self.connections) > self.options.max_connections:
            self.refuse(503, "TOO_MANY_CONNECTIONS", "there are too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if (on_lost := getattr(self.cycle, "on_lost", None)) is not None:  # there may be no request
            on_lost()

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.refuse(400, "MALFORMED", "malformed HTTP")
            return
        except httptools.HttpParserUpgrade:
            # There is nothing to upgrade to; what comes after it can't be told apart.
            if self.cycle is not None:
                self.cycle.keep_alive = False
        if self._in_head and self._head > self.options.max_head and self.parser is not None:
            self.refuse(431, "HEAD_TOO_LARGE", "the request header is too large")

    def look(self, now: float) -> None:
        """Close the connection if its deadline has passed."""
        if now <= self.deadline:
            return
        self.deadline = now + _LINGER
        if self.transport.is_closing():
            self.transport.abort()  # it does not even take what was left to say
        elif self._in_head and (self._begun or self._head):
            self.refuse(408, "SLOW", "the request header took too long")
        else:
            self.transport.close()

    def refuse(self, status: int, code: str, message: str) -> None:
        """Answer without the application, and close."""
        if self.transport.is_closing():
            return
        reply = self.problem(Refused(status, code, message))
        head = [b"HTTP/1.1 %d \r\n" % status]
        head += [b"%s: %s\r\n" % pair for pair in (*SECURITY, *reply.headers)]
        head += [b"content-length: %d\r\nconnection: close\r\n\r\n" % len(reply.body)]
        self.transport.write(b"".join(head) + reply.body)
        self.transport.close()

    # -- bodies -------------------------------------------------------------------

    def body_of(self, receive: Receive, most: int) -> bytes | None:
        """The body of a request if all of it is here, as it is when it is small."""
        cycle: RequestResponseCycle = receive.__self__  # type: ignore[attr-defined]
        if cycle.more_body or cycle.disconnected or len(cycle.body) > most:
            return None
        body = bytes(cycle.body)
        cycle.body = bytearray()
        cycle.message_event.clear()
        return body

    # -- its answers --------------------------------------------------------------

    def answer(self, cycle: RequestResponseCycle, reply: Reply) -> bool:
        """Write a whole answer in one piece; False where uvicorn has to do it by its rules.

        What uvicorn does for each header of each answer is a fifth of a small request's time.
        """
        if cycle.response_started or cycle.disconnected or cycle.flow.write_paused:
            return False
        headers = reply.headers
        told = b"".join([b": ".join(pair) + b"\r\n" for pair in headers])
        if told.count(b"\n") != len(headers) or told.count(b"\r") != len(headers):
            return False
        body = reply.body
        length = b"" if reply.status == 204 else b"content-length: %d\r\n" % len(body)
        end = b"\r\n" if cycle.keep_alive else b"connection: close\r\n\r\n"
        if cycle.scope["method"] == "HEAD":
            body = b""
        begin = STATUS_LINE[reply.status]
        written = b"".join((begin, self._constant(cycle), told, length, end, body))
        self.mail.append((self.transport, written))
        if not cycle.keep_alive:
            self.send_mail()
        elif len(self.mail) == 1:
            self.loop.call_soon(self.send_mail)
        cycle.response_started = cycle.response_complete = True
        cycle.waiting_for_100_continue = False
        cycle.message_event.set()
        if not cycle.keep_alive:
            self.transport.close()
        cycle.on_response()
        return True

    @classmethod
    def send_mail(cls) -> None:
        """Send the answers that are ready, one right after the other.

        A commit answers many requests at once. Sent while the next answer is being made, each
        would find its reader asleep, and waking it costs more than the sending.
        """
        mail = cls.mail.copy()
        cls.mail.clear()  # not replaced: a class that changes is slow for a while
        for transport, written in mail:
            if not transport.is_closing():
                transport.write(written)

    def _constant(self, cycle: RequestResponseCycle) -> bytes:
        """The headers of every answer, which change with the second."""
        kind = type(self)
        if kind.constant_source is not cycle.default_headers:
            kind.constant_source = cycle.default_headers
            kind.constant = b"".join([b"%b: %b\r\n" % pair for pair in cycle.default_headers])
        return kind.constant

    # -- its requests -------------------------------------------------------------

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self.expect_100_continue = False
        self._begun = True
        self.deadline = self.loop.time() + self.options.head_timeout

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._in_head = self._begun = False
        self._head = 0
        self.deadline = _NEVER
        parser = self.parser
        url = httptools.parse_url(self.url)
        version = parser.get_http_version()
        scope: dict[str, Any] = {
            "type": "http",
            "asgi": _ASGI,
            "http_version": version,
            "method": parser.get_method().decode("ascii"),
            "path": unquote(url.path.decode("ascii")),
            "raw_path": url.path,
            "query_string": url.query or b"",
            "headers": self.headers,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "root_path": "",
            "penstock.connection": self,
        }
        before: RequestResponseCycle | None = self.cycle
        keep_alive = version != "1.0" and parser.should_keep_alive()
        self.cycle = cycle = Exchange(self, scope, keep_alive)
        if before is None or before.response_complete:
            self._start_asgi_task(cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, self.app))

    def on_body(self, body: bytes) -> None:
        cycle = self.cycle
        if not cycle.response_complete and cycle.on_lost is None:
            cycle.body += body
            if len(cycle.body) > HIGH_WATER_LIMIT:
                self.flow.pause_reading()
            cycle.message_event.set()

    def on_message_complete(self) -> None:
        self._in_head = True
        cycle = self.cycle
        if cycle.response_complete:
            self.deadline = self.loop.time() + self.options.keep_alive
        else:
            cycle.more_body = False
            cycle.message_event.set()

    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.pipeline:
                self._start_asgi_task(*self.pipeline.pop())
        if self.cycle.response_complete:  # else another one was waiting behind it
            patience = self.options.keep_alive if self._in_head else _LINGER
            self.deadline = self.loop.time() + patience


class Exchange(RequestResponseCycle):
    """One request and its answer."""

    logger, access_log = log, False
    disconnected = response_started = response_complete = False
    more_body = True
    chunked_encoding = None
    expected_content_length = 0
    on_lost: Callable[[], None] | None = None

    def __init__(self, connection: Connection, scope: dict[str, Any], keep_alive: bool) -> None:
        self.scope = scope  # type: ignore[assignment]
        self.transport, self.flow = connection.transport, connection.flow
        self.default_headers = connection.server_state.default_headers
        self.on_response = connection.on_response_complete
        self.message_event = asyncio.Event()
        self.keep_alive = keep_alive
        self.waiting_for_100_continue = connection.expect_100_continue
        self.body = bytearray()

    def watch(self, on_lost: Callable[[], None] | None) -> None:
        """Call this when the client disconnects; what it sends until then is dropped. None ends
        that."""
        self.on_lost = on_lost
        if on_lost is not None:
            self.flow.resume_reading()
            if self.disconnected:
                on_lost()


def protocol_with(options: HttpOptions, problem: ProblemReply = problem_reply) -> type[Connection]:
    given = {"options": options, "problem": staticmethod(problem), "mail": []}
    return type("Connection", (Connection,), given)
