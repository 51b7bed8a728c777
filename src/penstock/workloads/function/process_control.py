"""Process control: trees of processes, limits of one, and no network for it.

Where there is no /proc, only the process group of a tree is known; that covers all but what has
left the group.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PROC = Path("/proc")
_ROUNDS = 1000
_PAUSE = 0.001
"""Seconds between rounds: on a busy machine even the killed need a moment to die."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000


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


# -- this process -----------------------------------------------------------------


def tie_to_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies, where it can (Linux)."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


@contextmanager
def memory_limited(limit: int | None) -> Iterator[None]:
    """Let the process grow by `limit` bytes of address space, and no more, for a while."""
    if limit is None:
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = _address_space() + limit
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _address_space() -> int:
    """The bytes of address space of this process; 0 where the kernel doesn't say."""
    try:
        pages = int((_PROC / "self/statm").read_text().split()[0])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def leave_network() -> str:
    """Take this process off the network, for good. Empty if it is done, else why it is not.

    A network namespace of its own has no device that is up and no way out. Any user may make one
    together with a user namespace, which also keeps the process from going back, even as root.
    To be called while there is only one thread.
    """
    if sys.platform != "linux":
        return "only Linux can do that"
    user, group = os.geteuid(), os.getegid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return f"unshare: {os.strerror(ctypes.get_errno())}"
    try:
        # User and group keep their names inside.
        (_PROC / "self/setgroups").write_text("deny")
        (_PROC / "self/uid_map").write_text(f"{user} {user} 1")
        (_PROC / "self/gid_map").write_text(f"{group} {group} 1")
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return ""
