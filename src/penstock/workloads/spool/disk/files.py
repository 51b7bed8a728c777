"""Files and folders that are on the disk when they are said to be. Blocking code.

Nothing is visible under its name before it is whole. What makes a job visible is one rename,
and before that its files, then its folder, are flushed; after it the folder it was moved to.
A flush that failed is final: what it was to write may be lost, and trying again would only
look like success.

What lies in a job's folder may have been put there by anybody. So nothing is read through a
symbolic link, from a device or a pipe, nor written through one.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.core.errors import InvalidRequest, StoreFailed, StoreFull
from penstock.ports.process import failpoint
from penstock.workloads.spool.config import Sync

_FULL = {errno.ENOSPC, errno.EDQUOT}
_REASONS = {
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EIO: "the disk reports an error",
    errno.EXDEV: "the folders of a workspace have to be on one file system",
}
TMP = ".tmp"
"""How the names of what is not whole, or not to stay, end."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_UNREADABLE = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Opens a folder that may not be read, where the system can."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Unfit(InvalidRequest):
    """What lies in a job's folder can't be used: says which file, and why."""

    code = "UNFIT"


class NotAFolder(Unfit):
    """What lies in the place of a job is none."""


def write_files(folder: Path | str, files: Mapping[str, bytes], sync: Sync) -> None:
    """New files, or none if it fails; FileExistsError if a name is taken."""
    opened: dict[str, int] = {}
    try:
        for name, data in files.items():
            path = f"{folder}/{name}"
            with store_errors("write", path):
                handle = opened[path] = os.open(path, _NEW, 0o666)
                failpoint("spool-created")
                _write_all(handle, data)
                failpoint("spool-written")
                if sync is Sync.FULL:
                    _start_writeback(handle)
        for path, handle in opened.items() if sync is Sync.FULL else ():
            with store_errors("write", path):
                os.fsync(handle)
            failpoint("spool-flushed")
    except BaseException:
        for path in opened:
            with suppress(OSError):
                os.unlink(path)
        raise
    finally:
        for handle in opened.values():
            os.close(handle)


def _start_writeback(handle: int) -> None:
    """So that one commit of the file system's journal has all files that are flushed together."""
    if sys.platform == "linux":
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)


