"""A container as a worker sees it: what the shim tells of it, and its standard streams, pipes that
the shim holds open for the next worker."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from penstock.workloads.container.engine import Chunk, ContainerState
from penstock.workloads.container.engines.oci.shim import LOG, STARTED
from penstock.workloads.container.job import Stream

_READ = 256 << 10
_PIPE = 1 << 20
_BULK = 16 << 10
_FILL = 0.002
"""Seconds for a pipe to fill after it had so many bytes: a wake-up for every write of a container
would take the processor from it."""


class ContainerManifest(Struct, frozen=True, kw_only=True):
    """`plan.json`: what is needed to know of a container later."""

    image: str
    runtime: str
    labels: Mapping[str, str] = {}
    created: float = 0


class _LogLine(Struct):
    msg: str = ""


class Container:
    """`path` is its folder: a bundle, and files by which it is known after any crash. `pid`,
    `is_started` and `code` are as the shim told them last."""

    def __init__(self, path: Path) -> None:
        self.path, self.name = path, path.name
        self.pid: int | None = None
        self.is_started = False
        self.code: int | None = None
        self.is_known = False
        """To the shim."""
        self.is_over = False
        """Nothing more comes of it: it has ended, was removed, or the shim has died."""
        self.removal = asyncio.Lock()
        """Whoever comes second finds nothing to do."""
        self._manifest: ContainerManifest | None = None
        self._attached: list[AttachedStreams] = []
        self._readers: list[int] = []
        self._stdin: int | None = None
        self._waiting: list[asyncio.Future[None]] = []

    # -- files ------------------------------------------------------------------

    def write(self, manifest: ContainerManifest, config: bytes) -> None:
        """The manifest comes last: a folder without a whole one is no container."""
        for name, data in (("config.json", config), ("plan.json", msgspec.json.encode(manifest))):
            with open(f"{self.path}/{name}", "xb", buffering=0) as file:
                file.write(data)
        self._manifest = manifest

    @property
    def manifest(self) -> ContainerManifest | None:
        """It never changes."""
        if self._manifest is None:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                data = (self.path / "plan.json").read_bytes()
                self._manifest = msgspec.json.decode(data, type=ContainerManifest)
        return self._manifest

    @property
    def has_mark(self) -> bool:
        """Whether a shim began to start it."""
        return os.path.exists(f"{self.path}/{STARTED}")

    def complaint(self) -> str:
        """The last thing that the runtime said."""
        with contextlib.suppress(OSError):
            for line in reversed((self.path / LOG).read_bytes().splitlines()):
                with contextlib.suppress(msgspec.DecodeError):
                    if said := msgspec.json.decode(line, type=_LogLine).msg:
                        return said
        return f"The runtime ended with {self.code}."

    # -- state ------------------------------------------------------------------

    def enter(
        self, readers: Sequence[int], *, pid: int | None, is_started: bool, code: int | None
    ) -> None:
        """As the shim says; with the reading ends of its output, if another worker made it."""
        self._readers += readers
        self.is_known = True
        self.pid, self.is_started, self.code = pid, is_started, code
        self.is_over = self.is_over or code is not None
        self._wake()

    def forget(self) -> None:
        """As the shim did."""
        self.is_known = False
        self.close()
        self._wake()

    def end(self) -> None:
        self.is_over = True
        self._wake()

    @property
    def state(self) -> ContainerState:
        if not self.is_started:
            return ContainerState.CREATED
        return ContainerState.EXITED if self.is_over else ContainerState.RUNNING

    async def until(self, holds: Callable[[], bool]) -> None:
        while not holds():
            waiting = asyncio.get_running_loop().create_future()
            self._waiting.append(waiting)
            await waiting

    def _wake(self) -> None:
        while self._waiting:
            if not (waiting := self._waiting.pop()).done():
                waiting.set_result(None)

    # -- streams ----------------------------------------------------------------

    def open_pipes(self) -> list[int]:
        """The container's three ends, to be closed here once they were passed on, and the reading
        ends of the last two."""
        stdin, self._stdin = os.pipe()
        outputs = [os.pipe() for _ in Stream]
        self._readers = [reader for reader, _ in outputs]
        for reader in self._readers:
            with contextlib.suppress(OSError):  # the limit is the machine's
                fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, _PIPE)
        return [stdin, *(writer for _, writer in outputs), *self._readers]

    def attach(self, *, stdin: bool) -> AttachedStreams:
        writer = None
        if stdin:
            writer, self._stdin = self._stdin, None
        attached = AttachedStreams([os.dup(reader) for reader in self._readers], writer)
        self._attached.append(attached)
        return attached

    def end_input(self) -> None:
        """Of one that runs, if nobody has taken it."""
        if self._stdin is not None:
            os.close(self._stdin)
            self._stdin = None

    def close(self) -> None:
        """The container goes on."""
        self.end_input()
        for attached in self._attached:
            attached.close()
        self._attached.clear()
        while self._readers:
            os.close(self._readers.pop())


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
