"""What file system a folder is on, as far as renames go."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

_LOGGING = frozenset({"ext3", "ext4", "xfs", "btrfs", "zfs", "tmpfs"})
"""A rename between two folders is one entry of their log: on the disk with either folder."""


def logs_renames(folder: Path) -> bool:
    """False of a file system that is not known to: then both folders have to be flushed."""
    return _kind(os.stat(folder).st_dev) in _LOGGING


@cache
def _kind(device: int) -> str:
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
