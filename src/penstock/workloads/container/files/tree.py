"""Folders whose content somebody else named: filled under caps, and removed whatever a job made of
them. Blocking code, for a thread.

No step follows a link: each part of a path is opened below the one before it. Nothing that is
there is written over. A job can leave folders without any permission, and trees deeper than a path
or a stack can be; so `remove_tree` builds no path and does nothing by recursion: it moves a folder
that is not empty up to the top, and empties it there in its turn.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
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

_BATCH = 1000
_PLACE = os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC


def remove_tree(path: Path) -> None:
    """Follows no link below the parent. What is not there is fine; OSError if something can't be
    removed, after what can be was."""
    try:
        above = os.open(path.parent, _PLACE)
    except FileNotFoundError:
        return
    try:
        _remove(above, path.name)
    except FileNotFoundError:
        pass
    finally:
        os.close(above)


def _remove(above: int, name: str) -> None:
    if not stat.S_ISDIR(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=above)
        return
    failed: dict[str, OSError] = {}
    with _writable(above, name) as top:
        while batch := _listed(top, failed):
            for entry in batch:
                try:
                    _clear_away(top, entry)
                except FileNotFoundError:
                    pass  # somebody else was quicker
                except OSError as error:
                    failed[entry.name] = error
    if failed:
        raise next(iter(failed.values()))
    os.rmdir(name, dir_fd=above)


def _clear_away(top: int, entry: os.DirEntry[str]) -> None:
    """Remove an entry of the top; folders in it that aren't empty become entries of the top."""
    if not entry.is_dir(follow_symlinks=False):
        os.unlink(entry.name, dir_fd=top)
        return
    with _writable(top, entry.name) as folder:
        while batch := _listed(folder):
            for inner in batch:
                if not inner.is_dir(follow_symlinks=False):
                    os.unlink(inner.name, dir_fd=folder)
                elif not _removed(folder, inner.name):
                    _lift(folder, inner.name, top)
    os.rmdir(entry.name, dir_fd=top)


def _removed(above: int, name: str) -> bool:
    try:
        os.rmdir(name, dir_fd=above)
    except OSError:
        return False
    return True


def _lift(above: int, name: str, top: int) -> None:
    # Its owner has to be able to write to a folder that is moved.
    with _writable(above, name):
        os.rename(name, secrets.token_hex(16), src_dir_fd=above, dst_dir_fd=top)


def _listed(folder: int, without: dict[str, OSError] | None = None) -> list[os.DirEntry[str]]:
    """Some of its entries; none only if there are no others."""
    with os.scandir(folder) as entries:
        return list(islice((one for one in entries if one.name not in (without or ())), _BATCH))


@contextmanager
def _writable(above: int, name: str) -> Iterator[int]:
    """A folder that can be read and written by its owner, whatever its mode was."""
    place = os.open(name, _PLACE | os.O_NOFOLLOW, dir_fd=above)
    try:
        if os.fstat(place).st_mode & stat.S_IRWXU != stat.S_IRWXU:
            with suppress(PermissionError):
                os.chmod(f"/proc/self/fd/{place}", 0o700)
        handle = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=place)
    finally:
        os.close(place)
    try:
        yield handle
    finally:
        os.close(handle)
