"""Taking away a folder and all in it, whatever anybody put there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

TMP = ".tmp"
"""How the names of what is not whole, or not to stay, end."""


def remove_tree(path: Path) -> None:
    """Follows no link; fine if it is not there; OSError if something can't be removed.

    A folder inside is moved up beside `path` and emptied there: so neither a path nor the
    stack grows with how deep it lies.
    """
    names = (path.with_name(f"{path.name}.{number}{TMP}") for number in count())
    folders = [path]
    while folders:
        folder = folders[-1]
        inner = list(_emptied(folder, names))
        folders += inner
        if not inner:
            with suppress(FileNotFoundError):
                os.rmdir(folder)
            folders.pop()


def _emptied(folder: Path, names: Iterator[Path]) -> Iterator[Path]:
    """Removes its files, and moves its folders away; yields where they are now."""
    for name in _entries(folder):
        inner = folder / name
        if not stat.S_ISDIR(os.lstat(inner).st_mode):
            os.unlink(inner)
            continue
        _open_up(inner)
        lifted = next(names)
        os.rename(inner, lifted)
        yield lifted


def _entries(folder: Path) -> list[str]:
    try:
        if not stat.S_ISDIR(os.lstat(folder).st_mode):
            os.unlink(folder)
            return []
        _open_up(folder)
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def _open_up(folder: Path) -> None:
    """Its owner may do with it what it has to."""
    if os.lstat(folder).st_mode & stat.S_IRWXU != stat.S_IRWXU:
        with suppress(PermissionError):
            os.chmod(folder, stat.S_IRWXU)
