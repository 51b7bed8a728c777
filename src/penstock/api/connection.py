"""One client's connection: what uvicorn leaves open is closed here.

A head must be there in time and within a size, a connection may idle only so long, and there
are only so many. One look over all connections, about once a second, keeps the times; a
request costs no timer for it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.server import ServerState

from penstock.api.body import Receive
from penstock.api.options import HttpOptions
from penstock.api.problems import ProblemReply, Refused, problem_reply
from penstock.api.reply import SECURITY, Reply

_NEVER = float("inf")
_LINGER = 5.0
"""How long the rest of a body that was refused is let run in, so that the answer is read."""


class Connection(HttpToolsProtocol):
    """Made by `protocol_with`, which gives it its options."""

    options: HttpOptions
    problem: ProblemReply
    constant_source: list[tuple[bytes, bytes]] | None = None
    constant = b""
    mail: list[tuple[asyncio.Transport, bytes]]
    """Answers that are ready, of all the server's connections, in their order."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.deadline = _NEVER
        """By when the client has to have done the next thing."""
        self._in_head = True
        self._begun = False
        self._head = 0

    # -- the connection -----------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.deadline = self.loop.time() + self.options.head_timeout
        if len(self.connections) > self.options.max_connections:
            self.refuse(503, "TOO_MANY_CONNECTIONS", "there are too many connections")

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            self._head += len(data)
        super().data_received(data)
        if self._in_head and self._head > self.options.max_head and self.parser is not None:
            self.refuse(431, "HEAD_TOO_LARGE", "the head of the request is too large")

    def look(self, now: float) -> None:
        """Now and then: close what is late."""
        if now <= self.deadline:
            return
        self.deadline = now + _LINGER
        if self.transport.is_closing():
            self.transport.abort()  # it does not even take what was left to say
        elif self._in_head and (self._begun or self._head):
            self.refuse(408, "SLOW", "the head of the request did not come in time")
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

    def send_400_response(self, msg: str) -> None:
        self.refuse(400, "MALFORMED", "this is not HTTP that can be read")

    def _unsupported_upgrade_warning(self) -> None:
        """There is nothing to upgrade to; what comes after it can't be told apart."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

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
        told = b"".join([b"%b: %b\r\n" % pair for pair in headers])
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
        mail, cls.mail = cls.mail, []
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
        super().on_message_begin()
        self.scope["penstock.connection"] = self  # type: ignore[typeddict-unknown-key]
        self._begun = True
        self.deadline = self.loop.time() + self.options.head_timeout

    def on_headers_complete(self) -> None:
        self._in_head = self._begun = False
        self._head = 0
        self.deadline = _NEVER
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True
        if self.cycle.response_complete:
            self.deadline = self.loop.time() + self.options.keep_alive

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # else another one was waiting behind it
            patience = self.options.keep_alive if self._in_head else _LINGER
            self.deadline = self.loop.time() + patience


def protocol_with(options: HttpOptions, problem: ProblemReply = problem_reply) -> type[Connection]:
    given = {"options": options, "problem": staticmethod(problem), "mail": []}
    return type("Connection", (Connection,), given)
