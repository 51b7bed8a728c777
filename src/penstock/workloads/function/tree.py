"""A process and what it started, as the kernel sees them.

Where there is no /proc, only the process group is known; that covers all but what has
left the group.
"""

from __future__ import annotations

import os
import select
import signal
import time
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_ROUNDS = 1000
_PAUSE = 0.001
"""Seconds between rounds: on a busy machine even the killed need a moment to die."""


def descendants(pid: int) -> list[int]:
    """Every live process below `pid`, at this moment."""
    found = []
    for child in _children(pid):
        if not _is_dead(child):
            found.append(child)
        found += descendants(child)
    return found


def terminate(pid: int) -> list[int]:
    """Ask the process, its group and its descendants to end.

    Returns a hold (a pidfd) on each descendant: should the process die first, nothing else
    would lead to those that are slow to end, or deaf.
    """
    held = []
    for below in descendants(pid):
        with suppress(OSError):
            held.append(os.pidfd_open(below))
        _signal(below, signal.SIGTERM)
    _signal_group(pid, signal.SIGTERM)
    return held


def finish(held: list[int]) -> None:
    """End those on whom there is a hold, wait until they are dead, and let go of them."""
    for hold in held:
        with suppress(OSError):
            signal.pidfd_send_signal(hold, signal.SIGKILL)
    for hold in held:
        death = select.poll()
        death.register(hold, select.POLLIN)
        death.poll(_ROUNDS)
        os.close(hold)
    held.clear()


def kill(pid: int) -> None:
    """End the process, its group and its descendants, also those that left the group.

    The process is stopped first and killed last: while it lives, orphans come to it (it
    is their reaper) and so stay in sight.
    """
    _signal(pid, signal.SIGSTOP)
    for _ in range(_ROUNDS):
        below = descendants(pid)
        if not below:
            break
        for each in below:
            _signal(each, signal.SIGKILL)
        time.sleep(_PAUSE)
    _signal_group(pid, signal.SIGKILL)


def kill_group(pid: int) -> None:
    """End what is left of the group of a process that is gone."""
    _signal_group(pid, signal.SIGKILL)


def address_space() -> int:
    """The bytes of address space of this process; 0 where the kernel doesn't say."""
    try:
        pages = int((_PROC / "self/statm").read_text().split()[0])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for thread in (_PROC / str(pid) / "task").iterdir():
            with suppress(OSError):
                found += map(int, (thread / "children").read_text().split())
    return found


def _is_dead(pid: int) -> bool:
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def _signal(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _signal_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
