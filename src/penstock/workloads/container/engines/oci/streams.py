"""The three streams of a container, at the worker's end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Iterator

from penstock.workloads.container.engine import Chunk
from penstock.workloads.container.engines.oci.folder import RunFolder
from penstock.workloads.container.job import Stream

_READ = 256 << 10
_F_SETPIPE_SZ = 1031
_PIPE = 1 << 20


class AttachedStreams:
    """Reads the FIFOs of a container, and may write to its standard input."""

    def __init__(self, folder: RunFolder, stdin: int | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._stdin = stdin
        self._closed = False
        self._waits: set[asyncio.Future[None]] = set()
        self._open: dict[int, Stream] = {}
        for stream in Stream:
            fd = folder.open_stream(stream, os.O_RDONLY | os.O_NONBLOCK)
            self._open[fd] = stream
            with contextlib.suppress(OSError):
                # Fewer turns between the container and us; the limit is the machine's.
                fcntl.fcntl(fd, _F_SETPIPE_SZ, _PIPE)

    async def output(self) -> AsyncIterator[Chunk]:
        while self._open:
            idle = True
            for fd, stream in list(self._open.items()):
                data = self._read(fd)
                if data:
                    idle = False
                    yield Chunk(stream, data)
                    if self._closed:
                        return
                elif data is not None:
                    self._drop(fd)
            if idle and self._open:
                await self._readable()

    async def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view and self._stdin is not None:
            try:
                view = view[os.write(self._stdin, view[:_PIPE]) :]
            except BlockingIOError:
                await self._writable(self._stdin)
            except BrokenPipeError:
                return

    async def end_input(self) -> None:
        self._end_input()

    def close(self) -> None:
        self._closed = True
        for fd in list(self._open):
            self._drop(fd)
        self._end_input()

    def _end_input(self) -> None:
        if self._stdin is not None:
            self._loop.remove_writer(self._stdin)
            os.close(self._stdin)
            self._stdin = None
        for wait in self._waits:
            _set(wait)

    def _read(self, fd: int) -> bytes | None:
        """None if there is nothing now, empty at the end."""
        if fd not in self._open:
            return None
        try:
            return os.read(fd, _READ)
        except BlockingIOError:
            return None

    def _drop(self, fd: int) -> None:
        if self._open.pop(fd, None):
            self._loop.remove_reader(fd)
            os.close(fd)

    async def _readable(self) -> None:
        with self._wait() as ready:
            for fd in self._open:
                self._loop.add_reader(fd, _set, ready)
            try:
                await ready
            finally:
                for fd in self._open:
                    self._loop.remove_reader(fd)

    async def _writable(self, fd: int) -> None:
        with self._wait() as ready:
            self._loop.add_writer(fd, _set, ready)
            try:
                await ready
            finally:
                if self._stdin == fd:
                    self._loop.remove_writer(fd)

    @contextlib.contextmanager
    def _wait(self) -> Iterator[asyncio.Future[None]]:
        """Something that also the end of the input and a close wake."""
        ready: asyncio.Future[None] = self._loop.create_future()
        self._waits.add(ready)
        try:
            yield ready
        finally:
            self._waits.discard(ready)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
