"""One peer: frames over TLS, its signs of life, and why it ends.

A frame is a length (u32), a kind (u8), and that many bytes. All numbers are little-endian.
"""

from __future__ import annotations

import asyncio
import ssl
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol, cast

from penstock.ports.tls import Tls, common_name
from penstock.workloads.pipes.wire.frames import (
    HELLO_LIMITS,
    MAX_STEPS,
    PROTOCOL,
    BadFrame,
    Counters,
    Kind,
    Refused,
    limits,
    refusal_of,
)
from penstock.workloads.pipes.wire.messages import Bye, Hello, decode, encode, protocol_of
from penstock.workloads.pipes.wire.pulse import Pulse

_JOIN = 16 << 10
"""Up to this size, parts of a frame become one record of TLS: copying them together costs less
than one record more."""
_PIECE = 256 << 10
"""How much of a larger part is encrypted before it is handed on."""


_HEAD = struct.Struct("<IB")
_BUFFER = 64 << 10
_OWN = 16 << 10
"""From this size on, the rest of a frame is read into its own memory, not by way of the buffer."""


def head_of(kind: Kind, size: int) -> bytes:
    return _HEAD.pack(size, kind)


class Splitter:
    """Takes bytes as they come and gives frames. A payload is its receiver's: memory of its own,
    which can be written to."""

    def __init__(self, limits: Mapping[int, int]) -> None:
        self.limits = limits
        """The kinds that may come, and how large. A change counts from the next frame on."""
        self._buffer = memoryview(bytearray(_BUFFER))
        self._filled = 0
        self._kind = Kind.HELLO
        self._own: memoryview | None = None
        self._at = 0

    def get_buffer(self) -> memoryview:
        """Where the next bytes are to be written; never empty."""
        if self._own is not None:
            return self._own[self._at :]
        return self._buffer[self._filled :]

    def written(self, count: int) -> Iterator[tuple[Kind, memoryview]]:
        """The frames that are whole now. To be read to its end; raises BadFrame after the last
        good one, and then nothing more can be taken."""
        if self._own is not None:
            self._at += count
            if self._at == len(self._own):
                own, self._own = self._own, None
                yield self._kind, own
            return
        self._filled += count
        yield from self._split()

    @property
    def within(self) -> bool:
        """Whether a frame has begun and is not whole."""
        return self._own is not None or self._filled > 0

    def _split(self) -> Iterator[tuple[Kind, memoryview]]:
        buffer, filled, at = self._buffer, self._filled, 0
        while filled - at >= _HEAD.size:
            size, number = _HEAD.unpack_from(buffer, at)
            kind = self._checked(number, size)
            begin, end = at + _HEAD.size, at + _HEAD.size + size
            if end <= filled:
                at = end
                yield kind, memoryview(bytearray(buffer[begin:end]))
            elif size >= _OWN:
                self._begin_own(kind, size, buffer[begin:filled])
                at = filled
            else:
                break
        left = filled - at
        if at and left:
            buffer[:left] = bytes(buffer[at:filled])
        self._filled = left

    def _begin_own(self, kind: Kind, size: int, have: memoryview) -> None:
        self._kind, self._at = kind, len(have)
        self._own = memoryview(bytearray(size))
        self._own[: len(have)] = have

    def _checked(self, number: int, size: int) -> Kind:
        limit = self.limits.get(number)
        if limit is None:
            known = number in Kind.__members__.values()
            name = Kind(number).name if known else f"kind {number}"
            raise BadFrame(f"a frame of {name} can't come here", Refused.UNKNOWN_KIND)
        if size > limit:
            raise BadFrame(
                f"{Kind(number).name} of {size} bytes: {limit} are allowed", Refused.OVERSIZED
            )
        return Kind(number)


