"""Start books in files of one folder.

What a process wrote to a file is the kernel's, and stays when the process is killed. It is
not flushed to disk: when the machine itself goes down, its books can't be trusted, and that
is noticed by the id of the boot that stands at their head.

A book is only ever appended to, by its worker (`job attempt`: it begins) and by the engine
(`-job attempt`: it may not begin any more). Appends are atomic and ordered, so whichever of
the two lines comes first has won, and both sides read the same answer without a lock that a
stopped process could hold.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_LONG = 1 << 20
"""Bytes after which a book is written anew."""
_SUFFIX = ".starts"
_TRIES = 5


class FileStartBook:
    """See `penstock.ports.starts.StartBook`."""

    def __init__(self, folder: str, name: str) -> None:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = Path(folder) / f"{name}{_SUFFIX}"
        self._revoked: set[str] = set()
        self._handle, self._size = self._open(self._path, ())

    @staticmethod
    def _open(path: Path, running: Iterable[tuple[str, int]]) -> tuple[int, int]:
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o600)
        lines = [
            f"{_boot_id()} {os.getpid()}",
            *(f"{job_id} {attempt}" for job_id, attempt in running),
            "",
        ]
        text = "\n".join(lines).encode()
        try:
            if os.write(handle, text) < len(text):
                raise OSError("no space left for the start book")
        except OSError:
            os.close(handle)
            raise
        return handle, len(text)

    def begin(self, job_id: str, attempt: int) -> bool:
        start = f"{job_id} {attempt}"
        if start in self._revoked:
            return False
        line = f"{start}\n".encode()
        os.write(self._handle, line)
        self._size += len(line)
        if os.fstat(self._handle).st_size == self._size:
            return True
        return self._is_first(start)

    def _is_first(self, start: str) -> bool:
        """Somebody else wrote as well: see who was first."""
        self._size = os.fstat(self._handle).st_size
        lines = _read(self._handle)
        if start not in lines:
            raise OSError("the start book could not be written")
        self._revoked.update(line[1:] for line in lines if line.startswith("-"))
        return _stands_before(lines, start, f"-{start}")

    def trim(self, running: Iterable[tuple[str, int]]) -> None:
        if self._size < _LONG:
            return
        newer = self._path.with_suffix(".new")
        handle, size = self._open(newer, running)
        os.replace(newer, self._path)
        # What the engine wrote in the old book until now counts; from now on it finds the new.
        self._revoked.update(line[1:] for line in _read(self._handle) if line.startswith("-"))
        os.close(self._handle)
        self._handle, self._size = handle, size

    def close(self, *, keep: bool) -> None:
        os.close(self._handle)
        if not keep:
            self._path.unlink(missing_ok=True)


class FileStarts:
    """See `penstock.ports.starts.Starts`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.folder = str(folder)
        self._known: set[tuple[str, int]] = set()

    def revoke(self, job_id: str, attempt: int) -> bool:
        if (job_id, attempt) in self._known:
            return False
        start = f"{job_id} {attempt}"
        return all(_revoke_in(path, start) for path in self._paths())

    def take_over(self, held: Iterable[tuple[str, int]]) -> None:
        """Remember what the books of dead workers say of these, and throw the books away."""
        books = [_Book.at(path) for path in self._paths()]
        dead = [book for book in books if book is not None and not book.is_written]
        for job_id, attempt in held:
            start = f"{job_id} {attempt}"
            if any(not book.is_of_this_boot or start in book.lines for book in dead):
                self._known.add((job_id, attempt))
        for book in dead:
            book.path.unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        return sorted(self._folder.glob(f"*{_SUFFIX}"))


def _revoke_in(path: Path, start: str) -> bool:
    """Write the revocation in one book; True if that kept the start from happening there."""
    for _ in range(_TRIES):
        book = _Book.at(path)
        if book is None:
            return True  # its worker went, and took with it only what we know
        if not book.is_of_this_boot:
            return False
        if not book.is_written:
            return start not in book.lines or _stands_before(book.lines, f"-{start}", start)
        try:
            handle = os.open(path, os.O_RDWR | os.O_APPEND)
        except OSError:
            continue
        try:
            os.write(handle, f"-{start}\n".encode())
            if not _stands_before(_read(handle), f"-{start}", start):
                return False
            if _is_at(handle, path):
                return True
        except OSError:
            return False
        finally:
            os.close(handle)
    return False


def _stands_before(lines: list[str], one: str, other: str) -> bool:
    """Whether `one` is there, and `other` comes after it or not at all."""
    if one not in lines:
        return False
    return other not in lines or lines.index(one) < lines.index(other)


def _is_at(handle: int, path: Path) -> bool:
    """Whether the book was not written anew in the meantime."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except FileNotFoundError:
        return False


def _read(handle: int) -> list[str]:
    content = os.pread(handle, os.fstat(handle).st_size, 0)
    return content.decode(errors="replace").splitlines()


class _Book:
    """A book, read."""

    def __init__(self, path: Path, content: str) -> None:
        self.path = path
        head, *self.lines = content.splitlines() or [" 0"]
        boot, _, self._pid = head.rpartition(" ")
        self.is_of_this_boot = boot == _boot_id()

    @classmethod
    def at(cls, path: Path) -> _Book | None:
        try:
            return cls(path, path.read_text(errors="replace"))
        except FileNotFoundError:
            return None

    @property
    def is_written(self) -> bool:
        """Whether its writer may still be alive."""
        return self.is_of_this_boot and _is_alive(self._pid)


def _is_alive(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ProcessLookupError, ValueError):
        return False
    except PermissionError:
        return True
    return True


def _boot_id() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return "unknown"
