"""The output of a container: attached while it runs, or from the log of its engine.

An attach request asks for an upgrade, and from then on the socket is the container's: what is
sent is its input, whose end is the end of our half; what comes is its output in frames. It is read
as long as somebody takes what was read; `unblock` reads on whatever happens, because an engine
can't kill a container whose output is not read.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from typing import cast
from urllib.parse import urlencode

import aiohttp

from penstock.workloads.container.engine import Chunk, EngineUnavailable
from penstock.workloads.container.engines.docker.api import Api, Query, Refused, container
from penstock.workloads.container.job import Stream

HEAD = 8
LONG_LINE = 16 << 10
"""Docker's log has longer lines in frames of this size."""
_NEWLINE = 10
_STREAMS = {0: Stream.STDOUT, 1: Stream.STDOUT, 2: Stream.STDERR}


class NoFrame(Exception):
    """These bytes are not what an attached connection carries."""


class Frames:
    """Feed it what was read. `of_log`: of Docker's log, which loses the newline of a line that was
    too long for one frame."""

    def __init__(self, *, of_log: bool = False) -> None:
        self._of_log = of_log
        self._length = 0
        self._head = b""
        self._left = 0
        self._stream = Stream.STDOUT
        self.count = 0
        """How many frames there were."""

    def feed(self, data: memoryview | bytes) -> list[Chunk]:
        """What it held, copied; neighbours of one stream are one chunk."""
        runs: list[tuple[Stream, list[memoryview]]] = []
        view = memoryview(data)
        at = 0
        while at < len(view):
            if not self._left:
                at = self._read_head(view, at)
                continue
            part = view[at : at + self._left]
            at += len(part)
            self._left -= len(part)
            if not self._left and self._breaks_line(part):
                part = memoryview(bytes(part) + b"\n")
            if runs and runs[-1][0] is self._stream:
                runs[-1][1].append(part)
            else:
                runs.append((self._stream, [part]))
        return [Chunk(stream, b"".join(parts)) for stream, parts in runs]

    def _breaks_line(self, part: memoryview) -> bool:
        return self._of_log and self._length < LONG_LINE and part[-1] != _NEWLINE

    def _read_head(self, view: memoryview, at: int) -> int:
        missing = HEAD - len(self._head)
        self._head += view[at : at + missing]
        if len(self._head) == HEAD:
            stream = _STREAMS.get(self._head[0])
            if stream is None or self._head[1:4] != b"\0\0\0":
                raise NoFrame(f"{self._head!r} is not the head of a frame")
            self._stream = stream
            self._left = self._length = int.from_bytes(self._head[4:], "big")
            self._head = b""
            self.count += 1
        return at + min(missing, len(view) - at)


HIGH_WATER = 1 << 20
"""Bytes that wait for a taker before reading stops."""
_READ = 256 << 10
"""Bytes that are read at once: more than the socket of an engine holds."""
_LONGEST_HEAD = 64 << 10
_UPGRADED = (101, 200)

log = logging.getLogger(__name__)


class Attachment(asyncio.BufferedProtocol):
    """The streams of one container; implements `AttachSession`.

    It reads into one buffer again and again, and copies each byte once, out of its frame.
    """

    _transport: asyncio.Transport

    def __init__(self, api: Api, gone: Callable[[Attachment], None]) -> None:
        self._api, self._gone = api, gone
        self._buffer = memoryview(bytearray(_READ))
        self._frames = Frames()
        self._chunks: deque[Chunk] = deque()
        self._size = 0
        self._more = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._over = asyncio.Event()
        self._paused = self._never_pause = False
        self._nonsense: EngineUnavailable | None = None

    # -- AttachSession -----------------------------------------------------------------

    async def output(self) -> AsyncIterator[Chunk]:
        while True:
            while self._chunks:
                chunk = self._chunks.popleft()
                self._size -= len(chunk.data)
                if self._size < HIGH_WATER // 2:
                    self._read_on()
                yield chunk
            if self._nonsense is not None:
                raise self._nonsense
            if self._over.is_set():
                return
            self._more.clear()
            await self._more.wait()

    async def send(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)
            await self._writable.wait()

    async def end_input(self) -> None:
        if not self._transport.is_closing():
            self._transport.write_eof()

    def close(self) -> None:
        self._over.set()
        self._more.set()
        self._writable.set()
        self._transport.abort()

    # -- for the engine -----------------------------------------------------------

    def unblock(self) -> None:
        """Read on from now, and drop what nobody takes."""
        self._never_pause = True
        self._read_on()

    async def ended(self) -> None:
        """Until the container has closed both streams, or the connection is lost."""
        await self._over.wait()

    # -- asyncio.BufferedProtocol --------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.feed(self._buffer[:nbytes])

    def eof_received(self) -> None:
        self.close()  # at once: input that it did not read would hold up a proper end for ever

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.close()
        self._gone(self)

    # -- inside -------------------------------------------------------------------

    def feed(self, data: memoryview | bytes) -> None:
        """Take what the engine sent."""
        try:
            chunks = self._frames.feed(data)
        except NoFrame as error:
            self._nonsense = self._api.nonsense(str(error))
            self.close()
            return
        if self._over.is_set() or (self._never_pause and self._size > HIGH_WATER):
            return
        self._chunks.extend(chunks)
        self._size += sum(len(chunk.data) for chunk in chunks)
        self._more.set()
        if self._size > HIGH_WATER and not self._never_pause:
            self._paused = True
            self._transport.pause_reading()

    def _read_on(self) -> None:
        if self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()