class Stream:
    """Both directions of one connection."""

    def __init__(self, tls: Tls) -> None:
        self.sent = self.received = 0
        """Bytes of all frames, without what TLS adds."""
        self._tls, self._splitter = tls, Splitter(HELLO_LIMITS)

    @property
    def within(self) -> bool:
        """Whether a frame has begun to come and is not whole."""
        return self._splitter.within

    def expect(self, limits: Mapping[int, int]) -> None:
        """What may come from now on, and how large. At first it is HELLO or BYE."""
        self._splitter.limits = limits

    def frames(self) -> Iterator[tuple[Kind, memoryview]]:
        """Those that are whole, of what was fed to TLS. Raises BadFrame and ssl.SSLError."""
        while count := self._tls.read(self._splitter.get_buffer()):
            self.received += count
            yield from self._splitter.written(count)

    def pack(self, kind: Kind, buffers: tuple[bytes | memoryview, ...]) -> Iterator[bytes]:
        """What to send for a frame, encrypted. To be read to its end."""
        size = sum(map(len, buffers))
        head = head_of(kind, size)
        self.sent += len(head) + size
        small: list[bytes | memoryview] = [head]
        for buffer in buffers:
            if len(buffer) <= _JOIN:
                small.append(buffer)
                continue
            self._tls.write(b"".join(small))
            small = []
            for at in range(0, len(buffer), _PIECE):
                self._tls.write(buffer[at : at + _PIECE])
                yield self._tls.take()
        if small:
            self._tls.write(b"".join(small))
            yield self._tls.take()


MAX_QUEUE = 128 << 20
LINGER = 2.0
"""Seconds that a connection which has ended waits for the peer to have read why."""
_MAX_REASON = 1000
_NUMBER = struct.Struct("<Q")

Admit = Callable[[Hello], str]
"""Why a peer that proved who it is can't come in all the same; "" lets it in."""
Refusal = tuple[Refused, str] | None


class Handler(Protocol):
    """Called by the event loop. What it raises ends the connection."""

    def connected(self, connection: Connection) -> None:
        """Before anything else of it; also for one that this side dialed."""

    def received(self, connection: Connection, kind: Kind, payload: memoryview) -> None:
        """`payload` is the handler's, memory of its own that can be written to. HELLO, PING and
        PONG do not come here; BYE does, as the last."""

    def lost(self, connection: Connection, reason: str) -> None:
        """Exactly once after `connected`, on either side's end; never from within `close`."""


class NotConnected(ConnectionError):
    """No connection came about. `what` names the refusal, if it was one."""

    def __init__(self, reason: str, what: str = "") -> None:
        super().__init__(reason)
        self.reason, self.what = reason, what


@dataclass(frozen=True)
class Terms:
    """How long, and how much."""

    ping: float = 1.0
    silence: float = 5.0
    handshake: float = 10.0
    """Seconds from a socket to a known peer."""
    steps: int = MAX_STEPS
    """Bytes of the largest STEPS frame."""
    queue: int = MAX_QUEUE
    """Bytes that may wait for a peer to read them; then it is given up."""


