"""Connections of workers and clients to an engine, through a NATS server.

A connection here is what a TCP connection is elsewhere: bytes in order, both ways, or none at
all. The frames of the link travel over it as they do over TCP or TLS, so a worker keeps every
promise that it keeps there: its results are sent again, its payloads come from the engine, and
the engine hears when it goes.

Core NATS may lose a message silently. So each message has a number, and the side that misses one
ends the connection; a message on an unknown connection is answered with a close. The link connects
again, and both sides say what they hold.

Subjects, below the prefix: `up.PEER.CONNECTION` to the engine, `down.PEER.CONNECTION` from it,
`beat.PEER` for heartbeats, `reset` for all when an engine (re)starts, `engine` to ask whether one
is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import struct
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

from penstock.adapters.nats.connection import (
    NatsOptions,
    close_client,
    lost_as_not_running,
    open_client,
    token_of,
)
from penstock.core.errors import Misconfigured, NotRunning, PenstockError
from penstock.ports.bus import HEARTBEAT, Bus, Heartbeat
from penstock.ports.clock import backoff

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

log = logging.getLogger(__name__)

_HEADER = struct.Struct(">cI")
_OPEN, _ACCEPT, _DATA, _CLOSE = b"O", b"A", b"D", b"C"
_HIGH = 4 << 20
"""Bytes that may wait to be sent before the writer is asked to pause."""
_MAX_PART = 512 << 10
"""Bytes of one message at most; less if the server allows less."""
_OPEN_TIMEOUT = 5.0
_IDLE = 60.0
"""Seconds after which a connection that sends nothing is dropped."""
_SWEEP = 0.25
_ALONE_TIMEOUT = 0.25
"""Seconds that another engine has to say that it is there."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
_COME_BACK = 5.0
"""Seconds that peers have to connect again after our own connection was lost."""
_MAX_CONNECTIONS = 10_000


