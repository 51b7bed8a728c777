"""Removing a folder and all in it, whatever a job made of it. Blocking code, for a thread.

A job can leave folders without any permission, and trees deeper than a path or a stack can be.
So no path is built and nothing is done by recursion: a folder that is not empty is moved up to
the top, and emptied there in its turn.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

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
    with _opened(above, name) as top:
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
    with _opened(top, entry.name) as folder:
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
    with _opened(above, name):
        os.rename(name, secrets.token_hex(16), src_dir_fd=above, dst_dir_fd=top)


def _listed(folder: int, without: dict[str, OSError] | None = None) -> list[os.DirEntry[str]]:
    """Some of its entries; none only if there are no others."""
    with os.scandir(folder) as entries:
        return list(islice((one for one in entries if one.name not in (without or ())), _BATCH))


@contextmanager
def _opened(above: int, name: str) -> Iterator[int]:
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
