"""Taking away a folder and all in it, whatever anybody put there."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

TMP = ".tmp"
"""How the names of what is not whole, or not to stay, end."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_UNREADABLE = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
"""Opens a folder that may not be read, where the system can."""
_NO_FOLDER = {errno.ENOTDIR, errno.ELOOP}


def remove_tree(path: Path) -> None:
    """Follows no link, not even one that is put there meanwhile; fine if it is not there; OSError
    if something can't be removed.

    Everything is named relative to an open folder. A folder inside is moved up beside `path` and
    emptied there: so neither a path nor the stack grows with how deep it lies.
    """
    try:
        above = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        names = [path.name]
        while names:
            inner = list(_emptied(names[-1], above))
            names += inner
            if not inner:
                _remove(names.pop(), above)
    finally:
        os.close(above)


def _emptied(name: str, above: int) -> Iterator[str]:
    """Removes its files, and moves its folders up; yields what they are called there."""
    folder = _opened(name, above)
    if folder is None:
        return
    try:
        for entry in os.listdir(folder):
            if not stat.S_ISDIR(os.stat(entry, dir_fd=folder, follow_symlinks=False).st_mode):
                os.unlink(entry, dir_fd=folder)
                continue
            _make_usable(entry, folder)
            lifted = f"{secrets.token_hex(8)}{TMP}"
            os.rename(entry, lifted, src_dir_fd=folder, dst_dir_fd=above)
            yield lifted
    finally:
        os.close(folder)


def _opened(name: str, above: int) -> int | None:
    """None if it is no folder, or not there."""
    try:
        _make_usable(name, above)
        return os.open(name, _FOLDER, dir_fd=above)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in _NO_FOLDER:
            return None
        raise


def _remove(name: str, above: int) -> None:
    """What is empty, or no folder."""
    with suppress(FileNotFoundError):
        if stat.S_ISDIR(os.stat(name, dir_fd=above, follow_symlinks=False).st_mode):
            os.rmdir(name, dir_fd=above)
        else:
            os.unlink(name, dir_fd=above)


def _make_usable(name: str, above: int) -> None:
    """The owner of a folder may read and change it from now on."""
    mode = os.stat(name, dir_fd=above, follow_symlinks=False).st_mode
    if not stat.S_ISDIR(mode) or mode & stat.S_IRWXU == stat.S_IRWXU:
        return
    with suppress(OSError):
        folder = os.open(name, _UNREADABLE, dir_fd=above)
        try:
            open_up(Path(f"/proc/self/fd/{folder}"), mode)
        finally:
            os.close(folder)


def open_up(folder: Path, mode: int) -> None:
    """Its owner may do with it what it has to."""
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        with suppress(PermissionError):
            os.chmod(folder, stat.S_IMODE(mode) | stat.S_IRWXU)
