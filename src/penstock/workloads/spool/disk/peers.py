"""Servers on a workspace: ours by their locks and claims, and the original's by its pid file."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from penstock.core.errors import StoreFailed
from penstock.ports.clock import Clock
from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.disk.files import Unfit, read_file, write_files
from penstock.workloads.spool.disk.workspace import Workspace

NAME = ".nrvnad.pid"
NRVNAD_LOCK = ".nrvnad.lock"
"""Held by newer versions of the original from their start to their end."""
_PROGRAM = "nrvnad"
_MAX_PID = 32
"""Bytes of a pid file."""
_PROC = Path("/proc")


def write_pid(workspace: Path, *, missing: bool = False) -> None:
    """Unless an original server has its own there, by which we know that its jobs are its;
    with `missing`, only if there is none."""
    if (missing and os.path.lexists(workspace / NAME)) or original_runs(workspace):
        return
    draft = f"{NAME}.{os.getpid()}.tmp"
    with suppress(OSError):
        os.unlink(workspace / draft)  # of a dead server with the same pid
    write_files(workspace, {draft: str(os.getpid()).encode()}, Sync.NONE)
    os.replace(workspace / draft, workspace / NAME)


def remove_pid(workspace: Path) -> None:
    """Unless another server has written its own meanwhile."""
    if _pid(workspace) == os.getpid():
        (workspace / NAME).unlink(missing_ok=True)


def original_runs(workspace: Path) -> bool:
    """Whether the original's lock is held, or a program by its name lives whose pid is in the
    file, or which was started on this workspace: it removes the file before its last jobs have
    ended."""
    if _is_locked(workspace / NRVNAD_LOCK):
        return True
    pid = _pid(workspace)
    if pid is not None and _is_original(pid):
        return True
    try:
        others = [int(name) for name in os.listdir(_PROC) if name.isdigit()]
    except OSError:
        return False
    return any(_is_original(one) and _names(one, workspace) for one in others)


def _is_locked(path: Path) -> bool:
    try:
        lock = os.open(path, _LOOK)
    except OSError:
        return False
    try:
        return not _is_free(lock)
    finally:
        os.close(lock)


def _is_original(pid: int) -> bool:
    try:
        return pid != os.getpid() and (_PROC / str(pid) / "comm").read_text().strip() == _PROGRAM
    except OSError:
        return False


def _names(pid: int, workspace: Path) -> bool:
    """Whether the workspace is one of the arguments that the program was started with."""
    try:
        folder = os.readlink(_PROC / str(pid) / "cwd")
        arguments = (_PROC / str(pid) / "cmdline").read_bytes().split(b"\0")
    except OSError:
        return False
    for argument in filter(None, arguments):
        with suppress(OSError, ValueError):
            if os.path.samefile(os.path.join(folder, os.fsdecode(argument)), workspace):
                return True
    return False


def _pid(workspace: Path) -> int | None:
    try:
        return int(read_file(workspace, NAME, _MAX_PID))
    except (OSError, ValueError, Unfit):
        return None


SERVERS = "servers"
LOCK = "lock"
CLAIMS = "claims"
_RETURNING = "returning.lock"
_PATIENCE = 5.0
_NEW = os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_LOOK = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW


class Holder(Struct, frozen=True, kw_only=True):
    """Who holds a lock: the content of the lock file."""

    host: str
    """This boot of this kernel; within it, locks tell who is alive."""
    name: str = ""
    pid: int = 0


class Claims:
    """The folder of one server below `.penstock/servers`, from `enter` to `leave`."""

    def __init__(self, private: Path) -> None:
        self._private = private
        self._lock: int | None = None
        self._nrvnad: int | None = None
        self.folder = private / SERVERS / f"{os.getpid()}-{secrets.token_hex(6)}"
        self._claims = self.folder / CLAIMS
        self._held = f"{self.folder}/{LOCK}"

    def enter(self) -> None:
        """Also after it was taken for dead."""
        # Under the lock, so that nobody takes the folder for a dead server's before it is held.
        with returning(self._private):
            self._claims.mkdir(parents=True, exist_ok=True)
            self._close()
            self._lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            me = Holder(host=this_host(), name=socket.gethostname(), pid=os.getpid())
            os.write(self._lock, msgspec.json.encode(me))
        self._keep_nrvnad_out()

    def touch(self) -> bool:
        """Tell other machines that it is alive; False if it was taken for dead meanwhile."""
        self._keep_nrvnad_out()
        try:
            os.utime(self.folder / LOCK)
        except FileNotFoundError:
            return False
        return True

    def take(self, job_id: str) -> bool:
        """Say that the job is ours, before it is; False if it has been so already."""
        try:
            try:
                os.link(self._held, self._of(job_id))  # a quarter of the time of a new file
            except (PermissionError, NotImplementedError):  # a file system without links
                os.close(os.open(self._of(job_id), _NEW, 0o644))
        except FileExistsError:
            return False
        return True

    def holds(self, job_id: str) -> bool:
        """Whether nobody has taken the job away from us."""
        return os.path.lexists(self._of(job_id))

    def drop(self, job_id: str) -> None:
        """Once it has left `processing`."""
        with suppress(FileNotFoundError):
            os.unlink(self._of(job_id))

    def leave(self) -> None:
        """When no job is left."""
        if self._lock is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self._close()
        if self._nrvnad is not None:
            os.close(self._nrvnad)
            self._nrvnad = None

    def _close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _keep_nrvnad_out(self) -> None:
        """Share the original's lock with our other servers: one that starts beside us would take
        our running jobs for its own, and gives up if the lock is held. Fine if one has it."""
        if self._nrvnad is not None:
            return
        with suppress(OSError):
            lock = os.open(self._private.parent / NRVNAD_LOCK, _LOOK | os.O_CREAT, 0o644)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
            else:
                self._nrvnad = lock

    def _of(self, job_id: str) -> str:
        return f"{self._claims}/{job_id}"


@contextmanager
def returning(private: Path) -> Iterator[None]:
    """Hold the lock under which jobs go back to the queue; waits while another has it.

    StoreFailed if it has it for too long: it is held for moments, so that program hangs.
    """
    lock = os.open(private / _RETURNING, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        _locked(lock)
        yield
    finally:
        os.close(lock)


def _locked(lock: int) -> None:
    end, pause = time.monotonic() + _PATIENCE, 0.001
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > end:
                raise StoreFailed(
                    f"another program has held {_RETURNING} for {_PATIENCE:g} s",
                    hint="a server of this workspace may be stopped; let it go on, or end it",
                ) from None
        time.sleep(pause)
        pause = min(0.05, pause * 2)


def this_host() -> str:
    """The same for all containers of a kernel, and another after each boot."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


