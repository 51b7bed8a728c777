"""What crosses a link: length-framed msgpack, both ways.

A frame is four bytes of length and then one of the values below. `Pub` carries bus traffic,
`Call` asks for something by name, and `Item` streams an answer that has no fixed length.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, Self, cast

import msgspec
from msgspec import Raw, Struct

from penstock.core.errors import Misconfigured, PenstockError, revived
from penstock.ports.bus import AnyMessage
from penstock.ports.frames import FrameBuffer, framed
from penstock.ports.process import keep_alive

PROTOCOL = 4
OLDEST_PROTOCOL = 4
"""The protocols that are spoken: from this one to PROTOCOL."""
MAX_FRAME = 128 << 20
MAX_GREETING = 4 << 10
"""Bytes of the first frame, before the client is authenticated."""


class Frame(Struct, frozen=True, array_like=True, tag=True):
    @classmethod
    def of(cls, *fields: Any) -> Self:
        """To be sent: what is given for a Raw field is encoded with the frame."""
        return cls(*fields)


class Hello(Frame, frozen=True):
    """The first frame of a connection."""

    protocol: int
    """The newest that the client speaks."""
    token: str = ""
    oldest: int = 0
    """The oldest that it speaks; 0: `protocol` only."""
    boot: int = 0
    """How often a worker with a certificate was started: a newer process replaces an older one."""


def negotiated(hello: Hello) -> int:
    """The newest protocol that both sides speak. Raises Misconfigured."""
    protocol = min(hello.protocol, PROTOCOL)
    if protocol >= max(OLDEST_PROTOCOL, hello.oldest or hello.protocol):
        return protocol
    theirs = f"{hello.oldest or hello.protocol} to {hello.protocol}"
    ours = f"{OLDEST_PROTOCOL} to {PROTOCOL}"
    is_old = hello.protocol < OLDEST_PROTOCOL
    raise Misconfigured(
        f"this client or worker is too {'old' if is_old else 'new'}: it speaks the link protocols "
        f"{theirs}, the engine {ours}",
        hint=f"install a newer Penstock {'here' if is_old else 'where the engine runs'}",
    )


class Welcome(Frame, frozen=True):
    protocol: int


class Trust(Frame, frozen=True):
    """A first frame over TLS: asks for the authority of the engine's certificate."""


class Trusted(Frame, frozen=True):
    """Answers Trust. To be believed if it is the one that the join token names."""

    authority: bytes
    """PEM."""


class Join(Frame, frozen=True):
    """A first frame over TLS: buys a certificate with a join token."""

    protocol: int
    token_id: str
    secret: str
    worker_id: str
    request: bytes
    """A certificate signing request, DER."""


class Joined(Frame, frozen=True):
    """Answers Join."""

    certificate: bytes
    """PEM."""


class Sub(Frame, frozen=True):
    subject: str


class Unsub(Frame, frozen=True):
    subject: str


class Pub(Frame, frozen=True):
    subject: str
    messages: list[AnyMessage]


class Will(Frame, frozen=True):
    """Published by the server if the connection ends without a Bye."""

    subject: str
    messages: list[AnyMessage]


class Bye(Frame, frozen=True):
    pass


class Call(Frame, frozen=True):
    id: int
    method: str
    params: Raw
    stream: bool = False


class Reply(Frame, frozen=True):
    id: int
    value: Raw


class Item(Frame, frozen=True):
    """One value of a stream."""

    id: int
    value: Raw


class End(Frame, frozen=True):
    id: int


class Stop(Frame, frozen=True):
    """Cancels a call or stream."""

    id: int


class Ping(Frame, frozen=True):
    """Asks whether the engine is there, through whatever stands between."""


class Pong(Frame, frozen=True):
    """Answers a Ping."""


class Failure(Frame, frozen=True):
    id: int
    code: str
    message: str
    hint: str = ""
    facts: Mapping[str, Any] = {}

    @classmethod
    def from_error(cls, call_id: int, error: PenstockError) -> Failure:
        return cls(call_id, error.code, error.message, error.hint, error.facts)

    def revive(self) -> PenstockError:
        """The error, to be raised."""
        return revived(self.code, self.message, self.hint, self.facts)


AnyFrame = (
    Hello
    | Welcome
    | Trust
    | Trusted
    | Join
    | Joined
    | Sub
    | Unsub
    | Pub
    | Will
    | Bye
    | Call
    | Reply
    | Item
    | End
    | Stop
    | Ping
    | Pong
    | Failure
)

encode = msgspec.msgpack.Encoder().encode
decode_frame = msgspec.msgpack.Decoder(AnyFrame).decode


NOT_FRAMES = (ValueError, msgspec.MsgspecError, RecursionError)
"""Raised for bytes that are none."""


def encoded(frame: Frame) -> bytes:
    return framed(encode(frame))


class FrameProtocol(asyncio.Protocol):
    """Cuts a byte stream into frames and hands them over, in order."""

    def __init__(
        self,
        on_frame: Callable[[AnyFrame], None],
        on_lost: Callable[[Exception | None], None],
        unacknowledged: float,
    ) -> None:
        """`unacknowledged`: seconds that what was sent may be, before the connection ends."""
        self._on_frame, self._on_lost = on_frame, on_lost
        self._unacknowledged = unacknowledged
        self.has_heard = False
        """Whether anything was received since this was last set to False."""
        self.buffer = FrameBuffer(MAX_FRAME)
        self._writable = asyncio.Event()
        self._writable.set()
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(high=4 << 20)
        if (connection := transport.get_extra_info("socket")) is not None:
            keep_alive(connection, self._unacknowledged)

    def data_received(self, data: bytes) -> None:
        self.has_heard = True
        messages = self.buffer.feed(data)
        while True:
            try:
                if (message := next(messages, None)) is None:
                    return
                frame = decode_frame(message)
            except NOT_FRAMES as error:
                self.abort(error)
                return
            self._on_frame(frame)

    def send(self, frame: Frame) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(encoded(frame))

    async def sendable(self) -> None:
        """Wait while the other side is too slow to read."""
        await self._writable.wait()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def abort(self, error: Exception) -> None:
        if self.transport is not None:
            self.transport.abort()
        self._on_lost(error)

    def connection_lost(self, error: Exception | None) -> None:
        self._writable.set()
        self.transport = None
        self._on_lost(error)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()
