"""A connection that has become the streams of a container.

The request asks for an upgrade, and from then on the socket is the container's: what is sent is
its input, whose end is the end of our half; what comes is its output in frames. Read as long as
somebody takes what was read; `unblock` reads on whatever happens, because an engine can't kill a
container whose output nobody reads.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import cast
from urllib.parse import urlencode

from penstock.workloads.container.engine import Chunk, EngineError, EngineUnavailable
from penstock.workloads.container.engines.docker.api import Api, Refused, container
from penstock.workloads.container.engines.docker.frames import Frames, NoFrame

HIGH_WATER = 1 << 20
"""Bytes that wait for a taker before reading stops."""
_LONGEST_HEAD = 64 << 10
_UPGRADED = (101, 200)


class Attachment(asyncio.Protocol):
    """The streams of one container; implements `Attached`."""

    def __init__(self, api: Api, gone: Callable[[Attachment], None]) -> None:
        self._api = api
        self._gone = gone
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._frames = Frames()
        self._chunks: deque[Chunk] = deque()
        self._size = 0
        self._more = asyncio.Event()
        self._over = asyncio.Event()
        self._paused = False
        self._never_pause = False
        self._nonsense: EngineUnavailable | None = None
        self._writable = asyncio.Event()
        self._writable.set()

    # -- Attached -----------------------------------------------------------------

    async def output(self) -> AsyncIterator[Chunk]:
        while True:
            while self._chunks:
                chunk = self._chunks.popleft()
                self._size -= len(chunk.data)
                self._resume()
                yield chunk
            if self._nonsense is not None:
                raise self._nonsense
            if self._over.is_set():
                return
            self._more.clear()
            await self._more.wait()

    async def send(self, data: bytes) -> None:
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write(data)
            await self._writable.wait()

    async def end_input(self) -> None:
        transport = self._transport
        if transport is not None and not transport.is_closing():
            transport.write_eof()

    def close(self) -> None:
        self._end()
        if self._transport is not None:
            self._transport.abort()

    # -- for the engine -----------------------------------------------------------

    def unblock(self) -> None:
        """Read on from now, and drop what nobody takes."""
        self._never_pause = True
        self._resume()

    async def ended(self) -> None:
        """Until the container has closed both streams, or the connection is lost."""
        await self._over.wait()

    async def upgraded(self) -> None:
        """Until the engine has agreed."""
        try:
            async with asyncio.timeout(self._api.timeout):
                await self._answered
        except TimeoutError:
            self.close()
            raise EngineUnavailable(f"the engine at {self._api.socket} does not attach") from None
        except BaseException:
            self.close()
            raise

    # -- asyncio.Protocol ---------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's does all that one can, but is none.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self._over.is_set():
            return
        if not self._answered.done():
            data = self._read_head(data)
        if not data:
            return
        try:
            self._take(self._frames.feed(data))
        except NoFrame as error:
            self._nonsense = self._api.nonsense(str(error))
            self.close()

    def eof_received(self) -> bool:
        self._end()
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._end()
        self._gone(self)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # -- inside -------------------------------------------------------------------

    def _read_head(self, data: bytes) -> bytes:
        """The answer's head is kept; what comes behind it is given back."""
        self._head += data
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if not end:
            if len(self._head) > _LONGEST_HEAD:
                self._fail(self._api.nonsense("a head without an end"))
            return b""
        words = head.split(b"\r\n", 1)[0].split(b" ", 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            self._fail(self._api.nonsense(repr(head[:100])))
            return b""
        self._status = int(words[1])
        if self._status not in _UPGRADED:
            return self._read_refusal(head, rest)
        self._answered.set_result(None)
        self._head = b""
        return rest

    def _read_refusal(self, head: bytes, rest: bytes) -> bytes:
        length = _length(head)
        if length is None:
            self._fail(Refused(self._status, f"status {self._status}"))
        elif len(rest) >= length:
            self._refuse(rest)
        return b""

    def _refuse(self, body: bytes) -> None:
        try:
            self._fail(self._api.refusal(self._status, body))
        except EngineUnavailable as nonsense:
            self._fail(nonsense)

    def _fail(self, error: EngineError) -> None:
        if not self._answered.done():
            self._answered.set_exception(error)

    def _take(self, chunks: list[Chunk]) -> None:
        if self._size > HIGH_WATER and self._never_pause:
            return
        self._chunks.extend(chunks)
        self._size += sum(len(chunk.data) for chunk in chunks)
        self._more.set()
        if self._size > HIGH_WATER and not self._never_pause and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def _resume(self) -> None:
        low = self._never_pause or self._size < HIGH_WATER // 2
        if self._paused and low and self._transport is not None:
            self._paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def _end(self) -> None:
        self._over.set()
        self._more.set()
        self._writable.set()
        if not self._answered.done():
            self._lost_before_an_answer()

    def _lost_before_an_answer(self) -> None:
        _, end, rest = self._head.partition(b"\r\n\r\n")
        if end and self._status:
            self._refuse(rest)
        why = f"the engine at {self._api.socket} closed the connection"
        self._fail(EngineUnavailable(why))


async def attach(
    api: Api, name: str, *, stdin: bool, gone: Callable[[Attachment], None]
) -> Attachment:
    """Become the streams of that container, from now on."""
    attachment = Attachment(api, gone)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(api.timeout):
            transport, _ = await loop.create_unix_connection(lambda: attachment, api.socket)
    except (OSError, TimeoutError) as error:
        why = f"the engine at {api.socket} can't be reached: {error}"
        raise EngineUnavailable(why) from error
    transport.write(_request(api, name, stdin))
    await attachment.upgraded()
    return attachment


def _request(api: Api, name: str, stdin: bool) -> bytes:
    query = urlencode({"stream": 1, "stdin": int(stdin), "stdout": 1, "stderr": 1})
    return (
        f"POST {api.prefix}{container(name, '/attach')}?{query} HTTP/1.1\r\n"
        "Host: engine\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n"
    ).encode()


def _length(head: bytes) -> int | None:
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"content-length" and value.strip().isdigit():
            return int(value)
    return None
