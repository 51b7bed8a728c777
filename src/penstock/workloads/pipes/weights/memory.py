"""What memory there is, and giving it back."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_PROC, _CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def give_back() -> None:
    """To be called when something large was loaded. What was needed on the way is free by then,
    and the C library would keep it: with layers that are made smaller when they are loaded, more
    than is loaded in the end."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone
    if trim is not None:
        trim(0)


def machine_memory(proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int:
    """What this process can have at most: the machine's, or less if a container has less."""
    found = [_total(proc / "meminfo"), *_limits(proc / "self" / "cgroup", cgroups)]
    return min(size for size in found if size > 0)


def _total(meminfo: Path) -> int:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:  # no Linux
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kib = next(line.split()[1] for line in lines if line.startswith("MemTotal:"))
    return int(kib) * 1024


def _limits(membership: Path, cgroups: Path) -> list[int]:
    """Of this process's group and of all above it; both versions of cgroups."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            found += _upward(cgroups, group, "memory.max")
            found += _upward(cgroups / "unified", group, "memory.max")
        elif "memory" in controllers.split(","):
            found += _upward(cgroups / "memory", group, "memory.limit_in_bytes")
    return found


def _upward(root: Path, group: str, name: str) -> list[int]:
    parts = [part for part in group.split("/") if part not in ("", "..")]
    folders = [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]
    return [size for folder in folders if (size := _size(folder / name)) is not None]


def _size(file: Path) -> int | None:
    """None for no limit, which version 1 writes as a number no machine has."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() and 0 < int(text) < 1 << 60 else None