def replace_file(
    folder: Path | str,
    name: str,
    data: bytes,
    sync: Sync,
    beside: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """The file has its old content or all of the new, whatever was under its name. Files that are
    written `beside` it, whatever was under their names, are flushed with it; they are seen while
    they grow."""
    draft = f"{name}{TMP}"
    files = {**beside, draft: data}
    try:
        try:
            write_files(folder, files, sync)
        except FileExistsError:
            with store_errors("replace", f"{folder}/{name}"):
                for one in files:
                    remove_tree(f"{folder}/{one}")
            write_files(folder, files, sync)
        with store_errors("write", f"{folder}/{name}"):
            try:
                os.replace(f"{folder}/{draft}", f"{folder}/{name}")
            except IsADirectoryError:
                remove_tree(f"{folder}/{name}")
                os.replace(f"{folder}/{draft}", f"{folder}/{name}")
        failpoint("spool-replaced")
    except BaseException:
        with suppress(OSError):
            os.unlink(f"{folder}/{draft}")
        raise


def make_folder(path: Path | str) -> None:
    """A new folder; FileExistsError if the name is taken."""
    with store_errors("make", path):
        os.mkdir(path)
    failpoint("spool-made")


def fsync_dir(path: Path | str, sync: Sync = Sync.FULL) -> None:
    """What was made, removed or renamed in it is on the disk from now on."""
    if sync is Sync.NONE:
        return
    with store_errors("flush", path):
        handle = os.open(path, _FOLDER | os.O_NOFOLLOW)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    failpoint("spool-folder-flushed")


def flush_all(path: Path) -> None:
    """Everything that was written to the file system of this folder is on the disk."""
    with store_errors("flush", path):
        handle = os.open(path, _FOLDER)
        try:
            flush_file_system(handle)
        finally:
            os.close(handle)
    failpoint("spool-all-flushed")


def move(source: Path | str, target: Path | str, *, sync: Sync) -> None:
    """Make a job what its new folder says, at once for whoever looks.

    Of several who move the same job one succeeds, and the others get FileNotFoundError; a
    target that is there is never replaced (FileExistsError).
    """
    with store_errors("move", source):
        rename_exclusively(source, target)
    failpoint("spool-moved")
    if sync is Sync.FULL:
        flush_move(os.path.dirname(source), os.path.dirname(target))


def flush_move(source: Path | str, target: Path | str) -> None:
    """What was moved from one folder to the other is there for good."""
    fsync_dir(target)
    if not logs_renames(target):
        fsync_dir(source)


class OpenFolder:
    """A real folder, held open so that all that is read in it is of this one.

    FileNotFoundError if it is not there, Unfit if it is no folder or may not be read.
    """

    def __init__(self, path: Path | str) -> None:
        self.path, self.name = path, os.path.basename(path)
        self._names: frozenset[str] | None = None
        try:
            self._handle = os.open(path, _FOLDER | os.O_NOFOLLOW)
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in (errno.ENOTDIR, errno.ELOOP):
                mode = os.lstat(path).st_mode
                raise NotAFolder(self.name, f"is {_kind(mode)}, not a folder") from None
            raise Unfit(self.name, f"can't be read: {_reason(error)}") from error

    def __enter__(self) -> OpenFolder:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._handle)

    def has(self, name: str) -> bool:
        """Whether anything lay there under this name at the first question."""
        if self._names is None:
            self._names = frozenset(os.listdir(self._handle))
        return name in self._names

    def look(self, name: str) -> os.stat_result | None:
        """What lies there under this name, itself and not what it points to; None if nothing."""
        try:
            return os.stat(name, dir_fd=self._handle, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def read(self, name: str, most: int) -> bytes:
        """All of a file. FileNotFoundError if it is not there, Unfit if it is no plain file, has
        more than `most` bytes, or may not be read."""
        try:
            found = os.stat(name, dir_fd=self._handle, follow_symlinks=False)
            # Nothing else is opened: a pipe would wait for its other end, and some devices act.
            if not stat.S_ISREG(found.st_mode):
                raise Unfit(name, f"is {_kind(found.st_mode)}, not a file")
            handle = os.open(name, _READ, dir_fd=self._handle)
            try:
                found = os.fstat(handle)
                if not stat.S_ISREG(found.st_mode):
                    raise Unfit(name, "is not a file")
                # One byte more than there should be: less than was asked for is the end.
                data = _read_all(handle, most + 1, min(found.st_size + 1, 1 << 20))
            finally:
                os.close(handle)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise Unfit(name, f"can't be read: {_reason(error)}") from error
        if len(data) > most:
            raise Unfit(name, f"is larger than {most} bytes")
        return data


def exists(path: str) -> bool:
    """Whether anything is there, itself and not what it points to."""
    if _has_quick_access():
        return os.access(path, os.F_OK, follow_symlinks=False)
    return os.path.lexists(path)


@cache
def _has_quick_access() -> bool:
    """Where it is missing, it answers no to everything."""
    with suppress(NotImplementedError):
        return os.access(os.sep, os.F_OK, follow_symlinks=False)
    return False


def read_file(folder: Path | str | OpenFolder, name: str, most: int) -> bytes:
    """All of a file, as `OpenFolder.read` does it."""
    if isinstance(folder, OpenFolder):
        return folder.read(name, most)
    with OpenFolder(folder) as opened:
        return opened.read(name, most)


def read_optional(folder: Path | str | OpenFolder, name: str, most: int) -> bytes | None:
    """The same; None if it is not there."""
    if isinstance(folder, OpenFolder) and not folder.has(name):
        return None
    try:
        return read_file(folder, name, most)
    except FileNotFoundError:
        return None


def read_text(folder: Path | str | OpenFolder, name: str, most: int) -> str:
    data = read_file(folder, name, most)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Unfit(
            name, f"is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}"
        ) from None


class store_errors:
    """What the disk refuses, in plain words. That a name is taken or gone is the caller's
    business, and passes."""

    __slots__ = ("_action", "_path")

    def __init__(self, action: str, path: Path | str) -> None:
        self._action, self._path = action, path

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, OSError) or isinstance(error, FileExistsError | FileNotFoundError):
            return
        what = f"can't {self._action} {self._path}"
        if error.errno in _FULL:
            hint = "free some space, and try again"
            raise StoreFull(f"{what}: no space left", hint=hint) from error
        raise StoreFailed(f"{what}: {_reason(error)}") from error


