"""What this server has: a lock that it holds as long as it lives, and a file for each job."""

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

SERVERS = "servers"
LOCK = "lock"
CLAIMS = "claims"
_RETURNING = "returning.lock"
_PATIENCE = 5.0


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
        self.folder = private / SERVERS / f"{os.getpid()}-{secrets.token_hex(6)}"
        self._claims = self.folder / CLAIMS

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

    def touch(self) -> bool:
        """Tell other machines that it is alive; False if it was taken for dead meanwhile."""
        try:
            os.utime(self.folder / LOCK)
        except FileNotFoundError:
            return False
        return True

    def take(self, job_id: str) -> bool:
        """Say that the job is ours, before it is; False if it has been so already."""
        try:
            os.close(os.open(self._of(job_id), os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
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

    def _close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

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