class Connection(asyncio.BufferedProtocol):
    """For the thread of the event loop only. `endpoints` makes them."""

    peer: Hello
    """Its node id is the one in its certificate."""

    def __init__(
        self,
        tls: Tls,
        hello: Hello,
        handler: Handler,
        terms: Terms,
        counters: Counters,
        *,
        outgoing: bool,
        admit: Callable[[Hello], Refusal],
    ) -> None:
        self.outgoing = outgoing
        """Whether this side dialed."""
        self.closed: str | None = None
        """Why it ended; None while it has not."""
        self._loop = asyncio.get_running_loop()
        self.greeted: asyncio.Future[None] = self._loop.create_future()
        """Done when the peer is known; NotConnected if it never will be."""
        self._tls, self._hello, self._handler = tls, hello, handler
        self._terms, self._counters, self._admit = terms, counters, admit
        self._limits = limits(terms.steps)
        self._buffer = memoryview(bytearray(_BUFFER))
        self._stream = Stream(tls)
        self._transport: asyncio.Transport | None = None
        self._open = False
        self._pulse = Pulse(
            terms.ping, terms.silence, self._ping, self._silent, later=self._loop.call_later
        )
        self._linger: asyncio.TimerHandle | None = None
        self._gone = asyncio.Event()

    @property
    def rtt(self) -> float:
        """Seconds there and back, smoothed; 0 until the first answer."""
        return self._pulse.rtt

    @property
    def rtt_min(self) -> float:
        """The least of the last: the way itself, without the waiting at its ends."""
        return self._pulse.rtt_min

    @property
    def sent_bytes(self) -> int:
        """Of all frames, without what TLS adds."""
        return self._stream.sent

    @property
    def received_bytes(self) -> int:
        return self._stream.received

    @property
    def queued(self) -> int:
        """Bytes that wait for the peer to read, without those that the system has taken."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    def send(self, kind: Kind, *buffers: bytes | memoryview) -> None:
        """Put a frame in the queue, and never wait. Raises ConnectionResetError if it is closed,
        and ValueError for a frame so large that the peer would end the connection for it.

        A memoryview is of bytes. What it shows has been read when this returns.
        """
        if self.closed is not None or self._transport is None:
            raise ConnectionResetError(self.closed or "not connected yet")
        size = sum(map(len, buffers))
        if size > self._limits[kind]:
            raise ValueError(f"{kind.name} of {size} bytes: {self._limits[kind]} are allowed")
        self._write(kind, *buffers)
        if self.queued > self._terms.queue:
            self.give_up(Refused.NOT_READING, f"it does not read: {self.queued} bytes wait for it")

    def close(self, reason: str) -> None:
        """Tell the peer, and end. What was sent before still goes out, if it is read soon."""
        self._end(reason, bye=Bye(reason[:_MAX_REASON]))

    def refuse(self, what: str, reason: str) -> None:
        """The peer did something wrong: it is counted, and the peer is told."""
        if self.closed is None:
            self._counters.add(what)
            self._end(reason, bye=Bye(reason[:_MAX_REASON], what), what=what)

    def give_up(self, what: str, reason: str) -> None:
        """The same for a peer that would not hear it."""
        if self.closed is None:
            self._counters.add(what)
            self._end(reason, what=what)

    async def wait_closed(self) -> None:
        """Until its socket is gone: at most LINGER seconds after `close`."""
        await self._gone.wait()

    def abort(self) -> None:
        """End it without a word, and without waiting for one."""
        self._end("given up")
        if self._transport is not None:
            self._transport.abort()

    # -- what the transport calls -------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self.closed is not None:
            self._transport.abort()
        elif self.outgoing:
            self._tls.shake()
            self._flush()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        if self.closed is not None:
            return  # Read only so that the peer gets to what it was told.
        self._pulse.heard = time.monotonic()
        try:
            self._tls.feed(self._buffer[:nbytes])
            if self._tls.ready:
                self._read()
            else:
                self._shake()
        except BadFrame as bad:
            self.refuse(bad.what, bad.reason)
        except ssl.SSLError as error:
            self._flush()
            self.give_up(*refusal_of(error))
        except Exception as error:
            self._loop.call_exception_handler(
                {"message": "a frame could not be handled", "exception": error}
            )
            self.close(f"an error at the other end: {type(error).__name__}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._gone.set()
        if self._linger is not None:
            self._linger.cancel()
        reason = str(exc) if exc else "the other side closed it"
        if not self._open:
            self.give_up(Refused.HANDSHAKE_BROKEN, f"before it said who it is: {reason}")
        elif self._stream.within:
            self.give_up(Refused.TRUNCATED, f"in the middle of a frame: {reason}")
        else:
            self._end(reason)

    # -- bytes ----------------------------------------------------------------------------

    def _shake(self) -> None:
        self._tls.shake()
        self._flush()
        if self._tls.ready:
            if self.outgoing:
                self._write(Kind.HELLO, encode(self._hello))
            self._read()

    def _read(self) -> None:
        for kind, payload in self._stream.frames():
            self._take(kind, payload)
            if self.closed is not None:
                return
        if self._tls.over and self._transport is not None:
            self._transport.close()

    def _write(self, kind: Kind, *buffers: bytes | memoryview) -> None:
        if self._transport is not None:
            for data in self._stream.pack(kind, buffers):
                self._transport.write(data)

    def _flush(self) -> None:
        if self._transport is not None and (data := self._tls.take()):
            self._transport.write(data)

    # -- frames ---------------------------------------------------------------------------

    def _take(self, kind: Kind, payload: memoryview) -> None:
        if kind is Kind.PING:
            self.send(Kind.PONG, payload)
        elif kind is Kind.PONG:
            if len(payload) == _NUMBER.size:
                self._pulse.answered(*_NUMBER.unpack(payload))
        elif kind is Kind.HELLO:
            self._greet(payload)
        elif kind is Kind.BYE:
            self._left(payload)
        else:
            self._handler.received(self, kind, payload)

    def _greet(self, payload: memoryview) -> None:
        protocol = protocol_of(payload)
        if protocol != PROTOCOL:
            self.refuse(Refused.OLD_PROTOCOL, f"protocol {protocol} is not {PROTOCOL}")
            return
        peer = decode(payload, Hello)
        refusal = self._stranger(peer) or self._admit(peer)
        if refusal is not None:
            self.refuse(*refusal)
            return
        self.peer, self._open = peer, True
        self._stream.expect(self._limits)
        if not self.outgoing:
            self._write(Kind.HELLO, encode(self._hello))
        self._handler.connected(self)
        if self.closed is None:
            self._pulse.start()
        if not self.greeted.done():
            self.greeted.set_result(None)

    def _stranger(self, peer: Hello) -> Refusal:
        shown = self._tls.peer
        proved = "" if shown is None else common_name(shown)
        if not proved or peer.node_id != proved:
            says = f"it says it is {peer.node_id!r}, and its certificate says {proved!r}"
            return Refused.NODE_ID_MISMATCH, says
        if proved == self._hello.node_id:
            return Refused.OWN_NODE_ID, f"{proved!r} is the id of both nodes"
        return None

    def _left(self, payload: memoryview) -> None:
        bye = decode(payload, Bye)
        if self._open:
            self._handler.received(self, Kind.BYE, payload)
            self._end(f"it left: {bye.reason}")
        else:
            self._end(f"it refused: {bye.reason}", what=bye.what)

    # -- signs of life, and the end -------------------------------------------------------

    def _ping(self, number: int) -> None:
        self.send(Kind.PING, _NUMBER.pack(number))

    def _silent(self, seconds: float) -> None:
        self.give_up(Refused.SILENT, f"silent for {seconds:.1f} s")

    def _end(self, reason: str, *, bye: Bye | None = None, what: str = "") -> None:
        if self.closed is not None:
            return
        self.closed = reason
        self._pulse.stop()
        if self._transport is not None:
            self._linger = self._loop.call_later(LINGER, self._transport.abort)
            if bye is not None and self._tls.ready:
                self._write(Kind.BYE, encode(bye))
                self._tls.finish()
                self._flush()
                # Not closed yet: what the peer still sends would make the system drop our BYE.
                with suppress(OSError):  # the peer is gone already
                    self._transport.write_eof()
            else:
                self._transport.close()
        else:
            self._gone.set()
        if self._open:
            self._loop.call_soon(self._handler.lost, self, reason)
        if not self.greeted.done():
            self.greeted.set_exception(NotConnected(reason, what))
            self.greeted.exception()  # Perhaps nobody waits for it any more.


def refusing(admit: Admit | None) -> Callable[[Hello], Refusal]:
    def refusal(peer: Hello) -> Refusal:
        reason = admit(peer) if admit is not None else ""
        return (Refused.NOT_ADMITTED, reason) if reason else None

    return refusal
