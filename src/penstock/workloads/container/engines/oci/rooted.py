"""Paths as a process sees them whose root is some folder: no link leads out of it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

_MOST_LINKS = 40


class OutOfReach(OSError):
    """A loop of links."""


def resolve(root: Path, path: str, *, last: bool = True) -> Path:
    """Where `path` really is below `root`, links followed as in a chroot; `last` says whether
    also the last part is followed. Parts that don't exist are taken as they are."""
    todo = _parts(path)
    done: list[str] = []
    links = 0
    while todo:
        part = todo.pop(0)
        if part == "..":
            del done[-1:]
            continue
        here = os.path.join(root, *done, part)
        if (last or todo) and os.path.islink(here):
            links += 1
            if links > _MOST_LINKS:
                raise OutOfReach(errno.ELOOP, os.strerror(errno.ELOOP), path)
            target = os.readlink(here)
            if target.startswith("/"):
                done.clear()
            todo[:0] = _parts(target)
        else:
            done.append(part)
    return root.joinpath(*done)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]
