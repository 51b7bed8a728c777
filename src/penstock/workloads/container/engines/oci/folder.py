"""The folder of an engine for what ends with the machine: in memory, if that has a place."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import tempfile
import time
from pathlib import Path

from penstock.workloads.container.files.tree import remove_tree

_MEMORY = ("/run", "/dev/shm")
_PREFIX, _BACK = "penstock-oci-", "root"
_ABANDONED = 60.0
"""Seconds after which nobody can still be making a folder in memory."""


def live_folder(root: Path) -> Path:
    """`root/live`, for what ends when the machine does: a link to a folder in memory, where files
    are made in microseconds, or a folder on disk if the machine has no place for that."""
    live = root / "live"
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (root / ".live.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_private(live):
            _make_live(live)
    return live


def _make_live(live: Path) -> None:
    live.unlink(missing_ok=True)  # of an earlier boot
    mounts = [line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines()]
    places = {place for _, place, kind, *_ in mounts if kind == "tmpfs"}
    for place in (Path(one) for one in _MEMORY if one in places):
        with contextlib.suppress(OSError):
            _clear_memory(place)
            made = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
            (made / _BACK).symlink_to(live)
            live.symlink_to(made)
            return
    live.mkdir(mode=0o700)


def _clear_memory(place: Path) -> None:
    """Remove folders to which no link leads any more: those of a root that was deleted."""
    for folder in place.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            linked = os.path.realpath(os.readlink(folder / _BACK)) == str(folder)
            if not linked and time.time() - folder.stat().st_mtime > _ABANDONED:
                remove_tree(folder)


def _is_private(folder: Path) -> bool:
    """Whether it is there, and nobody else can have put anything into it."""
    try:
        found = folder.stat()
    except OSError:
        return False
    private = stat.S_IMODE(found.st_mode) == 0o700 and found.st_uid == os.geteuid()
    return stat.S_ISDIR(found.st_mode) and private
