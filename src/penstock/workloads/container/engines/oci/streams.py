"""A container's streams, and the process that starts it so that it outlives the worker.

The launcher is a shell, which every machine has and which is there in a millisecond. It runs the
runtime, writes down its exit code, and then stands still until the container is removed: it holds
the reading ends of the FIFOs, so that what was written last is not lost with the writers.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import os
import signal
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from msgspec import Struct

from penstock.workloads.container.engine import Chunk
from penstock.workloads.container.engines.oci.folder import RunFolder
from penstock.workloads.container.job import Stream

_SCRIPT = """\
cd "$1" && echo $$ >launcher || exit 1
groups=$2
shift 2
(
    for group in $groups; do echo 0 >"$group/cgroup.procs" || exit 1; done
    exec "$@"
)
code=$?
exec 3<stdout 4<stderr 0<&- 1>&- 2>&-
echo $code >status
while :; do kill -STOP $$; done
"""
_LAYERED = """\
cd "$1" || exit 1
mount -t overlay -o lowerdir=lower,upperdir=upper,workdir=work overlay rootfs || exit 1
shift
exec "$@"
"""
"""In the layer's folder, and in a mount namespace that ends with the container."""
_ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
_SIGNALS = [*(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})]
_CLONE_NEWNS = 0x20000
_MS_REC, _MS_SLAVE = 0x4000, 1 << 19
_MNT_DETACH = 2


class Streams(Struct, frozen=True):
    """File descriptors for the container's standard streams."""

    stdin: int
    stdout: int
    stderr: int


class Launch:
    """Spawns launchers.

    crun refuses a machine that has cgroups of version 1 and 2 side by side. There `hidden` is
    the mount of version 2: one thread has a mount namespace of its own in which it is not
    mounted, and what is spawned from it inherits that. It costs nothing at each start.
    """

    def __init__(self, hidden: str = "") -> None:
        self._hidden = hidden
        self._thread = ThreadPoolExecutor(1, "penstock-launch", initializer=self._hide)

    def spawn(
        self, folder: Path, groups: Sequence[str], command: Sequence[str], streams: Streams
    ) -> asyncio.Future[int]:
        """The PID of a launcher that runs the command in these cgroups, or an OSError. The
        streams are used until it is known."""
        args = [_SCRIPT, "penstock-launcher", str(folder), " ".join(groups), *command]
        loop = asyncio.get_running_loop()
        if self._hidden:
            return loop.run_in_executor(self._thread, _spawn, args, streams)
        spawned: asyncio.Future[int] = loop.create_future()
        try:
            spawned.set_result(_spawn(args, streams))
        except OSError as error:
            spawned.set_exception(error)
        return spawned

    def close(self) -> None:
        self._thread.shutdown(wait=True)

    def _hide(self) -> None:
        if not self._hidden:
            return
        libc = ctypes.CDLL(None, use_errno=True)
        _done(libc.unshare(_CLONE_NEWNS), "unshare")
        _done(libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None), "mount")
        _done(libc.umount2(os.fsencode(self._hidden), _MNT_DETACH), "umount")


def layered(layer: str, command: list[str]) -> list[str]:
    """The command with a folder's writable layer mounted, or as it is if there is none."""
    if not layer:
        return command
    return ["unshare", "--mount", "sh", "-c", _LAYERED, "sh", layer, *command]


def _spawn(args: list[str], streams: Streams) -> int:
    return os.posix_spawn(
        "/bin/sh",
        ["sh", "-c", *args],
        _ENV,
        file_actions=[
            (os.POSIX_SPAWN_DUP2, streams.stdin, 0),
            (os.POSIX_SPAWN_DUP2, streams.stdout, 1),
            (os.POSIX_SPAWN_DUP2, streams.stderr, 2),
        ],
        # A Ctrl-C at the worker's terminal is not the container's.
        setsid=True,
        setsigmask=(),
        # Python ignores SIGPIPE, and a worker in the background perhaps others.
        setsigdef=_SIGNALS,
    )


def _done(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


_READ = 256 << 10
_F_SETPIPE_SZ = 1031
_PIPE = 1 << 20
_BULK = 16 << 10
_FILL = 0.002
"""Seconds for a pipe to fill after it had so many bytes: a wake-up for every write of a container
would take the processor from it."""


class AttachedStreams:
    """Reads the FIFOs of a container, and may write to its standard input."""

    def __init__(self, folder: RunFolder, stdin: int | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._stdin = stdin
        self._closed = False
        self._news, self._room = asyncio.Event(), asyncio.Event()
        """Set when something can be read, and when something can be written; and by a close."""
        self._open: dict[int, Stream] = {}
        self._ready: list[int] = []
        self._is_large = True
        for stream in Stream:
            fd = folder.open_stream(stream, os.O_RDONLY | os.O_NONBLOCK)
            self._open[fd] = stream
            try:
                fcntl.fcntl(fd, _F_SETPIPE_SZ, _PIPE)
            except OSError:  # the limit is the machine's
                self._is_large = False

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
                        if size >= _BULK and len(data) < _READ and self._is_large:
                            self._loop.call_later(_FILL, self._hear, fd)
                            break
                    else:
                        # Read to the end: of one that came before we opened it, nobody tells.
                        self._listen(fd)
        finally:
            for fd in self._open:
                self._loop.remove_reader(fd)

    def _listen(self, fd: int) -> None:
        if fd in self._open:
            self._loop.add_reader(fd, self._hear, fd)

    def _hear(self, fd: int) -> None:
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