_SURE = 0.25
"""The part of a lease that one is watched whose clock says that it is over: clocks differ."""
_LEASE = 30.0
"""Of one on another machine, to who only looks."""


class Peer(Struct, frozen=True, kw_only=True):
    """A server, as another sees it."""

    folder: Path
    alive: bool
    claims: frozenset[str] = frozenset()


class Peers:
    """All servers of a workspace; remembers since when each was silent."""

    def __init__(self, private: Path, lease: float, clock: Clock) -> None:
        self._servers = private / SERVERS
        self._lease, self._clock = lease, clock
        self._seen: dict[str, tuple[int, float]] = {}
        """The time on each lock, and when we saw it first."""

    def look(self) -> list[Peer]:
        """Each with its claims as they are after it was found alive."""
        try:
            names = sorted(os.listdir(self._servers))
        except FileNotFoundError:
            names = []
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        return [self._judge(self._servers / name) for name in names]

    def _judge(self, folder: Path) -> Peer:
        return Peer(folder=folder, alive=self._is_alive(folder), claims=_claims(folder))

    def _is_alive(self, folder: Path) -> bool:
        try:
            lock = os.open(folder / LOCK, _LOOK)
        except OSError:
            return False
        try:
            if not _is_free(lock):
                return True
            return _host(lock) != this_host() and not self._is_silent(folder.name, lock)
        finally:
            os.close(lock)

    def _is_silent(self, name: str, lock: int) -> bool:
        touched, now = os.fstat(lock).st_mtime_ns, self._clock.monotonic()
        if self._seen.get(name, (0, 0.0))[0] != touched:
            self._seen[name] = (touched, now)
        silent = now - self._seen[name][1]
        over = self._clock.now() - touched / 1e9 > self._lease
        return silent >= (self._lease * _SURE if over else self._lease)


def is_served(workspace: Workspace, clock: Clock) -> bool:
    """Whether a server is seen that may take its jobs, the original's included."""
    servers = Peers(workspace.private, _LEASE, clock).look()
    return any(server.alive for server in servers) or original_runs(workspace.path)


def _is_free(lock: int) -> bool:
    try:
        # Shared, so that two who look don't see each other.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(lock, fcntl.LOCK_UN)
    return True


def _host(lock: int) -> str:
    try:
        return msgspec.json.decode(os.pread(lock, 4096, 0), type=Holder).host
    except msgspec.DecodeError:
        return ""


def _claims(folder: Path) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder / CLAIMS))
    except OSError:
        return frozenset()
