"""Folders whose content somebody else named: filled under caps, walked, weighed and removed,
whatever a job made of them. Blocking code, for a thread.

A job can leave links, folders without any permission, and trees deeper than a path or a stack can
be. No step of a walk follows a link: each folder is opened below the one before it.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from penstock.workloads.container.config import InputRules

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""How a folder is opened that must not be a link to one."""


class BadFile(ValueError):
    """A file that can't be taken, in a sentence that goes on from its path."""


class Tree:
    """The files of one job, in a folder that it makes and nobody else can get into: so there is
    nothing in it but files and folders of its own. Until `seal` only the worker can read them."""

    def __init__(self, root: Path, rules: InputRules, *, read_only: bool = True) -> None:
        root.mkdir(0o700)
        self._root, self._rules, self._read_only = root, rules, read_only
        self._folders: set[str] = set()
        self._files = self._bytes = 0

    def folder(self, path: str) -> None:
        """Make it and those above it; it may be there."""
        parts = path.split("/") if path not in ("", ".") else []
        for depth in range(1, len(parts) + 1):
            if (inner := "/".join(parts[:depth])) in self._folders:
                continue
            if len(self._folders) >= (most := self._rules.max_files):
                raise BadFile(f"needs too many folders: at most {most} are allowed")
            try:
                (self._root / inner).mkdir(0o700)
            except FileExistsError:
                raise BadFile("needs a folder where a file is") from None
            self._folders.add(inner)

    @contextmanager
    def file(self, path: str, *, executable: bool = False) -> Iterator[Callable[[bytes], None]]:
        """A new file, to be written piece by piece; `path` is a checked one."""
        self._files += 1
        if self._files > self._rules.max_files:
            raise BadFile(f"is one too many: at most {self._rules.max_files} files are allowed")
        self.folder(path.rpartition("/")[0])
        if os.path.lexists(self._root / path):
            raise BadFile("is there already")
        with open(self._root / path, "xb") as file:
            yield lambda data: self._write(file, data)
            mode = 0o555 if executable else 0o444
            os.fchmod(file.fileno(), mode if self._read_only else mode | 0o200)

    def _write(self, file: BinaryIO, data: bytes) -> None:
        most, in_all = self._rules.max_file_bytes, self._rules.max_bytes
        self._bytes += len(data)
        if file.tell() + len(data) > most:
            raise BadFile(f"is too large: a file may have {most} bytes")
        if self._bytes > in_all:
            raise BadFile(f"is too much: all files together may have {in_all} bytes")
        file.write(data)

    def seal(self) -> None:
        """Give the folders the modes they are to have."""
        for path in (".", *self._folders):
            (self._root / path).chmod(0o555 if self._read_only else 0o755)


# -- walking ----------------------------------------------------------------------------------

MAX_LEVELS = 255
"""Folders within each other that are looked into."""
ENDLESS = 1 << 62
"""What a tree weighs that has more: nothing can be hidden down there."""
MOST_ENTRIES = 2_000_000
FREE_ENTRIES = 10_000
_BLOCK = 4096
_TOO_DEEP = errno.ENAMETOOLONG


class Entry(NamedTuple):
    path: str
    """Below the folder where the walk began."""
    name: str
    folder: int
    """The open folder that it is in."""
    status: os.stat_result


class Walk:
    """Every entry below a folder, in the order of names, folders before what is in them. What
    can't be looked at is told, and left out."""

    def __init__(
        self,
        root: Path,
        on_error: Callable[[str, OSError], None],
        *,
        most: int = MOST_ENTRIES,
        enter: Callable[[str], bool] = lambda path: True,
    ) -> None:
        """`most`: entries that are looked at in all; `enter` says whether to look into a folder."""
        self._root, self._on_error, self._left, self._enter = root, on_error, most, enter

    def __iter__(self) -> Iterator[Entry]:
        return self._below(self._root, None, "", 1)

    def _below(self, name: str | Path, above: int | None, path: str, level: int) -> Iterator[Entry]:
        try:
            if level > MAX_LEVELS:
                raise OSError(_TOO_DEEP, "too many levels of folders")
            folder = os.open(name, FOLDER, dir_fd=above)
        except OSError as error:
            self._on_error(path, error)
            return
        try:
            for inner in self._names(folder, path):
                entry = f"{path}/{inner}" if path else inner
                try:
                    status = os.stat(inner, dir_fd=folder, follow_symlinks=False)
                except OSError as error:
                    self._on_error(entry, error)
                    continue
                yield Entry(entry, inner, folder, status)
                if stat.S_ISDIR(status.st_mode) and self._enter(entry):
                    yield from self._below(inner, folder, entry, level + 1)
        finally:
            os.close(folder)

    def _names(self, folder: int, path: str) -> list[str]:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in islice(entries, self._left))
            self._left -= len(names)
            if not self._left and next(entries, None) is not None:
                self._on_error(path, OSError(errno.E2BIG, "too many entries"))
        return names


class Hidden(Exception):
    """There is a folder that this process may not look into: its container's user made it."""

    def __init__(self, size: int) -> None:
        super().__init__("a folder can't be looked into")
        self.size = size
        """Bytes of all that can be seen."""


def weight(path: Path) -> int:
    """Bytes of all files, as long as they say they are; of a file that has far more room set
    aside than it is long, that room. Entries beyond `FREE_ENTRIES` count a block each, for
    they take room too. Follows no link, and what vanishes meanwhile does not count.
    Raises Hidden if a folder can't be looked into."""
    errors: set[int | None] = set()
    total = 0
    for number, entry in enumerate(Walk(path, lambda _, error: errors.add(error.errno)), 1):
        if number > FREE_ENTRIES:
            total += _BLOCK
        if stat.S_ISREG(entry.status.st_mode):
            room, size = entry.status.st_blocks * 512, entry.status.st_size
            # Some file systems set aside as much again for a file that grows.
            total += room if room > 2 * size + (1 << 20) else size
        if _TOO_DEEP in errors:
            return ENDLESS
    if errors & {_TOO_DEEP, errno.E2BIG}:
        return ENDLESS
    if errors & {errno.EACCES, errno.EPERM}:
        raise Hidden(total)
    return total


# -- removing ---------------------------------------------------------------------------------


def remove_tree(path: Path) -> None:
    """Follows no link below the parent. What is not there is fine; OSError if something can't be
    removed, after what can be was. Nothing may still run that changes it."""
    try:
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except (OSError, RecursionError) as error:
        if os.path.lexists(path):
            # The system's own programs, to which no depth is too much.
            for command in (("chmod", "-R", "u+rwx", "--"), ("rm", "-rf", "--")):
                subprocess.run([*command, path], capture_output=True)
        if os.path.lexists(path):
            raise error if isinstance(error, OSError) else OSError(_TOO_DEEP, str(error)) from error
