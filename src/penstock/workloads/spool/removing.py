"""Taking away a folder and all in it, whatever anybody put there."""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

TMP = ".tmp"
"""How the names of what is not whole, or not to stay, end."""


def remove_tree(path: Path) -> None:
    """Follows no link; fine if it is not there; OSError if something can't be removed.

    A folder inside is moved up beside `path` and emptied there: so neither a path nor the
    stack grows with how deep it lies.
    """
    folders = [path]
    while folders:
        folder = folders[-1]
        inner = list(_emptied(folder, path.parent))
        folders += inner
        if not inner:
            with suppress(FileNotFoundError):
                os.rmdir(folder)
            folders.pop()


def _emptied(folder: Path, above: Path) -> Iterator[Path]:
    """Removes its files, and moves its folders away; yields where they are now."""
    for name in _entries(folder):
        inner = folder / name
        mode = os.lstat(inner).st_mode
        if not stat.S_ISDIR(mode):
            os.unlink(inner)
            continue
        open_up(inner, mode)
        lifted = above / f"{secrets.token_hex(8)}{TMP}"
        os.rename(inner, lifted)
        yield lifted


def _entries(folder: Path) -> list[str]:
    try:
        mode = os.lstat(folder).st_mode
        if not stat.S_ISDIR(mode):
            os.unlink(folder)
            return []
        open_up(folder, mode)
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def open_up(folder: Path, mode: int) -> None:
    """Its owner may do with it what it has to."""
    if mode & stat.S_IRWXU != stat.S_IRWXU:
        with suppress(PermissionError):
            os.chmod(folder, stat.S_IMODE(mode) | stat.S_IRWXU)
