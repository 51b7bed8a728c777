"""The machine: its cores, its memory, and what the kernel's control groups allow of it.

Version 2 has one tree (`memory.max`), version 1 one for memory (`memory.limit_in_bytes`). A limit
of any group above a process holds for it too. Inside a container the path of a group may be the
host's, and name nothing here; then only the root of the tree is looked at.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")
_KILLS = re.compile(r"^oom_kill (\d+)$", re.M)


class Machine(Struct, frozen=True):
    cores: int
    memory: int


def this_machine() -> Machine:
    """As much of it as this process may have."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Machine(cores=cores or 1, memory=min(memory, memory_limit_of() or memory))


def memory_limit_of(process: int | str = "self", *, root: Path = ROOT, proc: Path = PROC) -> int:
    """The lowest limit in bytes of the groups of a process; 0 if there is none."""
    found = (
        _number(group / name)
        for group in _groups(process, root, proc)
        for name in ("memory.max", "memory.limit_in_bytes")
    )
    return min((limit for limit in found if limit), default=0)


def memory_kills(process: int | str = "self", *, root: Path = ROOT, proc: Path = PROC) -> int:
    """How often the kernel has killed a process of the same group for memory; 0 if it is unknown.

    Never a count of the whole machine: most of those have nothing to do with this process.
    """
    for group in _groups(process, root, proc):
        for name in ("memory.events.local", "memory.events", "memory.oom_control"):
            if (found := _KILLS.search(_text(group / name))) is not None:
                return int(found[1])
    return 0


def _groups(process: int | str, root: Path, proc: Path) -> Iterator[Path]:
    """The folders of its groups, from its own up to the root of each tree."""
    for line in _text(proc / str(process) / "cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            tree = root / "unified" if (root / "unified").is_dir() else root
        elif "memory" in controllers.split(","):
            tree = root / "memory"
        else:
            continue
        group = tree / path.lstrip("/")
        yield from (one for one in (group, *group.parents) if one == tree or tree in one.parents)


def _number(file: Path) -> int:
    text = _text(file).strip()
    return int(text) if text.isdecimal() else 0


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
