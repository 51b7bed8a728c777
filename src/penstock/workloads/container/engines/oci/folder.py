"""One container as a folder: what can be told from it after any crash, and when the container has
started and is over, whoever started it. The kernel tells, nothing is polled."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import os
import signal
import stat
import struct
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from msgspec import Struct

from penstock.workloads.container.engine import ContainerState, ExitStatus
from penstock.workloads.container.engines.cgroups import Cgroups
from penstock.workloads.container.engines.programs import process_end
from penstock.workloads.container.files.tree import remove_tree

PLAN, CONFIG, LOG = "plan.json", "config.json", "log"
PID, LAUNCHER, STATUS = "pid", "launcher", "status"
STREAMS = ("stdout", "stderr")
LAYER = ("rootfs", "upper", "work")
_MEMORY = ("/run", "/dev/shm")
_PREFIX, _BACK = "penstock-oci-", "root"
_ABANDONED = 60.0
"""Seconds after which nobody can still be making a folder in memory."""


def live_folder(root: Path) -> Path:
    """`root/live`, for what ends when the machine does: a link to a folder in memory, where files
    are made in microseconds, or a folder on disk if the machine has no place for that."""
    live = root / "live"
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (root / ".live.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_private(live):
            _make_live(live)
    return live


def _make_live(live: Path) -> None:
    live.unlink(missing_ok=True)  # of an earlier boot
    mounts = [line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines()]
    places = {place for _, place, kind, *_ in mounts if kind == "tmpfs"}
    for place in (Path(one) for one in _MEMORY if one in places):
        with contextlib.suppress(OSError):
            _clear_memory(place)
            made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
            (made / _BACK).symlink_to(live)
            live.symlink_to(made)
            return
    live.mkdir(mode=0o700)


def _clear_memory(place: Path) -> None:
    """Remove folders to which no link leads any more: those of a root that was deleted."""
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            linked = os.path.realpath(os.readlink(folder / _BACK)) == str(folder)
            if not linked and time.time() - folder.stat().st_mtime > _ABANDONED:
                remove_tree(folder)


def _is_private(folder: Path) -> bool:
    """Whether it is there, and nobody else can have put anything into it."""
    try:
        found = folder.stat()
    except OSError:
        return False
    private = stat.S_IMODE(found.st_mode) == 0o700 and found.st_uid == os.geteuid()
    return stat.S_ISDIR(found.st_mode) and private


class ContainerManifest(Struct, frozen=True, kw_only=True):
    """`plan.json`: what is needed to know of a container later."""

    image: str
    runtime: str
    groups: tuple[str, ...] = ()
    """Cgroups that the launcher steps into."""
    layer: str = ""
    """A folder with a writable layer above the image's root file system, if it has one."""
    labels: Mapping[str, str] = {}
    created: float = 0


_MANIFEST = msgspec.json.Decoder(ContainerManifest)
_ENOUGH = 1 << 20


class _LogLine(Struct):
    msg: str = ""
    level: str = ""


