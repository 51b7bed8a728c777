"""The standard streams of a container: pipes, which the shim holds open for the next worker."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Sequence

from penstock.workloads.container.engine import Chunk
from penstock.workloads.container.job import Stream

_READ = 256 << 10
_F_SETPIPE_SZ = 1031
_PIPE = 1 << 20
_BULK = 16 << 10
_FILL = 0.002
"""Seconds for a pipe to fill after it had so many bytes: a wake-up for every write of a container
would take the processor from it."""


class ContainerPipes:
    """The pipes of a container that was not started yet. As long as they are open here, a reader
    does not take silence for the end."""

    def __init__(self) -> None:
        self._stdin, writer = os.pipe()
        self.stdin: int | None = writer
        """To write to; whoever takes it sets it to None."""
        outputs = [os.pipe() for _ in Stream]
        self._readers = [reader for reader, _ in outputs]
        self._writers = [writer for _, writer in outputs]
        for reader in self._readers:
            with contextlib.suppress(OSError):  # the limit is the machine's
                fcntl.fcntl(reader, _F_SETPIPE_SZ, _PIPE)

    @property
    def ends(self) -> list[int]:
        """The container's three, and the reading ends of the last two."""
        return [self._stdin, *self._writers, *self._readers]

    def take_stdin(self) -> int | None:
        writer, self.stdin = self.stdin, None
        return writer

    def close(self) -> None:
        for fd in (*self.ends, *(() if self.stdin is None else (self.stdin,))):
            os.close(fd)


class AttachedStreams:
    """Reads the output of a container, and may write to its standard input."""

    def __init__(self, readers: Sequence[int], stdin: int | None = None) -> None:
        """The file descriptors are its own from now on."""
        self._loop = asyncio.get_running_loop()
        self._stdin = stdin
        if stdin is not None:
            os.set_blocking(stdin, False)
        self._closed = False
        self._news, self._room = asyncio.Event(), asyncio.Event()
        """Set when something can be read, and when something can be written; and by a close."""
        self._open = dict(zip(readers, Stream, strict=False))
        self._ready: list[int] = []
        for fd in readers:
            os.set_blocking(fd, False)

    async def output(self) -> AsyncIterator[Chunk]:
        for fd in self._open:
            self._listen(fd)
        try:
            while self._open:
                await self._news.wait()
                self._news.clear()
                while self._ready:
                    fd, size = self._ready.pop(), 0
                    while data := self._read(fd):
                        size += len(data)
                        yield Chunk(self._open[fd], data)
                        if self._closed:
                            return
                        if size >= _BULK and len(data) < _READ:
                            self._loop.call_later(_FILL, self._hear, fd)
                            break
                    else:
                        self._listen(fd)
        finally:
            for fd in self._open:
                self._loop.remove_reader(fd)

    def _listen(self, fd: int) -> None:
        if fd in self._open:
            self._loop.add_reader(fd, self._hear, fd)

    def _hear(self, fd: int) -> None:
        if fd in self._open:  # it may have been closed meanwhile
            self._loop.remove_reader(fd)
            self._ready.append(fd)
            self._news.set()

    def _read(self, fd: int) -> bytes:
        """Empty if there is nothing now, and at the end."""
        if fd not in self._open:
            return b""
        try:
            data = os.read(fd, _READ)
        except BlockingIOError:
            return b""
        if not data:
            self._drop(fd)
        return data

    async def send(self, data: bytes) -> None:
        view = memoryview(data)
        while view and self._stdin is not None:
            try:
                view = view[os.write(self._stdin, view[:_PIPE]) :]
            except BlockingIOError:
                self._room.clear()
                self._loop.add_writer(self._stdin, self._room.set)
                try:
                    await self._room.wait()
                finally:
                    if self._stdin is not None:
                        self._loop.remove_writer(self._stdin)
            except BrokenPipeError:
                return

    async def end_input(self) -> None:
        self._end_input()

    def close(self) -> None:
        self._closed = True
        for fd in list(self._open):
            self._drop(fd)
        self._end_input()
        self._news.set()

    def _end_input(self) -> None:
        if self._stdin is not None:
            self._loop.remove_writer(self._stdin)
            os.close(self._stdin)
            self._stdin = None
        self._room.set()

    def _drop(self, fd: int) -> None:
        if self._open.pop(fd, None):
            self._loop.remove_reader(fd)
            os.close(fd)