def _kind(mode: int) -> str:
    for matches, words in (
        (stat.S_ISLNK, "a symbolic link"),
        (stat.S_ISDIR, "a folder"),
        (stat.S_ISREG, "a file"),
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
    ):
        if matches(mode):
            return words
    return "a device"


def _reason(error: OSError) -> str:
    reason = _REASONS.get(error.errno or 0)
    return reason or (error.strerror or str(error)).lower()


def _write_all(handle: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(handle, rest) :]


def _read_all(handle: int, most: int, piece: int) -> bytes:
    pieces: list[bytes] = []
    while most > 0:
        asked = min(most, piece)
        pieces.append(os.read(handle, asked))
        if len(pieces[-1]) < asked:
            break
        most -= asked
    return b"".join(pieces)


_AT_FDCWD = -100
_NOREPLACE = ctypes.c_uint(1)
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP}


def rename_exclusively(source: Path | str, target: Path | str) -> None:
    """FileExistsError if the target is there, FileNotFoundError if the source is not."""
    call, names = _library("renameat2"), (os.fsencode(source), os.fsencode(target))
    if call is not None and not call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _NOREPLACE):
        return
    code = ctypes.get_errno() if call is not None else errno.ENOSYS
    if code in _UNSUPPORTED:
        _rename_after_a_look(source, target)
    else:
        raise OSError(code, os.strerror(code), str(source), None, str(target))


def can_flush_file_systems() -> bool:
    return _library("syncfs") is not None


def flush_file_system(handle: int) -> None:
    """All of the file system that this open folder is on; OSError if something was lost."""
    if _library("syncfs")(handle):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@cache
def _library(name: str) -> Any:
    """A call of the C library; None where there is no such thing."""
    return getattr(ctypes.CDLL(None, use_errno=True), name, None)


def _rename_after_a_look(source: Path | str, target: Path | str) -> None:
    """For old kernels and some file systems. A folder with something in it can't be replaced by
    a rename anyway; one that is empty can, between the look and the rename."""
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
        raise


_LOGGING = frozenset({"ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs"})
"""A rename between two folders is one entry of their log: on the disk with either folder."""


def logs_renames(folder: Path | str) -> bool:
    """False of a file system that is not known to: then both folders have to be flushed."""
    return _file_system(os.stat(folder).st_dev) in _LOGGING


@cache
def _file_system(device: int) -> str:
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            return after.split()[0]
    return ""


# -- removing -----------------------------------------------------------------------


def remove_tree(path: Path | str) -> None:
    """Take away a folder and all in it, or a file. Follows no link, not even one that is put there
    meanwhile; fine if it is not there; OSError if something can't be removed.

    Everything is named relative to an open folder. A folder inside is moved up beside `path` and
    emptied there: so neither a path nor the stack grows with how deep it lies.
    """
    parent, name = os.path.split(path)
    try:
        above = os.open(parent, _FOLDER)
    except FileNotFoundError:
        return
    try:
        names = [name]
        while names:
            inner = _emptied(names[-1], above)
            names += inner
            if not inner:
                names.pop()
    finally:
        os.close(above)


def _emptied(name: str, above: int) -> list[str]:
    """What its folders are called after they were moved up; it is gone if it had none."""
    try:
        if not make_usable(name, above):
            os.unlink(name, dir_fd=above)
            return []
        folder = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=above)
    except FileNotFoundError:
        return []
    lifted: list[str] = []
    try:
        for entry in os.listdir(folder):
            if make_usable(entry, folder):
                lifted.append(f"{secrets.token_hex(8)}{TMP}")
                os.rename(entry, lifted[-1], src_dir_fd=folder, dst_dir_fd=above)
            else:
                os.unlink(entry, dir_fd=folder)
    finally:
        os.close(folder)
    if not lifted:
        os.rmdir(name, dir_fd=above)
    return lifted


def make_usable(name: str, above: int | None = None) -> bool:
    """Whether it is a folder; if so, its owner may read and change it from now on."""
    mode = os.stat(name, dir_fd=above, follow_symlinks=False).st_mode
    if not stat.S_ISDIR(mode):
        return False
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        with suppress(OSError):  # through a handle, so that no link is followed
            folder = os.open(name, _UNREADABLE, dir_fd=above)
            try:
                os.chmod(f"/proc/self/fd/{folder}", stat.S_IMODE(mode) | stat.S_IRWXU)
            finally:
                os.close(folder)
    return True
