"""Folders whose content somebody else named: filled under caps, and removed whatever a job made of
them. Blocking code, for a thread.

No step follows a link: each part of a path is opened below the one before it. Nothing that is
there is written over. A job can leave folders without any permission, and trees deeper than a path
or a stack can be.
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from penstock.workloads.container.config import InputRules

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""How a folder is opened that must not be a link to one."""


class BadFile(ValueError):
    """A file that can't be taken, in a sentence that goes on from its path."""


class Tree:
    """The files of one job. Until `seal` nobody but the worker can read them."""

    def __init__(self, root: Path, rules: InputRules, *, read_only: bool = True) -> None:
        os.mkdir(root, 0o700)
        self._root = os.open(root, FOLDER)
        self._rules = rules
        self._read_only = read_only
        self._folders: set[str] = set()
        self._files = 0
        self._bytes = 0

    def __enter__(self) -> Tree:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._root)

    def folder(self, path: str) -> None:
        """Make it and those above it; it may be there."""
        os.close(self._opened(path))

    @contextmanager
    def file(self, path: str, *, executable: bool = False) -> Iterator[Writing]:
        """A new file, to be written piece by piece; `path` is a checked one."""
        self._files += 1
        if self._files > self._rules.max_files:
            raise BadFile(f"is one too many: at most {self._rules.max_files} files are allowed")
        above, _, name = path.rpartition("/")
        folder = self._opened(above)
        try:
            with self._created(folder, name) as written:
                yield written
                mode = 0o555 if executable else 0o444
                os.fchmod(written.handle, mode if self._read_only else mode | 0o200)
        finally:
            os.close(folder)

    @contextmanager
    def _created(self, folder: int, name: str) -> Iterator[Writing]:
        """A new file; gone again if it can't be written to its end."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            handle = os.open(name, flags, 0o600, dir_fd=folder)
        except FileExistsError:
            raise BadFile("is there already") from None
        written = Writing(self, handle)
        try:
            yield written
        except BaseException:
            os.unlink(name, dir_fd=folder)
            self._files -= 1
            self._bytes -= written.size
            raise
        finally:
            os.close(handle)

    def seal(self) -> None:
        """Give the folders the modes they are to have."""
        for path in (".", *self._folders):
            os.chmod(path, 0o555 if self._read_only else 0o755, dir_fd=self._root)

    def count(self, size: int) -> None:
        self._bytes += size
        if self._bytes > self._rules.max_bytes:
            raise BadFile(f"is too much: all files together may have {self._rules.max_bytes} bytes")

    def largest(self) -> int:
        return self._rules.max_file_bytes

    def _opened(self, path: str) -> int:
        handle = os.dup(self._root)
        parts = path.split("/") if path not in ("", ".") else []
        for depth, part in enumerate(parts, 1):
            try:
                self._make("/".join(parts[:depth]), part, handle)
                inner = os.open(part, FOLDER, dir_fd=handle)
            except OSError as error:
                if error.errno in (errno.ENOTDIR, errno.ELOOP):
                    raise BadFile("needs a folder where a file is") from None
                raise
            finally:
                os.close(handle)
            handle = inner
        return handle

    def _make(self, path: str, name: str, above: int) -> None:
        if path in self._folders:
            return
        if len(self._folders) >= self._rules.max_files:
            raise BadFile(f"needs too many folders: at most {self._rules.max_files} are allowed")
        try:
            os.mkdir(name, 0o700, dir_fd=above)
        except FileExistsError:
            # A file: no folder is here that this tree did not make.
            raise BadFile("needs a folder where a file is") from None
        self._folders.add(path)


class Writing:
    """An open file of a tree."""

    def __init__(self, tree: Tree, handle: int) -> None:
        self._tree = tree
        self.handle = handle
        self.size = 0

    def write(self, data: bytes) -> None:
        self.size += len(data)
        if self.size > (most := self._tree.largest()):
            raise BadFile(f"is too large: a file may have {most} bytes")
        self._tree.count(len(data))
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self.handle, rest) :]


# -- removing ---------------------------------------------------------------------------------

_LEVELS = 16


def remove_tree(path: Path) -> None:
    """Follows no link below the parent. What is not there is fine; OSError if something can't be
    removed, after what can be was. Nothing may still run that changes it."""
    try:
        _remove(path, _LEVELS)
    except OSError:
        if os.path.lexists(path):
            # The system's own programs, to which no depth is too much.
            for command in (("chmod", "-R", "u+rwx", "--"), ("rm", "-rf", "--")):
                subprocess.run([*command, path], capture_output=True)
        if os.path.lexists(path):
            raise


def _remove(path: str | Path, levels: int) -> None:
    """Raises OSError for what is too deep for a stack or a path, and for what may not be read."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    if not levels:
        raise OSError(errno.ELOOP, "too many levels")
    with os.scandir(path) as entries:
        inner = [entry.path for entry in entries]
    for one in inner:
        _remove(one, levels - 1)
    os.rmdir(path)