class NatsTransport(asyncio.Transport):
    """One end of a connection."""

    def __init__(
        self,
        client: Client,
        subject: str,
        protocol: asyncio.Protocol,
        on_end: Callable[[NatsTransport], None],
        *,
        waits: bool = False,
    ) -> None:
        """`waits`: it does not end with the connection to NATS, but when it is ended."""
        super().__init__()
        self.client, self._subject, self._protocol = client, subject, protocol
        self._waits = waits
        self._on_end = on_end
        self._unsent = bytearray()
        self._high = _HIGH
        self._is_paused = self._is_closing = self._has_ended = False
        self._sent = self._received = 0
        self._wake = asyncio.Event()
        self.heard_at = asyncio.get_running_loop().time()
        self._part = min(_MAX_PART, client.max_payload - _HEADER.size)
        self._sender = asyncio.create_task(self._send(), name=f"NATS {subject}")

    # -- what a protocol asks of it ------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def is_closing(self) -> bool:
        return self._is_closing

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high or _HIGH

    def get_write_buffer_size(self) -> int:
        return len(self._unsent)

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self._is_closing:
            return
        self._unsent += data
        self._wake.set()
        if len(self._unsent) > self._high and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def close(self) -> None:
        """Send what was written, then end it."""
        self._is_closing = True
        self._wake.set()

    def abort(self) -> None:
        self._unsent.clear()
        self.close()

    # -- the wire ------------------------------------------------------------------

    def receive(self, kind: bytes, number: int, data: bytes) -> None:
        self.heard_at = asyncio.get_running_loop().time()
        if kind == _CLOSE:
            self.end(None)
        elif kind == _DATA and not self._has_ended:
            if number != self._received:
                self.end(ConnectionError("NATS lost a message"))
                return
            self._received = (number + 1) & 0xFFFFFFFF
            self._protocol.data_received(data)

    async def _send(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._unsent:
                    part = bytes(self._unsent[: self._part])
                    del self._unsent[: len(part)]
                    header = _HEADER.pack(_DATA, self._sent)
                    self._sent = (self._sent + 1) & 0xFFFFFFFF
                    await self._publish(header + part)
                if self._is_paused:
                    self._is_paused = False
                    self._protocol.resume_writing()
                if self._is_closing:
                    self._finish(None)
                    return
        except Exception as error:  # whatever it is, the connection is of no use any more
            self._finish(error)

    async def _publish(self, data: bytes) -> None:
        try:
            await self.client.publish(self._subject, data)
            if len(data) >= self._part:  # else it would gather in the client
                await self.client.flush(int(_OPEN_TIMEOUT))
        except Exception:
            if not self._waits:
                raise

    def end(self, error: Exception | None) -> None:
        """It ended at the other side, or on the way."""
        self._sender.cancel()
        self._finish(error)

    def _finish(self, error: Exception | None) -> None:
        if not self._has_ended:
            self._has_ended = self._is_closing = True
            self._on_end(self)
            self._protocol.connection_lost(error)


def _pauses() -> Iterator[float]:
    return backoff(_FIRST_PAUSE, _LONGEST_PAUSE, jitter=0.5)


async def _say(client: Client, subject: str, kind: bytes, reply: str = "") -> None:
    import nats.errors

    with contextlib.suppress(nats.errors.Error, OSError):
        await client.publish(subject, _HEADER.pack(kind, 0), reply=reply)


def _parsed(message: Msg) -> tuple[bytes, int, bytes] | None:
    data = message.data
    if len(data) < _HEADER.size:
        return None
    kind, number = _HEADER.unpack_from(data)
    return kind, number, data[_HEADER.size :]


# -- the side that connects --------------------------------------------------------


class NatsDialer:
    """Connects a protocol to the engine behind a NATS server; a connection to NATS for each."""

    def __init__(self, options: NatsOptions, peer: str) -> None:
        """`peer` names this process on subjects: a worker's id."""
        self._options, self._peer = options, token_of(peer)
        self._closing: set[asyncio.Task[None]] = set()

    def unreachable(self) -> NotRunning:
        return NotRunning(
            f"no engine answers on {self._options.prefix}.> at {self._options}",
            hint="start one with 'penstock up --bus URL'",
        )

    async def __call__(self, protocol: asyncio.Protocol) -> None:
        """Raises NotRunning, NotAuthenticated, Misconfigured."""
        loop = asyncio.get_running_loop()
        transport: NatsTransport | None = None
        accepted: asyncio.Future[None] = loop.create_future()
        # Else asyncio tells of an exception for which nobody waited any more.
        accepted.add_done_callback(lambda done: done.cancelled() or done.exception())

        def lost() -> None:
            if transport is not None:
                transport.end(ConnectionError("the connection to NATS was lost"))
            elif not accepted.done():
                accepted.set_exception(self.unreachable())

        client = await open_client(self._options, f"penstock {self._peer}", lost)
        prefix = self._options.prefix
        name = f"{self._peer}.{secrets.token_hex(8)}"
        up, down = f"{prefix}.up.{name}", f"{prefix}.down.{name}"

        async def received(message: Msg) -> None:
            if message.headers and "Status" in message.headers:  # 503: no engine listens
                lost()
            elif message.subject.endswith(".reset"):
                if transport is not None:
                    transport.end(ConnectionError("the engine started again"))
            elif (parsed := _parsed(message)) is not None:
                if parsed[0] == _ACCEPT and not accepted.done():
                    accepted.set_result(None)
                elif transport is not None:
                    transport.receive(*parsed)
                elif parsed[0] == _CLOSE:
                    lost()

        def ended(which: NatsTransport) -> None:
            closing = loop.create_task(self._close(client, up))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

        try:
            with lost_as_not_running(self._options):
                await client.subscribe(down, cb=received)
                await client.subscribe(f"{prefix}.reset", cb=received)
            await _say(client, up, _OPEN, down)
            try:
                async with asyncio.timeout(_OPEN_TIMEOUT):
                    await accepted
            except TimeoutError:
                raise self.unreachable() from None
        except BaseException:
            await close_client(client)
            raise
        transport = NatsTransport(client, up, protocol, ended)
        protocol.connection_made(transport)

    async def _close(self, client: Client, up: str) -> None:
        if client.is_connected:
            await _say(client, up, _CLOSE)
        await close_client(client)

    async def close(self) -> None:
        """Wait until the connections that ended are gone."""
        await asyncio.gather(*self._closing, return_exceptions=True)


class NatsPulse:
    """A worker's heartbeat, from a thread with a connection of its own: see `Pulse` of the link."""

    def __init__(self, options: NatsOptions, worker_id: str, interval: float) -> None:
        self._options, self._interval = options, interval
        self._worker_id = worker_id
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._run()), name="penstock-pulse", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    async def _run(self) -> None:
        subject = f"{self._options.prefix}.beat.{token_of(self._worker_id)}"
        client: Client | None = None
        while not await asyncio.to_thread(self._stop.wait, self._interval):
            if client is None or not client.is_connected:
                with contextlib.suppress(PenstockError):
                    name = f"penstock pulse {self._worker_id}"
                    client = await open_client(self._options, name, lambda: None)
            if client is not None:
                await _say(client, subject, _DATA)
        if client is not None:
            await close_client(client)


# -- the engine's side -------------------------------------------------------------


class Accepted(Protocol):
    """A connection as the engine's link has it."""

    @property
    def protocol(self) -> asyncio.Protocol: ...

    @property
    def is_authenticated(self) -> bool: ...


