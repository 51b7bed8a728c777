"""Start books in files of one folder.

What a process wrote to a file is the kernel's, and stays when the process is killed. It is
not flushed to disk: when the machine itself goes down, its books can't be trusted, and that
is noticed by the id of the boot that stands at their head.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_LONG = 1 << 20
"""Bytes after which a book is written anew."""
_SUFFIX = ".starts"


class FileStartBook:
    """See `penstock.ports.starts.StartBook`."""

    def __init__(self, folder: str, name: str) -> None:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = Path(folder) / f"{name}{_SUFFIX}"
        self._handle = self._open(self._path, ())
        self._size = 0

    @staticmethod
    def _open(path: Path, running: Iterable[tuple[str, int]]) -> int:
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC, 0o600)
        lines = [
            f"{_boot_id()} {os.getpid()}",
            *(f"{job_id} {attempt}" for job_id, attempt in running),
            "",
        ]
        os.write(handle, "\n".join(lines).encode())
        return handle

    def begin(self, job_id: str, attempt: int) -> None:
        self._size += os.write(self._handle, f"{job_id} {attempt}\n".encode())

    def trim(self, running: Iterable[tuple[str, int]]) -> None:
        if self._size < _LONG:
            return
        newer = self._path.with_suffix(".new")
        handle = self._open(newer, running)
        os.replace(newer, self._path)
        os.close(self._handle)
        self._handle, self._size = handle, 0

    def close(self) -> None:
        os.close(self._handle)
        self._path.unlink(missing_ok=True)


class FileStarts:
    """See `penstock.ports.starts.Starts`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.folder = str(folder)
        self._known: set[tuple[str, int]] = set()

    def began(self, job_id: str, attempt: int) -> bool:
        if (job_id, attempt) in self._known:
            return True
        line = f"{job_id} {attempt}"
        return any(not book.is_of_this_boot or line in book.lines for book in self._books())

    def take_over(self, held: Iterable[tuple[str, int]]) -> None:
        """Remember what the books say of these, and throw away those of dead workers."""
        self._known = {attempt for attempt in held if self.began(*attempt)}
        for book in self._books():
            if not book.is_written:
                book.path.unlink(missing_ok=True)

    def _books(self) -> list[_Book]:
        return [_Book(path) for path in sorted(self._folder.glob(f"*{_SUFFIX}"))]


class _Book:
    """A book, read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        head, *lines = path.read_text(errors="replace").splitlines() or [" 0"]
        self.lines = frozenset(lines)
        boot, _, self._pid = head.rpartition(" ")
        self.is_of_this_boot = boot == _boot_id()

    @property
    def is_written(self) -> bool:
        """Whether its writer may still be alive."""
        return self.is_of_this_boot and os.path.exists(f"/proc/{self._pid}")


def _boot_id() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return "unknown"
