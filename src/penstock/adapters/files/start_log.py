"""Start logs as files that workers map into memory and the engine reads.

What a process stores in a shared mapping is in the kernel's page cache, and stays there when
the process is killed. It is not flushed to disk: after a crash of the machine the logs can't be
trusted, and the boot id in their first line shows that.

    bytes 0 to 4087       boot id, process id, version; one line
    bytes 4088 to 4095    length of the file, as far as it has revocations
    then                  `job attempt` lines, stored by the worker; zeros after the last
    at the end            `-job attempt` lines, appended by the engine: revocations

The worker stores a start and then reads the length; the engine appends a revocation, stores the
length and then reads the starts. Between the two steps of the engine `membarrier` makes every
processor that runs a worker complete its stores and loads so far. Either the worker's store was
before that, and the engine finds the start; or its load comes after it, and the worker finds the
revocation. The worker pays for two memory accesses, and no lock is held by a process that may be
suspended. Where there is no such system call there are no start logs.

A line that was cut short by a kill has a zero in it or no end, so it is not taken for another.
"""

from __future__ import annotations

import errno
import os
import platform
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_HEAD = 4096
_LENGTH = slice(_HEAD - 8, _HEAD)
_ROOM, _MOST_ROOM = 16 << 10, 1 << 20
"""Bytes for starts. When they are full, the log is replaced by one with what still counts, and
with more room at first: a worker that soon ends leaves a small log."""
_VERSION = b"2"
_SUFFIX, _NEWER = ".starts", ".new"
_TRIES = 5

_MEMBARRIER = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365, "s390x": 356}
"""The number of the system call, which the C library has no function for."""
_QUERY, _BARRIER, _REGISTER = 0, 1 << 1, 1 << 2
"""MEMBARRIER_CMD_GLOBAL_EXPEDITED reaches the processes that have registered for it."""

Attempts = Iterable[tuple[str, int]]


