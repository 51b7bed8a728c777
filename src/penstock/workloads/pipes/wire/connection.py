"""One peer: frames over TLS, its signs of life, why it ends; and how a connection comes about.

A frame is a length (u32), a kind (u8), and that many bytes. All numbers are little-endian.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from penstock.core.errors import Misconfigured
from penstock.ports.tls import PEER_CERTIFICATE, SecureTransport, Tls, common_name
from penstock.workloads.pipes.wire.identity import Identity, join, parse
from penstock.workloads.pipes.wire.messages import (
    HELLO_LIMITS,
    MAX_STEPS,
    PROTOCOL,
    BadFrame,
    Bye,
    Counters,
    Hello,
    Kind,
    Refused,
    decode,
    encode,
    limits,
    protocol_of,
    refusal_of,
)

_JOIN = 16 << 10
"""Up to this size, parts of a frame become one record of TLS: copying them together costs less
than one record more."""
_HEAD = struct.Struct("<IB")


def head_of(kind: Kind, size: int) -> bytes:
    return _HEAD.pack(size, kind)


class Splitter:
    """Takes bytes as they come and gives frames. A payload is its receiver's: memory of its own,
    which can be written to."""

    def __init__(self, limits: Mapping[int, int]) -> None:
        self.limits = limits
        """The kinds that may come, and how large. A change counts from the next frame on."""
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[Kind, memoryview]]:
        """The frames that are whole now. To be read to its end; raises BadFrame after the last
        good one, and then nothing more can be taken."""
        rest = self._rest
        rest += data
        while len(rest) >= _HEAD.size:
            size, number = _HEAD.unpack_from(rest)
            kind, end = self._checked(number, size), _HEAD.size + size
            if len(rest) < end:
                return
            payload = memoryview(rest[_HEAD.size : end])
            del rest[:end]
            yield kind, payload

    @property
    def within(self) -> bool:
        """Whether a frame has begun and is not whole."""
        return bool(self._rest)

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


USUAL = Terms()


class Connection(asyncio.Protocol):
    """For the thread of the event loop only. `connect` and `listen` make them."""

    peer: Hello
    """Its node id is the one in its certificate."""

    def __init__(
        self,
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
        self.sent_bytes = self.received_bytes = 0
        """Of all frames, without what TLS adds."""
        self._loop = asyncio.get_running_loop()
        self.greeted: asyncio.Future[None] = self._loop.create_future()
        """Done when the peer is known; NotConnected if it never will be."""
        self._hello, self._handler = hello, handler
        self._terms, self._counters, self._admit = terms, counters, admit
        self._limits = limits(terms.steps)
        self._splitter = Splitter(HELLO_LIMITS)
        self._transport: SecureTransport | None = None
        self._open = False
        self._pulse = Pulse(
            terms.ping, terms.silence, self._ping, self._silent, later=self._loop.call_later
        )
        self._linger: asyncio.TimerHandle | None = None
        self._gone: asyncio.Event | None = None
        """Of its socket, if there was one."""

    @property
    def rtt(self) -> float:
        """Seconds there and back, smoothed; 0 until the first answer."""
        return self._pulse.rtt

    @property
    def rtt_min(self) -> float:
        """The least of the last: the way itself, without the waiting at its ends."""
        return self._pulse.rtt_min

    @property
    def queued(self) -> int:
        """Bytes that wait for the peer to read, without those that the system has taken."""
        return self._transport.get_write_buffer_size() if self._transport else 0

    @property
    def is_stranger(self) -> bool:
        """Whether there is a socket, and it is not known who is at its other end."""
        is_gone = self.closed is not None if self._gone is None else self._gone.is_set()
        return not self._open and not is_gone

    def greet(self) -> None:
        """Say who this side is: the first word of the one that dialed."""
        if self.closed is None:
            self._write(Kind.HELLO, encode(self._hello))

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
        if self._gone is not None:
            await self._gone.wait()

    def abort(self) -> None:
        """End it without a word, and without waiting for one."""
        self._end("given up")
        if self._transport is not None:
            self._transport.abort()

    # -- what the transport calls -------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(SecureTransport, transport)
        self._gone = self._transport.gone
        if self.closed is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._pulse.heard = time.monotonic()
        self.received_bytes += len(data)
        try:
            for kind, payload in self._splitter.feed(data):
                self._take(kind, payload)
                if self.closed is not None:
                    return
        except BadFrame as bad:
            self.refuse(bad.what, bad.reason)
        except Exception as error:
            self._loop.call_exception_handler(
                {"message": "a frame could not be handled", "exception": error}
            )
            self.close(f"an error at the other end: {type(error).__name__}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._linger is not None:
            self._linger.cancel()
        reason = str(exc) if exc else "the other side closed it"
        if isinstance(exc, ssl.SSLError):
            self.give_up(*refusal_of(exc))
        elif not self._open:
            self.give_up(Refused.HANDSHAKE_BROKEN, f"before it said who it is: {reason}")
        elif self._splitter.within:
            self.give_up(Refused.TRUNCATED, f"in the middle of a frame: {reason}")
        else:
            self._end(reason)

    # -- frames ---------------------------------------------------------------------------

    def _write(self, kind: Kind, *buffers: bytes | memoryview) -> None:
        if self._transport is None:
            return
        size = sum(map(len, buffers))
        self.sent_bytes += _HEAD.size + size
        small: list[bytes | memoryview] = [head_of(kind, size)]
        for buffer in buffers:
            if len(buffer) <= _JOIN:
                small.append(buffer)
            else:
                self._transport.write(b"".join(small))
                self._transport.write(buffer)
                small = []
        self._transport.write(b"".join(small))

    def _take(self, kind: Kind, payload: memoryview) -> None:
        if kind is Kind.PING:
            self.send(Kind.PONG, payload)
        elif kind is Kind.PONG:
            if len(payload) == _NUMBER.size:
                self._pulse.answered(*_NUMBER.unpack(payload))
        elif kind is Kind.HELLO:
            self._meet(payload)
        elif kind is Kind.BYE:
            self._left(payload)
        else:
            self._handler.received(self, kind, payload)

    def _meet(self, payload: memoryview) -> None:
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
        self._splitter.limits = self._limits
        if not self.outgoing:
            self.greet()
        self._handler.connected(self)
        if self.closed is None:
            self._pulse.start()
        if not self.greeted.done():
            self.greeted.set_result(None)

    def _stranger(self, peer: Hello) -> Refusal:
        assert self._transport is not None
        shown = self._transport.get_extra_info(PEER_CERTIFICATE)
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
            if bye is not None and self._transport.is_secured:
                self._write(Kind.BYE, encode(bye))
                self._transport.finish()
            else:
                self._transport.close()
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


# -- how one comes about ------------------------------------------------------------------


async def connect(
    address: str,
    identity: Identity,
    hello: Hello,
    handler: Handler,
    terms: Terms = USUAL,
    counters: Counters | None = None,
    admit: Admit | None = None,
) -> Connection:
    """The handler was told `connected` when this returns. Raises NotConnected with the reason,
    after `terms.handshake` seconds at the latest."""
    host, port = parse(address)
    counters = Counters() if counters is None else counters
    connection = Connection(hello, handler, terms, counters, outgoing=True, admit=refusing(admit))

    def secure() -> SecureTransport:
        tls = Tls(identity.client, server_side=False)
        return SecureTransport(connection, tls, server_side=False)

    try:
        async with asyncio.timeout(terms.handshake):
            loop = asyncio.get_running_loop()
            _, made = await loop.create_connection(secure, host or "127.0.0.1", port)
            await asyncio.wait([made.secured])  # what it fails for, the connection tells
            connection.greet()
            await connection.greeted
    except asyncio.CancelledError:
        connection.abort()
        raise
    except Exception as error:
        connection.close("given up")
        await connection.wait_closed()
        if isinstance(error, NotConnected):
            raise NotConnected(f"{address}: {error.reason}", error.what) from None
        if isinstance(error, TimeoutError):
            raise NotConnected(f"{address}: no answer in {terms.handshake:g} s") from None
        if isinstance(error, OSError | ValueError):  # A host that can't even be looked up.
            raise NotConnected(f"{address}: {error}") from None
        raise
    return connection


MAX_HANDSHAKES = 64
"""Peers that are not known yet, at once. For one more, the oldest is given up: who only holds
connections open must open them faster than others need to say who they are."""


async def listen(
    address: str,
    identity: Identity,
    hello: Hello,
    handler: Handler,
    terms: Terms = USUAL,
    counters: Counters | None = None,
    admit: Admit | None = None,
) -> Listener:
    """Raises Misconfigured if the address can't be had."""
    counters = Counters() if counters is None else counters
    listener = Listener(identity, hello, handler, terms, counters, refusing(admit))
    host, port = parse(address)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        server = await loop.create_server(listener.accept, *found[0][4][:2], backlog=128)
    except (OSError, ValueError) as error:
        raise Misconfigured(f"can't listen at {address}: {error}") from None
    listener.serve(server)
    return listener