class RunFolder:
    """`run/<name>`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name
        self._prefix = f"{path}/"
        self._manifest: ContainerManifest | None = None
        self._numbers: dict[str, int] = {}
        """What stands in files that never change once they are complete."""

    def make(self) -> None:
        """Raises FileExistsError if the name is taken."""
        os.mkdir(self.path, 0o700)

    def fill(self, user: tuple[int, int], manifest: ContainerManifest, config: bytes) -> None:
        """The manifest comes last: a folder without a whole one is no container."""
        for stream in STREAMS:
            # A program may open /dev/stdout again, so the FIFO must be its own.
            os.mkfifo(self._prefix + stream, 0o600)
            os.chown(self._prefix + stream, *user)
        for name, data in ((CONFIG, config), (PLAN, msgspec.json.encode(manifest))):
            with open(self._prefix + name, "xb", buffering=0) as file:
                file.write(data)
        self._manifest = manifest

    def age(self) -> float:
        """Seconds since something was last made in it."""
        try:
            return time.time() - self.path.stat().st_mtime
        except OSError:
            return 0

    def manifest(self) -> ContainerManifest | None:
        """It never changes."""
        if self._manifest is None:
            with contextlib.suppress(OSError, msgspec.DecodeError):
                self._manifest = _MANIFEST.decode(self._read(PLAN))
        return self._manifest

    def open_stream(self, stream: str, flags: int) -> int:
        return os.open(self._prefix + stream, flags | os.O_NOFOLLOW | os.O_CLOEXEC)

    @property
    def pid(self) -> int | None:
        """The container's first process; None as long as the runtime has not started it."""
        return self._number(PID)

    @property
    def status(self) -> int | None:
        """The runtime's exit code, which is the container's if it was started."""
        return self._number(STATUS)

    @property
    def launcher(self) -> int | None:
        """Its PID, if it was started: whether or not it is still there."""
        return self._number(LAUNCHER)

    def launcher_fd(self) -> int | None:
        """A pidfd of the launcher, if it lives. A PID that was given anew is told by its
        command line, which names this folder."""
        pid = self.launcher
        if pid is None:
            return None
        with contextlib.suppress(OSError):
            fd = os.pidfd_open(pid)
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if os.fsencode(self.path) in words:
                    return fd
            os.close(fd)
        return None

    def complaint(self) -> str:
        """The last thing that the runtime said."""
        with contextlib.suppress(OSError):
            for line in reversed((self.path / LOG).read_bytes().splitlines()):
                with contextlib.suppress(msgspec.DecodeError):
                    said = msgspec.json.decode(line, type=_LogLine)
                    if said.msg:
                        return said.msg
        return ""

    def _number(self, name: str) -> int | None:
        if name not in self._numbers:
            with contextlib.suppress(OSError, ValueError):
                self._numbers[name] = int(self._read(name))
        return self._numbers.get(name)

    def _read(self, name: str) -> bytes:
        fd = os.open(self._prefix + name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(fd, _ENOUGH)
        finally:
            os.close(fd)


# -- when it starts and ends -------------------------------------------------------------------

_CLOSE_WRITE, _MOVED_TO = 0x08, 0x80
_HEAD = struct.Struct("iIII")


class FolderWatcher:
    """Files that are complete in some folders: written and closed, or moved there."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if self._fd < 0:
            raise OSError(ctypes.get_errno(), "inotify_init1")
        self._heard: dict[int, Callable[[str], None]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._read)

    def add(self, folder: Path, heard: Callable[[str], None]) -> int:
        """From now on `heard` gets the name of each file. Returns what `forget` takes."""
        watch: int = self._libc.inotify_add_watch(
            self._fd, os.fsencode(folder), _CLOSE_WRITE | _MOVED_TO
        )
        if watch < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch", str(folder))
        self._heard[watch] = heard
        return watch

    def forget(self, watch: int) -> None:
        """For a folder that will be deleted: the kernel drops its watch then, and to ask for
        it beforehand takes milliseconds."""
        self._heard.pop(watch, None)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(self._fd, 1 << 16)
            at = 0
            while at < len(data):
                watch, _, _, length = _HEAD.unpack_from(data, at)
                name = data[at + _HEAD.size : at + _HEAD.size + length].rstrip(b"\0")
                at += _HEAD.size + length
                if heard := self._heard.get(watch):
                    heard(os.fsdecode(name))


_PATIENCE = 5.0


class ContainerWatcher:
    """One container, followed through its folder and its launcher."""

    def __init__(self, folder: RunFolder, cgroups: Cgroups, watch: FolderWatcher) -> None:
        self.folder = folder
        self.begun = asyncio.Event()
        """It runs, or never will."""
        self.over = asyncio.Event()
        self._cgroups = cgroups
        self._watch = watch
        self._added = watch.add(folder.path, self._heard)
        self._loop = asyncio.get_running_loop()
        self._fds: set[int] = set()
        self._closed = False
        if folder.status is not None:
            self.end()
        elif folder.launcher is not None:
            self._adopt()

    def follow(self, spawned: asyncio.Future[int]) -> None:
        """A launcher that was just spawned, or could not be."""
        if spawned.exception() is not None:
            self.end()
        elif not self._closed:
            self._await(os.pidfd_open(spawned.result()))

    def end(self) -> None:
        self.begun.set()
        self.over.set()

    def close(self) -> None:
        self._closed = True
        self._watch.forget(self._added)
        for fd in self._fds:
            self._loop.remove_reader(fd)
            os.close(fd)
        self._fds.clear()

    def _adopt(self) -> None:
        if self.folder.pid is not None:
            self.begun.set()
        fd = self.folder.launcher_fd()
        if fd is None:
            self._launcher_gone()
        else:
            self._await(fd)

    def _heard(self, name: str) -> None:
        if name == STATUS and self.folder.status is not None:
            self.end()
        elif name == PID:
            self.begun.set()

    def _await(self, fd: int) -> None:
        self._fds.add(fd)
        self._loop.add_reader(fd, self._process_gone, fd)

    def _process_gone(self, fd: int) -> None:
        self._loop.remove_reader(fd)
        self._fds.discard(fd)
        os.close(fd)
        self._launcher_gone()

    def _launcher_gone(self) -> None:
        """Somebody ended it: the container may go on, but its exit code will not be known."""
        fd = first_process(self.folder, self._cgroups)
        if self.folder.status is None and fd is not None:
            self._await(fd)
            return
        if fd is not None:
            os.close(fd)
        self.end()


def state_of(folder: RunFolder, cgroups: Cgroups) -> ContainerState:
    if folder.launcher is None:
        return ContainerState.CREATED
    if folder.status is None:
        for fd in (folder.launcher_fd(), first_process(folder, cgroups)):
            if fd is not None:
                os.close(fd)
                return ContainerState.RUNNING
    return ContainerState.EXITED


def exit_of(folder: RunFolder, cgroups: Cgroups) -> ExitStatus:
    """How it ended; call it when it has."""
    oom = cgroups.oom_kills(folder.name) > 0
    code = folder.status
    if code is None:
        return ExitStatus(
            None, oom, "It ended while no worker watched it, so its exit code is unknown."
        )
    if folder.pid is None:
        return ExitStatus(None, oom, folder.complaint() or f"The runtime ended with {code}.")
    if kill_first_process(folder, cgroups) and not oom:
        return ExitStatus(None, oom, "The runtime was ended from outside while the container ran.")
    return ExitStatus(code, oom)


def first_process(folder: RunFolder, cgroups: Cgroups) -> int | None:
    """A pidfd of the container's first process, if it lives."""
    pid = folder.pid
    if pid is None:
        return None
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    if cgroups.is_in(folder.name, pid):
        return fd
    os.close(fd)
    return None


def kill_first_process(folder: RunFolder, cgroups: Cgroups) -> bool:
    """All others in its PID namespace die with it. False if it does not live."""
    fd = first_process(folder, cgroups)
    if fd is None:
        return False
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    os.close(fd)
    return True


async def end_group(leader: int, *, alone: bool = False) -> None:
    """Kill a process group, and wait a while for the end of its leader and, unless it is `alone`,
    of what it started."""
    fds = []
    with contextlib.suppress(ProcessLookupError):
        if not alone:
            # Nobody who has to stop can fork any more, so none is missed.
            os.killpg(leader, signal.SIGSTOP)
        for pid in (leader, *(() if alone else children_of(leader))):
            with contextlib.suppress(ProcessLookupError):
                fds.append(os.pidfd_open(pid))
        os.killpg(leader, signal.SIGKILL)
    try:
        for fd in fds:
            await process_end(fd, _PATIENCE)
    finally:
        for fd in fds:
            os.close(fd)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(leader, os.WNOHANG)  # noqa: ASYNC222 - it does not wait


def children_of(pid: int) -> list[int]:
    try:
        return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []
