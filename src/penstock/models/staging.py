"""Bringing files into a folder so that others see them whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from penstock.core.errors import Conflict, StoreFailed, StoreFull

Progress = Callable[[str, int, int], None]
"""Called with the step, and how many bytes of how many are done; 0 of 0 while unknown."""

_NEW = ".new-"
_CHUNK = 4 << 20
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""The errors that mean that there is no space."""


@contextlib.contextmanager
def staging(root: Path) -> Iterator[Path]:
    """A folder of our own below it, gone afterwards. What dead programs left there goes too."""
    with locked(root):
        _clear(root)
        folder = root / f"{_NEW}{secrets.token_hex(8)}"
        folder.mkdir(mode=0o700)
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(held, fcntl.LOCK_EX)  # the kernel lets go of it when we die
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """Nobody else changes what is in the folder meanwhile."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def clear_staging(root: Path) -> None:
    """Remove the staging folders of programs that died."""
    if root.is_dir():
        with locked(root):
            _clear(root)


@contextlib.contextmanager
def writing(root: Path) -> Iterator[None]:
    """Say what is wrong with a folder that can't be written to."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise full(root) from error
        why = error.strerror or str(error)
        raise StoreFailed(f"can't write to {root}: {why}") from error


def full(root: Path, needed: int = 0) -> StoreFull:
    more = f" for {needed:,} bytes more" if needed else ""
    return StoreFull(
        f"there is no space left in {root}{more}",
        hint="'penstock model delete NAME' makes some; --models-dir names another folder",
    )


def check_space(root: Path, needed: int) -> None:
    """Refuse at once what could only end badly. Raises StoreFull."""
    if needed > shutil.disk_usage(root).free:
        raise full(root, needed)


def link_or_copy(source: Path, target: Path, progress: Progress | None = None) -> Path:
    """The same file under another name, or a copy of it where that can't be."""
    real = source.resolve()
    try:
        os.link(real, target)
    except OSError:
        with real.open("rb") as read, target.open("xb") as written:
            size = os.fstat(read.fileno()).st_size
            check_space(target.parent, size)
            copy(read, written.write, "copying", size, progress)
    return target


def digest(path: Path, progress: Progress | None = None) -> str:
    """The SHA-256 of a file, in hexadecimal digits."""
    summed = hashlib.sha256()
    with path.open("rb") as file:
        copy(file, summed.update, "checking", path.stat().st_size, progress)
    return summed.hexdigest()


def copy(
    source: BinaryIO,
    target: Callable[[bytes], object],
    doing: str,
    size: int,
    progress: Progress | None = None,
) -> None:
    done = 0
    while part := source.read(_CHUNK):
        target(part)
        done += len(part)
        if progress:
            progress(doing, done, size)


@contextlib.contextmanager
def exclusive(part: Path) -> Iterator[BinaryIO]:
    """A file that is written bit by bit, over several programs' lives. Raises Conflict if one
    of them is at it now."""
    with open(os.open(part, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Whoever had it until now may have moved it to its place.
            if not os.path.samestat(os.fstat(file.fileno()), os.stat(part)):
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError):
            raise Conflict("another program is fetching the same file just now") from None
        yield file


def flush(path: Path) -> None:
    """Have a file, or the names in a folder, survive the loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clear(root: Path) -> None:
    for old in root.glob(f"{_NEW}*"):
        with contextlib.suppress(OSError):
            held = os.open(old, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old)
            finally:
                os.close(held)