class Listener:
    """Goes on whatever a peer does. Of each node it has one connection at most."""

    address = ""
    """HOST:PORT, with the port that it was given."""

    def __init__(
        self,
        identity: Identity,
        hello: Hello,
        handler: Handler,
        terms: Terms,
        counters: Counters,
        admit: Callable[[Hello], Refusal],
    ) -> None:
        self._identity, self._hello, self._handler = identity, hello, handler
        self._terms, self._counters, self._admit = terms, counters, admit
        self._known: dict[str, Connection] = {}
        self._strangers: list[Connection] = []
        self._server: asyncio.Server | None = None

    def serve(self, server: asyncio.Server) -> None:
        self._server = server
        self.address = join(*server.sockets[0].getsockname()[:2])

    @property
    def handshakes(self) -> int:
        """Peers that are not known yet. One that was refused is among them until it has read
        why."""
        self._strangers = [one for one in self._strangers if one.is_stranger]
        return len(self._strangers)

    def close(self) -> None:
        """No new ones; those that are there stay."""
        if self._server is not None:
            self._server.close()
        for stranger in self._strangers:
            if stranger.is_stranger:
                stranger.abort()

    async def wait_closed(self) -> None:
        """Until there is no stranger any more."""
        await asyncio.gather(*(one.wait_closed() for one in self._strangers if one.is_stranger))

    def accept(self) -> SecureTransport:
        if self.handshakes >= MAX_HANDSHAKES:
            self._counters.add(Refused.TOO_MANY_HANDSHAKES)
            self._strangers.pop(0).abort()

        def admit(peer: Hello) -> Refusal:
            refusal = self._refusal(peer)
            if refusal is None:
                self._known[peer.node_id] = connection
            return refusal

        connection = Connection(
            self._hello, self._handler, self._terms, self._counters, outgoing=False, admit=admit
        )
        self._strangers.append(connection)
        seconds, loop = self._terms.handshake, asyncio.get_running_loop()
        late = loop.call_later(
            seconds, connection.refuse, Refused.HANDSHAKE_TIMEOUT, f"no HELLO in {seconds:g} s"
        )
        connection.greeted.add_done_callback(lambda _: late.cancel())
        tls = Tls(self._identity.server, server_side=True)
        return SecureTransport(connection, tls, server_side=True)

    def _refusal(self, peer: Hello) -> Refusal:
        self._known = {name: one for name, one in self._known.items() if one.closed is None}
        if peer.node_id in self._known:
            return Refused.SECOND_CONNECTION, f"{peer.node_id!r} is connected already"
        return self._admit(peer)


