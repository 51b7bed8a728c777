"""The other end of a link: calls an engine elsewhere, and shares its bus.

A link that is `kept` (a worker's) reconnects by itself for as long as it is open; another
fails its callers when the connection ends.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Raw

from penstock.adapters.link.address import Address
from penstock.adapters.link.frames import (
    PROTOCOL,
    AnyFrame,
    Bye,
    Call,
    End,
    Failure,
    FrameProtocol,
    Hello,
    Item,
    Pub,
    Reply,
    Stop,
    Sub,
    Unsub,
    Welcome,
    Will,
    encode,
)
from penstock.core.errors import Misconfigured, NotRunning, PenstockError, Unavailable
from penstock.core.revival import revived
from penstock.ports.bus import AnyMessage, Handler
from penstock.ports.reader import Reader

log = logging.getLogger(__name__)

T = TypeVar("T")
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
_BUFFERED = 10_000
"""Messages kept while a kept link is down; what matters more is kept by the worker."""


class Link:
    """One connection to an engine: a Bus, and a way to call its Desk."""

    def __init__(
        self,
        address: Address,
        *,
        token: str = "",
        will: Callable[[int], tuple[str, AnyMessage]] | None = None,
    ) -> None:
        self.address = address
        self._token, self._will = token, will
        self.on_connect: Callable[[], None] = lambda: None
        """Called whenever the link has come up."""
        self.number = 0
        """How many connections there have been: which one this is."""
        self._protocol: FrameProtocol | None = None
        self._ids = itertools.count(1)
        self._calls: dict[int, asyncio.Future[Raw]] = {}
        self._streams: dict[int, asyncio.Queue[Item | End | Failure]] = {}
        self._readers: dict[str, list[Reader]] = {}
        self._unsent: deque[Pub] = deque(maxlen=_BUFFERED)
        self._welcome: asyncio.Future[None] | None = None
        self._down = asyncio.Event()
        self._up = asyncio.Event()

    # -- connecting ---------------------------------------------------------------

    async def connect(self) -> None:
        """Connect once. Raises NotRunning, NotPermitted, Misconfigured."""
        if not self.address.is_local:
            raise Misconfigured(
                f"{self.address} is not on this machine: the token and all jobs would be sent "
                "there without encryption",
                hint="connect to the engine's HTTPS address, or through a tunnel, as in "
                "'ssh -L 7077:127.0.0.1:7077 HOST', to tcp://127.0.0.1:7077",
            )
        loop = asyncio.get_running_loop()
        self._welcome = loop.create_future()
        self._down.clear()

        def make() -> FrameProtocol:
            return FrameProtocol(self._take, self._lost)

        try:
            if self.address.path is not None:
                _, protocol = await loop.create_unix_connection(make, str(self.address.path))
            else:
                _, protocol = await loop.create_connection(
                    make, self.address.host, self.address.port
                )
        except OSError as error:
            raise NotRunning(
                f"no engine answers at {self.address}",
                hint="start one with 'penstock up', or name another with --data or --connect",
            ) from error
        protocol.send(Hello(PROTOCOL, self._token))
        self._protocol = protocol
        await self._welcome
        self._catch_up(protocol)
        self._up.set()

    async def ready(self) -> None:
        """Wait until the link is up."""
        await self._up.wait()

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

    async def keep(self) -> None:
        """Reconnect whenever the connection is lost, until cancelled."""
        pause = _FIRST_PAUSE
        while True:
            if self._protocol is None:
                try:
                    await self.connect()
                    log.info("connected to %s", self.address)
                    pause = _FIRST_PAUSE
                except Unavailable:
                    await asyncio.sleep(pause)
                    pause = min(pause * 2, _LONGEST_PAUSE)
                    continue
            await self._down.wait()
            log.warning("lost the connection to %s", self.address)

    def _lost(self, error: Exception | None) -> None:
        self._protocol = None
        self._up.clear()
        self._down.set()
        lost = NotRunning(f"the connection to {self.address} was lost")
        if self._welcome is not None and not self._welcome.done():
            self._welcome.set_exception(lost)
        for call in self._calls.values():
            if not call.done():
                call.set_exception(lost)
        for call_id, queue in self._streams.items():
            queue.put_nowait(Failure(call_id, lost.code, lost.message))

    def _take(self, frame: AnyFrame) -> None:
        match frame:
            case Pub(subject, messages):
                for reader in self._readers.get(subject, ()):
                    reader.take(messages)
            case Reply(call_id, value):
                if (call := self._calls.get(call_id)) is not None and not call.done():
                    call.set_result(value)
            case Failure(0) if self._welcome is not None and not self._welcome.done():
                self._welcome.set_exception(rebuilt(frame))
            case Failure(call_id):
                if (call := self._calls.get(call_id)) is not None and not call.done():
                    call.set_exception(rebuilt(frame))
                if (queue := self._streams.get(call_id)) is not None:
                    queue.put_nowait(frame)
            case Item(call_id) | End(call_id):
                if (queue := self._streams.get(call_id)) is not None:
                    queue.put_nowait(frame)
            case Welcome():
                if self._welcome is not None and not self._welcome.done():
                    self._welcome.set_result(None)

    async def close(self) -> None:
        for readers in list(self._readers.values()):
            for reader in list(readers):
                await reader.close()
        if self._protocol is not None:
            self._protocol.send(Bye())
            self._protocol.close()
            await self._down.wait()

    # -- calling ------------------------------------------------------------------

    async def call(self, method: str, returns: type[T], /, **params: object) -> T:
        protocol = self._connected()
        call_id = next(self._ids)
        future: asyncio.Future[Raw] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        protocol.send(Call(call_id, method, Raw(encode(params))))
        try:
            value = await future
        except asyncio.CancelledError:
            protocol.send(Stop(call_id))
            raise
        finally:
            del self._calls[call_id]
        return msgspec.msgpack.decode(value, type=returns)

    async def stream(self, method: str, yields: Any, /, **params: object) -> AsyncIterator[Any]:
        protocol = self._connected()
        call_id = next(self._ids)
        queue: asyncio.Queue[Item | End | Failure] = asyncio.Queue()
        self._streams[call_id] = queue
        protocol.send(Call(call_id, method, Raw(encode(params)), stream=True))
        decode = msgspec.msgpack.Decoder(yields).decode
        try:
            while not isinstance(frame := await queue.get(), End):
                if isinstance(frame, Failure):
                    raise rebuilt(frame)
                yield decode(frame.value)
        finally:
            del self._streams[call_id]
            protocol.send(Stop(call_id))

    def _connected(self) -> FrameProtocol:
        if self._protocol is None:
            raise NotRunning(f"not connected to {self.address}")
        return self._protocol

    # -- as a Bus -----------------------------------------------------------------

    def publish(self, subject: str, messages: Sequence[AnyMessage]) -> None:
        frame = Pub(subject, list(messages))
        if self._protocol is not None:
            self._protocol.send(frame)
        else:
            self._unsent.append(frame)

    def subscribe(self, subject: str, handler: Handler, *, group: str | None = None) -> Reader:
        if group is not None:
            raise ValueError("a link has no groups: each subscriber gets everything")
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


def rebuilt(failure: Failure) -> PenstockError:
    return revived(failure.code, failure.message, failure.hint, failure.facts)
