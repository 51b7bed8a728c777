"""Files and folders that are on the disk when they are said to be. Blocking code.

Nothing is visible under its name before it is whole. What makes a job visible is one rename,
and before that its files, then its folder, are flushed; after it the folder it was moved to.
A flush that failed is final: what it was to write may be lost, and trying again would only
look like success.

What lies in a job's folder may have been put there by anybody. So nothing is read through a
symbolic link, from a device or a pipe, nor written through one.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.core.errors import InvalidRequest, StoreFailed, StoreFull
from penstock.ports.failpoint import failpoint
from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.kernel import flush_file_system, rename_exclusively
from penstock.workloads.spool.mounts import logs_renames
from penstock.workloads.spool.removing import TMP, remove_tree

_FULL = {errno.ENOSPC, errno.EDQUOT}
_REASONS = {
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EIO: "the disk reports an error",
    errno.EXDEV: "the folders of a workspace have to be on one file system",
}
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Unfit(InvalidRequest):
    """What lies in a job's folder can't be used: says which file, and why."""

    code = "UNFIT"


def write_file(folder: Path, name: str, data: bytes, sync: Sync) -> None:
    """A new file; FileExistsError if the name is taken."""
    path = f"{folder}/{name}"
    with store_errors("write", path):
        handle = os.open(path, _NEW, 0o666)
        try:
            failpoint("spool-created")
            _write_all(handle, data)
            failpoint("spool-written")
            if sync is Sync.FULL:
                os.fsync(handle)
                failpoint("spool-flushed")
        finally:
            os.close(handle)


def replace_file(folder: Path, name: str, data: bytes, sync: Sync) -> None:
    """The file has its old content or all of the new, whatever was under its name."""
    draft = f"{name}{TMP}"
    try:
        _write_anew(folder, draft, data, sync)
        with store_errors("write", f"{folder}/{name}"):
            try:
                os.replace(f"{folder}/{draft}", f"{folder}/{name}")
            except IsADirectoryError:
                remove_tree(folder / name)
                os.replace(folder / draft, folder / name)
        failpoint("spool-replaced")
    except BaseException:
        with suppress(OSError):
            os.unlink(folder / draft)
        raise


def _write_anew(folder: Path, name: str, data: bytes, sync: Sync) -> None:
    try:
        write_file(folder, name, data, sync)
    except FileExistsError:
        with store_errors("replace", folder / name):
            remove_tree(folder / name)
        write_file(folder, name, data, sync)


def make_folder(path: Path) -> None:
    """A new folder; FileExistsError if the name is taken."""
    with store_errors("make", path):
        os.mkdir(path)
    failpoint("spool-made")


def fsync_dir(path: Path, sync: Sync = Sync.FULL) -> None:
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


def move(source: Path, target: Path, *, sync: Sync) -> None:
    """Make a job what its new folder says, at once for whoever looks.

    Of several who move the same job one succeeds, and the others get FileNotFoundError; a
    target that is there is never replaced (FileExistsError).
    """
    with store_errors("move", source):
        rename_exclusively(source, target)
    failpoint("spool-moved")
    flush_move(source.parent, target.parent, sync)


def flush_move(source: Path, target: Path, sync: Sync) -> None:
    """What was moved from one folder to the other is there for good."""
    fsync_dir(target, sync)
    if sync is Sync.FULL and not logs_renames(target):
        fsync_dir(source, sync)


def read_file(path: Path, most: int) -> bytes:
    """All of it. FileNotFoundError if it is not there, Unfit if it is no plain file, has more
    than `most` bytes, or may not be read."""
    try:
        with _opened(path) as handle:
            data = _read_all(handle, most + 1)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unfit(path.name, f"can't be read: {_reason(error)}") from error
    if len(data) > most:
        raise Unfit(path.name, f"is larger than {most} bytes")
    return data


def read_text(path: Path, most: int) -> str:
    data = read_file(path, most)
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise Unfit(
            path.name, f"is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}"
        ) from None


@contextmanager
def store_errors(action: str, path: Path | str) -> Iterator[None]:
    """What the disk refuses, in plain words. That a name is taken or gone is the caller's
    business, and passes."""
    try:
        yield
    except (FileExistsError, FileNotFoundError):
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFull(
                f"can't {action} {path}: no space left", hint="free some space, and try again"
            ) from error
        raise StoreFailed(f"can't {action} {path}: {_reason(error)}") from error


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A plain file in a folder that is one. Nothing else is opened: a pipe would wait for its
    other end, and some devices act on it."""
    with _folder_of(path) as folder:
        found = os.stat(path.name, dir_fd=folder, follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            raise Unfit(path.name, f"is {_kind(found.st_mode)}, not a file")
        handle = os.open(path.name, _READ, dir_fd=folder)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise Unfit(path.name, "is not a file")
        yield handle
    finally:
        os.close(handle)


@contextmanager
def _folder_of(path: Path) -> Iterator[int]:
    try:
        handle = os.open(path.parent, _FOLDER | os.O_NOFOLLOW)
    except (NotADirectoryError, OSError) as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            mode = os.lstat(path.parent).st_mode
            raise Unfit(path.parent.name, f"is {_kind(mode)}, not a folder") from None
        raise
    try:
        yield handle
    finally:
        os.close(handle)


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


def _read_all(handle: int, most: int) -> bytes:
    pieces: list[bytes] = []
    while most > 0 and (piece := os.read(handle, min(most, 1 << 20))):
        pieces.append(piece)
        most -= len(piece)
    return b"".join(pieces)
