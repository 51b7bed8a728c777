"""A connection to an engine that does not own the jobs: it answers reads, and forwards the rest.

Frames are forwarded as they came. The connection to the owner is opened for the first of them, so
a caller that only reads needs no owner.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from penstock.adapters.link.frames import (
    MAX_FRAME,
    NOT_FRAMES,
    Call,
    Failure,
    Frame,
    Hello,
    Ping,
    Pong,
    Reply,
    Stop,
    Welcome,
    decode_frame,
    encode,
    encoded,
    negotiated,
)
from penstock.adapters.link.server import Method
from penstock.core.errors import Misconfigured, PenstockError
from penstock.ports.frames import FrameBuffer, framed

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Reads = Mapping[str, Method]
_CHUNK = 1 << 16
_MAX_QUEUED = 100
"""Frames that wait for the owner."""
_PATIENCE = 10.0
"""Seconds that they wait: a takeover is shorter."""
_AGAIN = 0.1
"""Seconds after which another owner is looked for."""
_PING = encode(Ping())
_CALL, _STOP = b"\xa4Call", b"\xa4Stop"
"""How these frames begin, after their first byte."""


class Relay:
    """One connection, from its greeting on."""

    def __init__(
        self,
        streams: Streams,
        reads_of: Callable[[str], Reads | None],
        connect: Callable[[], Awaitable[Streams]],
        needs_owner: type[Exception],
    ) -> None:
        """`reads_of` finds what the holder of a token can read here; None lets the owner decide.
        `connect` connects to the owner. A read that raises `needs_owner` is forwarded."""
        self._reader, self._writer = streams
        self._reads_of, self._connect, self._needs_owner = reads_of, connect, needs_owner
        self._reads: Reads = {}
        self._forwarded: asyncio.Queue[bytes] = asyncio.Queue(_MAX_QUEUED)
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._greeting = b""
        self._owner: asyncio.StreamWriter | None = None

    async def run(self) -> None:
        """Until either side ends it, with an OSError in a group."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._take_all(tasks))
                tasks.create_task(self._forward_all(tasks))
        finally:
            if self._owner is not None:
                self._owner.transport.abort()

    # -- from the caller ----------------------------------------------------------

    async def _take_all(self, tasks: asyncio.TaskGroup) -> None:
        async for message in _messages(self._reader):
            if not self._greeting:
                await self._greet(message)
            elif not self._take(message, tasks):
                await self._forwarded.put(message)
            await self._writer.drain()

    async def _greet(self, greeting: bytes) -> None:
        self._greeting, hello = greeting, decode_frame(greeting)
        if isinstance(hello, Hello) and (reads := self._reads_of(hello.token)) is not None:
            with contextlib.suppress(Misconfigured):  # of another protocol: the owner says so
                self._send(Welcome(negotiated(hello)))
                self._reads = reads
                return
        await self._forwarded.put(b"")

    def _take(self, message: bytes, tasks: asyncio.TaskGroup) -> bool:
        """Whether it is answered here."""
        start = message[1:6]
        if start == _CALL and isinstance(call := decode_frame(message), Call):
            if call.method in self._reads and not call.stream:
                self._answering[call.id] = tasks.create_task(self._answer(call, message))
                return True
        elif start == _STOP and isinstance(stop := decode_frame(message), Stop):
            if (task := self._answering.get(stop.id)) is not None:
                task.cancel()
                return True
        elif message == _PING and self._owner is None:
            self._send(Pong())
            return True
        return False

    async def _answer(self, call: Call, message: bytes) -> None:
        try:
            self._send(Reply.of(call.id, await self._reads[call.method](call.params)))
        except self._needs_owner:
            await self._forwarded.put(message)
        except PenstockError as error:
            self._send(Failure.from_error(call.id, error))
        finally:
            del self._answering[call.id]

    def _send(self, frame: Frame) -> None:
        self._writer.write(encoded(frame))

    # -- to the owner and back ----------------------------------------------------

    async def _forward_all(self, tasks: asyncio.TaskGroup) -> None:
        message = await self._forwarded.get()
        async with asyncio.timeout(_PATIENCE):
            answers, owner = await self._connected()
        self._owner = owner
        tasks.create_task(self._pass_back(answers))
        while True:
            if message:
                owner.write(framed(message))
                await owner.drain()
            message = await self._forwarded.get()

    async def _connected(self) -> tuple[AsyncIterator[bytes], asyncio.StreamWriter]:
        """With an owner that answers the greeting: one that dies before that costs nothing."""
        while True:
            reader, owner = await self._connect()
            answers = _messages(reader)
            try:
                owner.write(framed(self._greeting))
                answer = await anext(answers)
            except OSError:
                owner.transport.abort()
                await asyncio.sleep(_AGAIN)
                continue
            except BaseException:
                owner.transport.abort()
                raise
            if not (self._reads and isinstance(decode_frame(answer), Welcome)):
                self._writer.write(framed(answer))
            return answers, owner

    async def _pass_back(self, answers: AsyncIterator[bytes]) -> None:
        async for message in answers:
            self._writer.write(framed(message))
            await self._writer.drain()


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Raises OSError at the end, and for what is no frame."""
    buffer = FrameBuffer(MAX_FRAME)
    while data := await reader.read(_CHUNK):
        try:
            for message in buffer.feed(data):
                yield message
        except NOT_FRAMES as error:
            raise ConnectionError(f"not a frame: {error}") from error
    raise ConnectionResetError("the connection has ended")
