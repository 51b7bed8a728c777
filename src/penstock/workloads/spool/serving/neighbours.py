"""Which servers of a workspace are alive.

One on this machine is alive while its lock is held: the kernel lets go of it however it dies,
and never while it is only stopped. One on another machine is alive while it touches its lock.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec
from msgspec import Struct

from penstock.ports.clock import Clock
from penstock.workloads.spool.serving.claims import CLAIMS, LOCK, SERVERS, Holder, this_host
from penstock.workloads.spool.serving.pidfile import original_runs
from penstock.workloads.spool.workspace import Workspace

_SURE = 0.25
"""The part of a lease that one is watched whose clock says that it is over: clocks differ."""
_LEASE = 30.0
"""Of one on another machine, to who only looks."""


class Neighbour(Struct, frozen=True, kw_only=True):
    """A server, as another sees it."""

    folder: Path
    alive: bool
    claims: frozenset[str] = frozenset()


class Neighbours:
    """All servers of a workspace; remembers since when each was silent."""

    def __init__(self, private: Path, lease: float, clock: Clock) -> None:
        self._servers = private / SERVERS
        self._lease, self._clock = lease, clock
        self._seen: dict[str, tuple[int, float]] = {}
        """The time on each lock, and when we saw it first."""

    def look(self) -> list[Neighbour]:
        """Each with its claims as they are after it was found alive."""
        try:
            names = sorted(os.listdir(self._servers))
        except FileNotFoundError:
            names = []
        self._seen = {name: seen for name, seen in self._seen.items() if name in names}
        return [self._judge(self._servers / name) for name in names]

    def _judge(self, folder: Path) -> Neighbour:
        return Neighbour(folder=folder, alive=self._is_alive(folder), claims=_claims(folder))

    def _is_alive(self, folder: Path) -> bool:
        try:
            lock = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            if not _is_free(lock):
                return True
            return _host(lock) != this_host() and not self._is_silent(folder.name, lock)
        finally:
            os.close(lock)

    def _is_silent(self, name: str, lock: int) -> bool:
        touched, now = os.fstat(lock).st_mtime_ns, self._clock.monotonic()
        if self._seen.get(name, (0, 0.0))[0] != touched:
            self._seen[name] = (touched, now)
        silent = now - self._seen[name][1]
        over = self._clock.now() - touched / 1e9 > self._lease
        return silent >= (self._lease * _SURE if over else self._lease)


def is_served(workspace: Workspace, clock: Clock) -> bool:
    """Whether a server is seen that may take its jobs, the original's included."""
    servers = Neighbours(workspace.private, _LEASE, clock).look()
    return any(server.alive for server in servers) or original_runs(workspace.path)


def _is_free(lock: int) -> bool:
    try:
        # Shared, so that two who look don't see each other.
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(lock, fcntl.LOCK_UN)
    return True


def _host(lock: int) -> str:
    try:
        return msgspec.json.decode(os.pread(lock, 4096, 0), type=Holder).host
    except msgspec.DecodeError:
        return ""


def _claims(folder: Path) -> frozenset[str]:
    try:
        return frozenset(os.listdir(folder / CLAIMS))
    except OSError:
        return frozenset()