class FileStartLog:
    """See `penstock.ports.bus.StartLog`."""

    def __init__(
        self, folder: str, name: str, counting: Callable[[], Attempts] = lambda: ()
    ) -> None:
        """`counting` gives the attempts that still count when a full log is replaced."""
        _membarrier(_REGISTER)
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = Path(folder) / f"{name}{_SUFFIX}"
        self._counting = counting
        self._revoked: set[bytes] = set()
        self._room = _ROOM
        self._at = self._end = 0
        self._length = b""
        self._create()

    def begin(self, job_id: str, attempt: int) -> bool:
        line = _line(job_id, attempt)
        if self._at + len(line) > self._end:
            self._replace()
        log, start = self._map, self._at
        end = start + len(line)
        log[start:end] = line
        if log[_LENGTH] != self._length:
            self._length = log[_LENGTH]
            length = int.from_bytes(self._length, "little")
            self._revoked |= _revocations(self._handle, self._end, length)
        if self._revoked and line in self._revoked:
            log[start:end] = bytes(len(line))
            return False
        self._at = end
        return True

    def close(self, *, keep: bool) -> None:
        self._map.close()
        os.close(self._handle)
        if not keep:
            self._path.unlink(missing_ok=True)

    def _create(self) -> None:
        starts = b"\n" + b"".join(_line(*key) for key in self._counting())
        end = _HEAD + max(self._room, 4 * len(starts))
        newer = self._path.with_suffix(_NEWER)
        handle = os.open(newer, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.posix_fallocate(handle, 0, end)  # a full disk is an error here, not a SIGBUS later
            log = mmap(handle, end)
            head = b"%b %d %b\n" % (_boot_id(), os.getpid(), _VERSION)
            log[: len(head)] = head
            log[_LENGTH] = length = end.to_bytes(8, "little")
            log[_HEAD : _HEAD + len(starts)] = starts
            os.replace(newer, self._path)
        except OSError:
            os.close(handle)
            newer.unlink(missing_ok=True)
            raise
        self._handle, self._map, self._length = handle, log, length
        self._at, self._end = _HEAD + len(starts), end

    def _replace(self) -> None:
        handle, log, end = self._handle, self._map, self._end
        self._room = min(4 * self._room, _MOST_ROOM)
        self._create()
        # What the engine appended to the old log until now counts; from now on it finds the new.
        self._revoked |= _revocations(handle, end)
        log.close()
        os.close(handle)


class FileStartLogs:
    """See `penstock.ports.bus.StartLogs`."""

    def __init__(self, folder: Path | None) -> None:
        """Without a folder no worker has a log: each asks before it begins a job."""
        self._folder = folder
        self.folder = str(folder) if folder is not None and _is_possible() else ""
        self._known: set[tuple[str, int]] = set()

    def revoke(self, job_id: str, attempt: int) -> bool:
        if (job_id, attempt) in self._known:
            return False
        line = _line(job_id, attempt)
        return all(self._revoke_in(path, line) for path in self._paths())

    def take_over(self, held: Attempts) -> None:
        """Remember what the logs of dead workers say of these, and delete the logs."""
        logs = [(path, _Head.of(path)) for path in self._paths()]
        dead = [(path, head) for path, head in logs if head is not None and not head.is_written]
        for job_id, attempt in held:
            line = _line(job_id, attempt)
            if any(not head.is_of_this_boot or line in _lines(path) for path, head in dead):
                self._known.add((job_id, attempt))
        for path, _ in dead:
            for file in (path, path.with_suffix(_NEWER)):
                file.unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        return [] if self._folder is None else sorted(self._folder.glob(f"*{_SUFFIX}"))

    def _revoke_in(self, path: Path, line: bytes) -> bool:
        """Revoke it in one log; True if that kept it from beginning there."""
        for _ in range(_TRIES):
            head = _Head.of(path)
            if head is None:
                return True  # its worker ended, and all it did was reported
            if not head.is_of_this_boot:
                return False
            try:
                if not head.is_written:
                    return line not in _lines(path)
                if head.version != _VERSION:
                    return False
                answer = _revoke_shared(path, line)
            except FileNotFoundError:
                continue
            except OSError:
                return False
            if answer is not None:
                return answer
        return False


def _lines(path: Path) -> frozenset[bytes]:
    """The lines of a dead worker's log, which do not change any more."""
    stat = path.stat()
    return _read_lines(path, stat.st_ino, stat.st_ctime_ns)


@lru_cache(4)
def _read_lines(path: Path, inode: int, changed_at: int) -> frozenset[bytes]:
    """Kept, because usually many are asked for: all that the worker held."""
    return frozenset(path.read_bytes().splitlines(keepends=True))


def _revoke_shared(path: Path, line: bytes) -> bool | None:
    """Revoke it in the log of a process that may be running; None if the log was replaced."""
    handle = os.open(path, os.O_RDWR | os.O_APPEND)
    try:
        os.write(handle, b"-" + line)
        with mmap(handle, 0) as log:
            log[_LENGTH] = os.fstat(handle).st_size.to_bytes(8, "little")
            _membarrier(_BARRIER)
            if log.find(b"\n" + line) >= 0:
                return False
        return True if os.path.samestat(os.fstat(handle), path.stat()) else None
    finally:
        os.close(handle)


def _revocations(handle: int, start: int, length: int = 0) -> set[bytes]:
    """The lines of starts that were revoked, read from the end of a log."""
    size = max(length, os.fstat(handle).st_size)
    text = os.pread(handle, size - start, start)
    if len(text) < length - start:
        raise OSError(errno.EIO, "the start log can't be read")
    return {line[1:] for line in text.splitlines(keepends=True)}


class _Head(NamedTuple):
    """What the first line of a log says of its writer."""

    is_of_this_boot: bool
    is_written: bool
    """Whether the writer may still be alive."""
    version: bytes

    @classmethod
    def of(cls, path: Path) -> _Head | None:
        try:
            with path.open("rb") as file:
                boot, pid, version = (*file.readline(_HEAD).split(), b"", b"", b"")[:3]
        except FileNotFoundError:
            return None
        is_of_this_boot = bool(boot) and boot == _boot_id()
        return cls(is_of_this_boot, is_of_this_boot and _is_alive(pid), version)


def _line(job_id: str, attempt: int) -> bytes:
    return f"{job_id} {attempt}\n".encode()


def _is_alive(pid: bytes) -> bool:
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        pass
    except (ProcessLookupError, ValueError):
        return False
    return True


def _boot_id() -> bytes:
    try:
        return _BOOT.read_bytes().strip()
    except OSError:
        return b""


def _is_possible() -> bool:
    """Whether this machine has all that start logs need."""
    try:
        return bool(_boot_id()) and bool(_membarrier(_QUERY) & _BARRIER)
    except OSError:
        return False


def _membarrier(command: int) -> int:
    import ctypes  # rarely needed, and slow to import

    number = _MEMBARRIER.get(platform.machine())
    if number is None or sys.platform != "linux" or sys.maxsize < 2**32:
        raise OSError(errno.ENOSYS, "this system has no membarrier")
    answer = int(ctypes.CDLL(None, use_errno=True).syscall(number, command, 0, 0))
    if answer < 0:
        raise OSError(ctypes.get_errno(), "membarrier failed")
    return answer