class NatsListener:
    """A service: lets workers and clients in that come through a NATS server."""

    def __init__(
        self, options: NatsOptions, accept: Callable[[], Accepted], bus: Bus, *, idle: float = _IDLE
    ) -> None:
        self._options, self._accept, self._bus, self._idle = options, accept, bus, idle
        self._client: Client | None = None
        self._lost = asyncio.Event()
        self._open: dict[str, tuple[NatsTransport, Accepted]] = {}
        """By PEER.CONNECTION."""
        self._ending: set[asyncio.Task[None]] = set()
        self._deaf_until = 0.0

    async def start(self) -> None:
        """Connect, if the server is there. Raises Misconfigured, NotAuthenticated."""
        self._options.check()
        try:
            await self._connect()
        except NotRunning as error:
            log.warning("%s; trying again", error)

    async def run(self) -> None:
        """Stay connected, until cancelled."""
        loop = asyncio.get_running_loop()
        pauses, next_try = _pauses(), 0.0
        try:
            while True:
                if self._lost.is_set() and self._client is not None:
                    log.warning("lost the connection to NATS; reconnecting")
                    self._client, pauses, next_try = None, _pauses(), 0.0
                if self._client is None and loop.time() >= next_try:
                    try:
                        await self._connect()
                        log.info("connected to NATS at %s", self._options)
                    except PenstockError as error:
                        log.debug("%s", error)
                        next_try = loop.time() + next(pauses)
                self._sweep()
                if self._client is None:
                    await asyncio.sleep(_FIRST_PAUSE)
                else:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_SWEEP):
                            await self._lost.wait()
        finally:
            await self.close()

    async def _connect(self) -> None:
        lost = self._lost = asyncio.Event()
        client = await open_client(self._options, "penstock engine", lost.set)
        prefix = self._options.prefix
        try:
            await self._check_alone(client, prefix)
            with lost_as_not_running(self._options):
                await client.subscribe(f"{prefix}.engine", cb=self._answer)
                await client.subscribe(f"{prefix}.up.*.*", cb=self._receive)
                await client.subscribe(f"{prefix}.beat.*", cb=self._beat)
                await client.publish(f"{prefix}.reset", b"")
                await client.flush(int(_OPEN_TIMEOUT))
        except BaseException:
            await close_client(client)
            raise
        self._client = client

    async def _check_alone(self, client: Client, prefix: str) -> None:
        import nats.errors

        with contextlib.suppress(nats.errors.Error):
            await client.request(f"{prefix}.engine", timeout=_ALONE_TIMEOUT)
            raise Misconfigured(
                f"another engine uses the subjects {prefix}.> at {self._options}",
                hint="give each engine its own bus.prefix",
            )

    async def _answer(self, message: Msg) -> None:
        await message.respond(b"")

    async def _receive(self, message: Msg) -> None:
        client, parsed = self._client, _parsed(message)
        name = message.subject.removeprefix(f"{self._options.prefix}.up.")
        if parsed is None or client is None:
            return
        known = self._open.get(name)
        if known is not None:
            known[0].receive(*parsed)
        elif parsed[0] == _OPEN and len(self._open) < _MAX_CONNECTIONS:
            await self._let_in(client, name)
        elif parsed[0] != _CLOSE:
            await _say(client, f"{self._options.prefix}.down.{name}", _CLOSE)

    async def _let_in(self, client: Client, name: str) -> None:
        connection, down = self._accept(), f"{self._options.prefix}.down.{name}"
        self._replace(client, name.partition(".")[0])
        transport = NatsTransport(
            client,
            down,
            connection.protocol,
            lambda one: self._ended(client, name, down),
            waits=True,
        )
        self._open[name] = transport, connection
        connection.protocol.connection_made(transport)
        await _say(client, down, _ACCEPT)

    def _replace(self, client: Client, peer: str) -> None:
        """A peer that comes back has no use for what it had before our connection was lost."""
        for name, (transport, _) in [*self._open.items()]:
            if name.startswith(f"{peer}.") and transport.client is not client:
                transport.end(ConnectionError("it connected again"))

    def _ended(self, client: Client, name: str, down: str) -> None:
        self._open.pop(name, None)
        if client.is_connected:
            task = asyncio.get_running_loop().create_task(_say(client, down, _CLOSE))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def _beat(self, message: Msg) -> None:
        self._heard(message.subject.rpartition(".")[2])

    def _heard(self, peer: str) -> None:
        now, beats = asyncio.get_running_loop().time(), False
        for name, (transport, connection) in self._open.items():
            if name.startswith(f"{peer}.") and connection.is_authenticated:
                transport.heard_at, beats = now, True
        if beats:
            self._bus.publish(HEARTBEAT, [Heartbeat(unquote(peer))])

    def _sweep(self) -> None:
        """Drop who is silent. While we are deaf, nobody is: it gets time to come back after."""
        now = asyncio.get_running_loop().time()
        if self._client is None:
            self._deaf_until = now + _COME_BACK
        for name, (transport, _) in [*self._open.items()]:
            if transport.client is not self._client and now < self._deaf_until:
                self._heard(name.partition(".")[0])
            elif now - transport.heard_at > self._idle:
                transport.end(ConnectionError(f"silent for more than {self._idle:g} s"))

    async def close(self) -> None:
        for transport, _ in [*self._open.values()]:
            transport.end(None)
        await asyncio.gather(*self._ending, return_exceptions=True)
        client, self._client = self._client, None
        if client is not None:
            await close_client(client)
