"""HTTP as bytes: requests to be sent again and again, and how to see where a reply ends.

No library, because its own cost would be measured along. It knows only what the servers that
are measured here send: lower-case header names, a length or chunks.
"""

from __future__ import annotations

import re
import select
import socket
from dataclasses import dataclass, field

_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)")
_LAST_CHUNK = b"0\r\n\r\n"
_AT_ONCE = 1 << 18


class BadReply(Exception):
    pass


def request(method: str, path: str, token: str, body: str = "", kind: str = "") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n"
    if body:
        head += f"Content-Type: {kind or 'application/json'}\r\nContent-Length: {len(body)}\r\n"
    return f"{head}\r\n{body}".encode("ascii")


@dataclass(slots=True, eq=False)
class Line:
    """One connection with at most one request under way."""

    socket: socket.socket
    since: float = 0.0
    """When the request under way was sent."""
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    status: bytes = b""
    missing: int = -1
    """Bytes of the reply that are not here yet; below zero, it has no length."""
    parts: list[bytes] = field(default_factory=list)

    @classmethod
    def to(cls, address: tuple[str, int]) -> Line:
        connected = socket.create_connection(address)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.setblocking(False)
        return cls(connected)

    def ask(self, sent: bytes, now: float) -> bool:
        """Begin a request; whether all of it went out at once."""
        self.since, self.status, self.missing = now, b"", -1
        self.parts.clear()
        self.unsent = memoryview(sent)
        return self.push()

    def push(self) -> bool:
        """Send more of the request, if there is more; whether none is left."""
        while self.unsent:
            try:
                count = self.socket.send(self.unsent)
            except BlockingIOError:
                return False
            self.unsent = self.unsent[count:]
        return True

    def take(self) -> bool:
        """Read what is there; whether the reply is complete. Its text is kept if in chunks."""
        data = self.socket.recv(_AT_ONCE)
        if not data:
            raise BadReply("the server hung up")
        if self.status:
            return self._more(data)
        self.status = data[9:12]
        body = data.find(b"\r\n\r\n") + 4
        if body < 4:
            raise BadReply(f"not a head: {data[:200]!r}")
        if found := _LENGTH.search(data, 0, body):
            self.missing = body + int(found[1])
        return self._more(data)

    def _more(self, data: bytes) -> bool:
        if self.missing >= 0:
            self.missing -= len(data)
            return self.missing <= 0
        self.parts.append(data)
        return b"".join(self.parts[-6:]).endswith(_LAST_CHUNK)


class Lines:
    """Several connections, and which of them have something to say."""

    def __init__(self, address: tuple[str, int], count: int) -> None:
        self._poll = select.epoll()
        self.all = [Line.to(address) for _ in range(count)]
        self._of = {line.socket.fileno(): line for line in self.all}
        for handle in self._of:
            self._poll.register(handle, select.EPOLLIN)

    def ask(self, line: Line, sent: bytes, now: float) -> None:
        if not line.ask(sent, now):
            self._poll.modify(line.socket.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def ready(self, timeout: float = -1) -> list[Line]:
        """Those that can be read now; what waits to be written is written on the way."""
        found = []
        for handle, event in self._poll.poll(timeout):
            line = self._of[handle]
            if event & select.EPOLLOUT and line.push():
                self._poll.modify(handle, select.EPOLLIN)
            if event & ~select.EPOLLOUT:
                found.append(line)
        return found

    def close(self) -> None:
        for line in self.all:
            line.socket.close()
        self._poll.close()
