"""What a process must tell the system: files that children must not hold, connections that may die
silently, and points at which a test may kill it.

A forked child that holds a copy of its parent's lock, listening socket or connection keeps it alive
after the parent's death: nobody can take the lock, and nobody notices that the parent is gone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakSet


class FileOwner(Protocol):
    def filenos(self) -> Iterable[int]:
        """The file descriptors that it has open now; negative ones are ignored."""


_owners: WeakSet[FileOwner] = WeakSet()


def close_in_children(owner: FileOwner) -> None:
    """Close what `owner` has open in every child that this process forks, while it lives."""
    _owners.add(owner)


def fileno_of(transport: asyncio.BaseTransport | None) -> int:
    connection = None if transport is None else transport.get_extra_info("socket")
    return -1 if connection is None else int(connection.fileno())


def _close() -> None:
    """Put /dev/null in the place of each: its owner may close it once more, and must not hit a
    file that has got its number meanwhile."""
    null = os.open(os.devnull, os.O_RDWR)
    for owner in list(_owners):
        for fileno in owner.filenos():
            if fileno >= 0:
                with suppress(OSError):
                    os.dup2(null, fileno, inheritable=False)
    _owners.clear()
    os.close(null)


os.register_at_fork(after_in_child=_close)


# -- failpoints ----------------------------------------------------------------------

_ARMED, _, _AFTER = os.environ.get("PENSTOCK_FAILPOINT", "").partition(":")
_left = int(_AFTER or 1)


def failpoint(name: str) -> None:
    """Mark a place where a crash would matter most.

    It does nothing unless the environment arms it, as `PENSTOCK_FAILPOINT=before-commit:3`: the
    third time, the process kills itself with SIGKILL, so nothing can be cleaned up.
    """
    global _left
    if name == _ARMED:
        _left -= 1
        if _left <= 0:
            os.kill(os.getpid(), signal.SIGKILL)


# -- TCP keep-alive ------------------------------------------------------------------

_IDLE, _INTERVAL, _PROBES = 15, 5, 3
"""Seconds of silence before the first probe, seconds between probes, and their number."""
_OPTIONS = {
    "TCP_KEEPIDLE": _IDLE,
    "TCP_KEEPALIVE": _IDLE,  # its name on macOS
    "TCP_KEEPINTVL": _INTERVAL,
    "TCP_KEEPCNT": _PROBES,
}
CALLER_TIMEOUT = 30.0
"""Seconds that what a client has sent may stay unacknowledged: an engine always reads."""
ENGINE_TIMEOUT = 300.0
"""The same for an engine: a client or worker that is busy may let it wait."""


def keep_alive(connection: Any, timeout: float) -> None:
    """Let the system notice that the other end of a TCP connection (or of a listener's) is gone.

    A machine that loses its power or its network sends no FIN. Without these options a connection
    to it stays open, and whoever reads from it waits for ever.
    """
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {**_OPTIONS, "TCP_USER_TIMEOUT": int(timeout * 1000)}.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def bind_unix(path: str) -> socket.socket:
    """A Unix socket that only this user can open, from its first moment on."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    mask = os.umask(0o177)  # of the whole process: nothing may suspend until it is set back
    try:
        bound.bind(path)
    except BaseException:
        bound.close()
        raise
    finally:
        os.umask(mask)
    return bound