# -- signs of life ----------------------------------------------------------------------

_SMOOTH = 0.2
_LAST = 16


class Timer(Protocol):
    def cancel(self) -> None: ...


class Later(Protocol):
    def __call__(self, delay: float, callback: Callable[..., Any], *args: Any) -> Timer: ...


class Pulse:
    """Asks every `ping` seconds, and calls `silent` once when nothing came for `silence`.

    A process that was itself stopped does not blame others for it: what they sent meanwhile is
    read first.
    """

    def __init__(
        self,
        ping: float,
        silence: float,
        ask: Callable[[int], None],
        silent: Callable[[float], None],
        *,
        later: Later,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rtt = 0.0
        """Seconds there and back, smoothed; 0 until the first answer."""
        self.rtt_min = 0.0
        """The least of the last sixteen: the way itself, without the waiting at its ends."""
        self.heard = clock()
        """When anything last came in. Set by the owner."""
        self._later, self._clock = later, clock
        self._ping, self._silence = ping, silence
        self._ask, self._silent = ask, silent
        self._asked: dict[int, float] = {}
        self._number = 0
        self._last: deque[float] = deque(maxlen=_LAST)
        self._timers: list[Timer] = []
        self._away = float("-inf")
        """When this process last found that it had been stopped itself."""

    def start(self) -> None:
        self._timers = [self._tick_soon(), self._watch_in(self._silence)]
        self._ask_now()

    def stop(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers = []

    def answered(self, number: int) -> None:
        """A number that was not asked, or was answered before, says nothing."""
        asked = self._asked.pop(number, None)
        if asked is None:
            return
        rtt = self._clock() - asked
        self._last.append(rtt)
        self.rtt_min = min(self._last)
        self.rtt = rtt if len(self._last) == 1 else self.rtt + _SMOOTH * (rtt - self.rtt)

    def _ask_now(self) -> None:
        self._number += 1
        self._asked[self._number] = self._clock()
        self._asked.pop(self._number - _LAST, None)
        self._ask(self._number)

    def _tick_soon(self) -> Timer:
        return self._later(self._ping, self._tick, self._clock() + self._ping)

    def _tick(self, due: float) -> None:
        self._note_away(due)
        self._timers[0] = self._tick_soon()
        self._ask_now()

    def _note_away(self, due: float) -> None:
        now = self._clock()
        if now - due > self._ping:
            self._away = now

    def _watch_in(self, seconds: float) -> Timer:
        return self._later(seconds, self._watch, self._clock() + seconds)

    def _watch(self, due: float) -> None:
        self._note_away(due)
        now = self._clock()
        if now - self._away < self._ping:
            # The loop itself was away. Bytes may be waiting that nobody has read yet.
            self._timers[1] = self._watch_in(self._ping)
        elif now - self.heard >= self._silence:
            self._silent(now - self.heard)
        else:
            self._timers[1] = self._watch_in(self.heard + self._silence - now)
