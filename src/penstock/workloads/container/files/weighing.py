"""How much a folder holds that a container is writing to. Blocking code, for a thread."""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from penstock.workloads.container.files.artifacts import MAX_FILES
from penstock.workloads.container.files.tree import FOLDER

MAX_LEVELS = 255
ENDLESS = 1 << 62
"""What a tree weighs that has more levels: nothing can be hidden down there."""
_BLOCK = 4096


class Hidden(Exception):
    """There is a folder that this process may not look into: its container's user made it."""

    def __init__(self, size: int) -> None:
        super().__init__("a folder can't be looked into")
        self.size = size
        """Bytes of all that can be seen."""


def weight(path: Path) -> int:
    """Bytes of all files, as long as they say they are; of a file that has far more room set
    aside than it is long, that room. Entries beyond those that are ever collected count a block
    each, for they take room too. Follows no link, and what vanishes meanwhile does not count.
    Raises Hidden if a folder can't be looked into."""
    try:
        folders = [os.open(path, FOLDER)]
    except FileNotFoundError:
        return 0
    scale = Scale()
    hidden = False
    try:
        levels = [_weigh(folders[-1], scale)]
        while levels:
            if not levels[-1]:
                levels.pop()
                os.close(folders.pop())
            elif len(levels) == MAX_LEVELS:
                return ENDLESS
            else:
                name = levels[-1].pop()
                try:
                    folders.append(os.open(name, FOLDER, dir_fd=folders[-1]))
                    levels.append(_weigh(folders[-1], scale))
                except PermissionError:
                    hidden = True
                except (FileNotFoundError, NotADirectoryError):
                    pass
    finally:
        for folder in folders:
            os.close(folder)
    if hidden:
        raise Hidden(scale.total)
    return scale.total


class Scale:
    def __init__(self) -> None:
        self.total = 0
        self._entries = 0

    def put(self, status: os.stat_result) -> None:
        self._entries += 1
        if self._entries > MAX_FILES:
            self.total += _BLOCK
        if stat.S_ISREG(status.st_mode):
            self.total += _room(status)


def _room(status: os.stat_result) -> int:
    room, size = status.st_blocks * 512, status.st_size
    # Some file systems set aside as much again for a file that grows.
    return room if room > 2 * size + (1 << 20) else size


def _weigh(folder: int, scale: Scale) -> list[str]:
    """Put its entries on the scale; the names of folders in it."""
    inner = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                scale.put(status)
                if stat.S_ISDIR(status.st_mode):
                    inner.append(entry.name)
    return inner