async def attach(api: Api, name: str, *, gone: Callable[[Attachment], None]) -> Attachment:
    """Become the streams of that container, from now on."""
    await api.greeted()
    loop = asyncio.get_running_loop()
    line = socket.socket(socket.AF_UNIX)
    line.setblocking(False)
    try:
        async with asyncio.timeout(api.timeout):
            await loop.sock_connect(line, str(api.socket))
            await loop.sock_sendall(line, _request(api, name))
            early = await _upgrade(api, line)
            _, attachment = await loop.create_unix_connection(
                lambda: Attachment(api, gone), sock=line
            )
    except TimeoutError:
        line.close()
        raise EngineUnavailable(f"the engine at {api.socket} does not attach") from None
    except OSError as error:
        line.close()
        why = f"the engine at {api.socket} can't be reached: {error}"
        raise EngineUnavailable(why) from error
    except BaseException:
        line.close()
        raise
    attachment.feed(early)
    return attachment


def _request(api: Api, name: str) -> bytes:
    query = urlencode({"stream": 1, "stdin": 1, "stdout": 1, "stderr": 1})
    return (
        f"POST {api.prefix}{container(name, '/attach')}?{query} HTTP/1.1\r\n"
        "Host: engine\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n"
    ).encode()


async def _upgrade(api: Api, line: socket.socket) -> bytes:
    """What came after the engine's consent. Raises Refused, EngineUnavailable."""
    receive = partial(asyncio.get_running_loop().sock_recv, line, _LONGEST_HEAD)
    received = b""
    while b"\r\n\r\n" not in received:
        if len(received) > _LONGEST_HEAD:
            raise api.nonsense("a head without an end")
        if not (data := await receive()):
            raise EngineUnavailable(f"the engine at {api.socket} closed the connection")
        received += data
    head, _, rest = received.partition(b"\r\n\r\n")
    first, *fields = head.split(b"\r\n")
    words = first.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
        raise api.nonsense(repr(head[:100]))
    status = int(words[1])
    headers = {
        name.strip().lower(): value.strip()
        for name, _, value in (field.partition(b":") for field in fields)
    }
    if status in _UPGRADED:
        if {b"content-length", b"transfer-encoding"} & headers.keys():  # a page, not a stream
            raise api.nonsense(repr(head[:100]))
        return rest
    length = headers.get(b"content-length", b"")
    if not length.isdigit():
        raise Refused(status, f"status {status}")
    while len(rest) < int(length) and (data := await receive()):
        rest += data
    raise api.refusal(status, rest)


LOG_BYTES = 32 << 20
"""Docker's log of a container drops nothing before it has this size."""
_ENTRY = 256
"""Bytes that an entry of a log has besides its text, at most."""


class LogSession:
    """Output of a started container from the log of its engine; implements `AttachSession`.

    Bytes are counted, so nothing is delivered twice and nothing is left out. Podman's log, when it
    is followed, ends before the end; so it is read once more after that.
    """

    def __init__(
        self,
        api: Api,
        name: str,
        received: Mapping[Stream, int],
        *,
        of_docker: bool,
        limit: int,
        gone: Callable[[LogSession], None],
    ) -> None:
        self._of_docker = of_docker
        self._limit = limit
        """Bytes that the log has at least before it drops anything."""
        self._api, self._path, self._gone = api, container(name, "/logs"), gone
        self._delivered = {stream: received.get(stream, 0) for stream in Stream}
        self._answer: aiohttp.ClientResponse | None = None
        self._size = 0
        self._closed = False
        self._over = asyncio.Event()

    async def output(self) -> AsyncIterator[Chunk]:
        try:
            async for chunk in self._read({}):
                yield chunk
            if self._size < self._limit:
                for query in ({"follow": 1}, {}):
                    async for chunk in self._read(query):
                        yield chunk
                return
            yield Chunk(Stream.STDERR, b"", gap=True)
            async for chunk in self._read({"follow": 1, "since": int(time.time())}, new=True):
                yield chunk
        except Refused as refused:
            log.warning("the engine has no log of %s: %s", self._path, refused)
            yield Chunk(Stream.STDERR, b"", gap=True)
        except EngineUnavailable:
            if not self._closed:
                raise
        finally:
            self._over.set()
            self._gone(self)

    async def send(self, data: bytes) -> None:
        """Its input went to whoever started it."""

    async def end_input(self) -> None: ...

    def close(self) -> None:
        self._closed = True
        self._over.set()
        if self._answer is not None:
            self._answer.content.set_exception(aiohttp.ClientConnectionError("it was closed"))

    def unblock(self) -> None:
        """Nobody waits for who reads a log."""

    async def ended(self) -> None:
        await self._over.wait()

    async def _read(self, query: Query, *, new: bool = False) -> AsyncIterator[Chunk]:
        """The log from its start, or all of it as `new`: what was not delivered yet."""
        seen = dict(self._delivered) if new else dict.fromkeys(Stream, 0)
        frames, text = Frames(of_log=self._of_docker), 0
        query = {"stdout": 1, "stderr": 1, **query}
        async with self._api.open("GET", self._path, query) as answer:
            self._answer = answer
            with self._api.sane():
                async for data in answer.content.iter_any():
                    if self._closed:
                        return
                    for chunk in self._fed(frames, data):
                        text += len(chunk.data)
                        seen[chunk.stream] += len(chunk.data)
                        missing = seen[chunk.stream] - self._delivered[chunk.stream]
                        if missing > 0:
                            self._delivered[chunk.stream] = seen[chunk.stream]
                            yield Chunk(chunk.stream, chunk.data[-missing:])
        self._size = text + frames.count * _ENTRY
        if any(seen[stream] < self._delivered[stream] for stream in Stream):
            self._size = self._limit  # its beginning is gone

    def _fed(self, frames: Frames, data: bytes) -> list[Chunk]:
        try:
            return frames.feed(data)
        except NoFrame as error:
            raise self._api.nonsense(str(error)) from None
