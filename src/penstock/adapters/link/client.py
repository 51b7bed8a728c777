"""A client's end of a link: calls a remote engine, and shares its bus.

After its first connection, a link that was lost is made again when a call or stream needs it; a
worker's at once (`keep`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
from msgspec import Raw

from penstock.adapters.link.address import Address
from penstock.adapters.link.frames import (
    OLDEST_PROTOCOL,
    PROTOCOL,
    AnyFrame,
    Bye,
    Call,
    End,
    Failure,
    FrameProtocol,
    Hello,
    Item,
    Ping,
    Pub,
    Reply,
    Stop,
    Sub,
    Unsub,
    Welcome,
    Will,
)
from penstock.adapters.link.proxy import Decode
from penstock.adapters.link.renewal import (
    HANDSHAKE_TIMEOUT,
    MAX_UNANSWERED,
    RECONNECT_TIMEOUT,
    ConnectionLost,
    Reading,
    Sending,
    job_ids,
    pauses,
    ping_interval,
)
from penstock.adapters.link.secure import Security, explained, needed, open_secure
from penstock.core.errors import (
    NotPermitted,
    NotRunning,
    PenstockError,
    Superseded,
    Unavailable,
)
from penstock.core.job import Job
from penstock.ports.bus import AnyMessage, Handler, Reader
from penstock.ports.process import CALLER_TIMEOUT, close_in_children, fileno_of

log = logging.getLogger(__name__)

T = TypeVar("T")
Dial = Callable[[asyncio.Protocol], Awaitable[None]]
"""Connects a protocol. Raises OSError or NotRunning."""
_REFUSED_PAUSE = 5.0
"""Seconds until a worker asks an engine again that refused it."""
_BUFFERED = 10_000
"""Messages kept while the link is down; a worker keeps its results itself."""
_GOODBYE = 2.0
"""Seconds that the last frames have to leave."""
_Received = Item | End | Failure | ConnectionLost
_read_job = msgspec.msgpack.Decoder(Job).decode


class Link:
    """One connection to an engine: a Bus, and a way to call its EngineApi."""

    def __init__(
        self,
        address: Address,
        *,
        token: str = "",
        will: Callable[[int], tuple[str, AnyMessage]] | None = None,
        reconnect_timeout: float | None = RECONNECT_TIMEOUT,
        security: Security | None = None,
        dial: Dial | None = None,
    ) -> None:
        """`reconnect_timeout`: seconds that a call waits for an engine that was lost; None: for
        ever. `security`: for an address of TLS. `dial`: how it connects to an address that is
        `via` something else than a socket."""
        self.address, self._security, self._dial = address, security, dial
        self._token, self._will, self._reconnect_timeout = token, will, reconnect_timeout
        self._ping_interval = ping_interval(reconnect_timeout)
        self.on_connect: Callable[[], None] = lambda: None
        """Called whenever the link has come up."""
        self.number = 0
        """The number of this connection: how many there have been."""
        self._opened: FrameProtocol | None = None
        """The connection, also while the engine has not answered the first frame yet."""
        self._protocol: FrameProtocol | None = None
        self._is_closed = False
        self._call_ids = itertools.count(1)
        self._job_ids = job_ids()
        self._calls: dict[int, asyncio.Future[Raw]] = {}
        self._streams: dict[int, asyncio.Queue[_Received]] = {}
        self._readers: dict[str, list[Reader]] = {}
        self._unsent: deque[Pub] = deque(maxlen=_BUFFERED)
        self._welcome: asyncio.Future[None] | None = None
        self._down = asyncio.Event()
        self._reconnecting: asyncio.Task[None] | None = None
        self._waiting = 0
        """Callers that wait for the connection to be made again."""
        close_in_children(self)

    def filenos(self) -> list[int]:
        return [] if self._opened is None else [fileno_of(self._opened.transport)]

    # -- connecting ---------------------------------------------------------------

    async def connect(self, patience: float = HANDSHAKE_TIMEOUT) -> None:
        """Connect once. Raises NotRunning, NotPermitted, Misconfigured.

        `patience`: seconds within which the engine must have answered.
        """
        self.address.check_private()
        self._opened = None
        self._welcome = asyncio.get_running_loop().create_future()
        self._down.clear()
        try:
            async with asyncio.timeout(patience):
                protocol = await self._open()
                boot = self._security.boot if self._security is not None else 0
                protocol.send(Hello(PROTOCOL, self._token, OLDEST_PROTOCOL, boot))
                await self._welcome
        except OSError as error:  # TimeoutError and SSLError are some
            self._abandon()
            if isinstance(error, ssl.SSLError) and (told := explained(error, self.address)):
                raise told from error
            raise self.address.unreachable() from error
        except BaseException:
            self._abandon()
            raise
        self._protocol = protocol
        self._catch_up(protocol)

    async def _open(self) -> FrameProtocol:
        loop, address = asyncio.get_running_loop(), self.address

        def make() -> FrameProtocol:
            opened = FrameProtocol(
                self._take, lambda error: self._lost(opened, error), CALLER_TIMEOUT
            )
            self._opened = opened
            return opened

        if self._dial is not None:
            protocol = make()
            await self._dial(protocol)
        elif address.path is not None:
            _, protocol = await loop.create_unix_connection(make, str(address.path))
        elif not address.tls:
            _, protocol = await loop.create_connection(make, address.host, address.port)
        else:
            protocol = make()
            await open_secure(protocol, address, needed(self._security, address))
        return protocol

    def _abandon(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.abort(ConnectionError("the handshake failed"))

    def _catch_up(self, protocol: FrameProtocol) -> None:
        self.number += 1
        if self._will is not None:
            subject, last_word = self._will(self.number)
            protocol.send(Will(subject, [last_word]))
        for subject in self._readers:
            protocol.send(Sub(subject))
        self.on_connect()
        while self._unsent:
            protocol.send(self._unsent.popleft())
        self._ping(protocol, -1)

    def _ping(self, protocol: FrameProtocol, unanswered: int) -> None:
        """Ping the engine now and then. Pings are counted, not seconds: if this process was
        stopped for a while, its engine is not to blame."""
        if protocol is not self._protocol:
            return
        unanswered = 0 if protocol.has_heard else unanswered + 1
        protocol.has_heard = False
        if unanswered == MAX_UNANSWERED:
            silence = unanswered * self._ping_interval
            protocol.abort(ConnectionLost(time.monotonic() - silence))
            return
        protocol.send(Ping())
        asyncio.get_running_loop().call_later(self._ping_interval, self._ping, protocol, unanswered)

    async def keep(self) -> None:
        """Reconnect whenever the connection is lost, until cancelled.

        Raises NotPermitted or Superseded if the engine does not know this worker any more.
        """
        while True:
            try:
                await self._up()
            except PenstockError as error:
                if self.address.tls and isinstance(error, NotPermitted | Superseded):
                    raise
                log.error("%s refuses the connection: %s", self.address, error)
                await asyncio.sleep(_REFUSED_PAUSE)
            else:
                await self._down.wait()

    async def ready(self) -> None:
        """Wait until the link is up."""
        await self._up()

    async def _connected(self, sending: Sending) -> FrameProtocol:
        """The connection, made again. Raises EngineUnavailable when the caller's time is over."""
        try:
            async with asyncio.timeout(sending.time_left()):
                return await self._up()
        except TimeoutError:
            raise sending.unavailable() from None

    async def _up(self) -> FrameProtocol:
        self._waiting += 1
        try:
            while (protocol := self._protocol) is None:
                if self._is_closed or not self.number:
                    raise NotRunning(f"not connected to {self.address}")
                if self._reconnecting is None or self._reconnecting.done():
                    self._reconnecting = asyncio.create_task(self._reconnect())
                reconnecting = self._reconnecting
                await asyncio.wait((reconnecting,))
                if not reconnecting.cancelled():
                    reconnecting.result()
            return protocol
        finally:
            self._waiting -= 1

    async def _reconnect(self) -> None:
        """Try for as long as somebody waits for it."""
        log.warning("lost the connection to %s; reconnecting", self.address)
        for pause in pauses():
            try:
                await self.connect(self._ping_interval)  # there is time for more than one try
            except Unavailable:
                await asyncio.sleep(pause)
            else:
                log.info("connected to %s again", self.address)
                return
            if not self._waiting:
                return

    def _lost(self, protocol: FrameProtocol, error: Exception | None) -> None:
        if protocol is not self._opened:
            return  # another one has taken its place
        self._opened = self._protocol = None
        self._down.set()
        if self._welcome is not None and not self._welcome.done():
            is_tls = isinstance(error, ssl.SSLError)
            self._welcome.set_exception(error if is_tls and error else self.address.unreachable())
            self._welcome.exception()  # perhaps nobody waits for it yet
        since = error.since if isinstance(error, ConnectionLost) else time.monotonic()
        for call in self._calls.values():
            if not call.done():
                call.set_exception(ConnectionLost(since))
        for queue in self._streams.values():
            queue.put_nowait(ConnectionLost(since))

    def _take(self, frame: AnyFrame) -> None:
        match frame:
            case Pub(subject, messages):
                for reader in self._readers.get(subject, ()):
                    reader.take(messages)
            case Reply(call_id, value):
                if (call := self._calls.get(call_id)) is not None and not call.done():
                    call.set_result(value)
            case Failure(0) if self._welcome is not None and not self._welcome.done():
                self._welcome.set_exception(frame.revive())
            case Failure(call_id):
                if (call := self._calls.get(call_id)) is not None and not call.done():
                    call.set_exception(frame.revive())
                if (queue := self._streams.get(call_id)) is not None:
                    queue.put_nowait(frame)
            case Item(call_id) | End(call_id):
                if (queue := self._streams.get(call_id)) is not None:
                    queue.put_nowait(frame)
            case Welcome():
                if self._welcome is not None and not self._welcome.done():
                    self._welcome.set_result(None)

    async def close(self) -> None:
        self._is_closed = True
        if self._reconnecting is not None:
            self._reconnecting.cancel()
            await asyncio.gather(self._reconnecting, return_exceptions=True)
        for readers in list(self._readers.values()):
            for reader in list(readers):
                await reader.close()
        if self._protocol is not None:
            protocol = self._protocol
            protocol.send(Bye())
            protocol.close()
            try:
                async with asyncio.timeout(_GOODBYE):
                    await self._down.wait()
            except TimeoutError:
                protocol.abort(ConnectionError("the engine does not read"))

    # -- calling ------------------------------------------------------------------

    async def call(self, method: str, decode: Decode[T], params: Mapping[str, object]) -> T:
        sending = Sending(self.address, method, params, self._reconnect_timeout, self._job_ids)
        while True:
            protocol = self._protocol or await self._connected(sending)
            try:
                return decode(await self._send(protocol, method, sending))
            except ConnectionLost as error:
                sending.lost(error.since)

    async def _send(self, protocol: FrameProtocol, method: str, sending: Sending) -> Raw:
        loop = asyncio.get_running_loop()
        call_id = next(self._call_ids)
        answer: asyncio.Future[Raw] = loop.create_future()
        self._calls[call_id] = answer
        protocol.send(Call.of(call_id, method, sending.params))
        expiry: asyncio.TimerHandle | None = None
        if (patience := sending.answer_timeout) is not None:
            expiry = loop.call_later(patience, _expire, answer, sending)
        try:
            return await answer
        except asyncio.CancelledError:
            protocol.send(Stop(call_id))
            raise
        finally:
            del self._calls[call_id]
            if expiry is not None:
                expiry.cancel()

    async def stream(
        self, method: str, decode: Decode[T], params: Mapping[str, object]
    ) -> AsyncIterator[T]:
        if method == "follow" and params.get("after_move") is None:
            # Else nobody could tell which moves were missed while the connection was lost.
            job = await self.call("get", _read_job, {"job_id": params["job_id"]})
            params = {**params, "after_move": job.version}
        reading = Reading(self.address, method, params, self._reconnect_timeout)
        while True:
            protocol = self._protocol or await self._connected(reading)
            reading.connected()
            call_id = next(self._call_ids)
            queue: asyncio.Queue[_Received] = asyncio.Queue()
            self._streams[call_id] = queue
            protocol.send(Call.of(call_id, method, reading.params, True))
            try:
                while not isinstance(frame := await queue.get(), ConnectionLost):
                    if isinstance(frame, End):
                        return
                    if isinstance(frame, Failure):
                        raise frame.revive()
                    value = decode(frame.value)
                    if reading.is_new(value):
                        yield value
                reading.lost(frame.since)
            finally:
                del self._streams[call_id]
                protocol.send(Stop(call_id))

    # -- as a Bus -----------------------------------------------------------------

    def publish(self, subject: str, messages: Sequence[AnyMessage]) -> None:
        frame = Pub(subject, list(messages))
        if self._protocol is not None:
            self._protocol.send(frame)
        else:
            self._unsent.append(frame)

    def subscribe(self, subject: str, handler: Handler) -> Reader:
        reader = Reader(subject, handler, self._forget)
        readers = self._readers.setdefault(subject, [])
        readers.append(reader)
        if len(readers) == 1 and self._protocol is not None:
            self._protocol.send(Sub(subject))
        return reader

    def _forget(self, reader: Reader) -> None:
        subject = reader.subject
        readers = self._readers.get(subject, [])
        if reader in readers:
            readers.remove(reader)
            if not readers:
                del self._readers[subject]
                if self._protocol is not None:
                    self._protocol.send(Unsub(subject))


def _expire(answer: asyncio.Future[Raw], sending: Sending) -> None:
    if not answer.done():
        answer.set_exception(sending.unavailable())
