"""Start logs: which attempts have begun, known even of a worker that died at once.

When a worker is lost before it reported anything, the engine must know whether a job that is
not idempotent had begun. A worker on the engine's machine logs each start before it begins,
in memory that survives its process, and the engine reads the log when the worker is gone. A
worker elsewhere has no log; it asks the engine first (`penstock.ports.bus.Started.confirm`).

A worker that seems lost may only be suspended. So the engine first revokes a start, then reads
the log; the worker first logs a start, then looks whether it was revoked. At least one of the
two sees the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol


class StartLog(Protocol):
    """The worker's side: the log of one process."""

    def begin(self, job_id: str, attempt: int) -> bool:
        """Log a start; returns when a crash of the process can't undo it.

        False if the engine has revoked it: it must not begin. Raises OSError.
        """

    def close(self, *, keep: bool) -> None:
        """`keep` it for the engine to read, if there is something it may not know."""


MakeStartLog = Callable[[str, str, Callable[[], Iterable[tuple[str, int]]]], StartLog]
"""From a folder, a name, and what gives the attempts that count although they began long ago."""


class StartLogs(Protocol):
    """The engine's side: the logs of all workers on its machine."""

    folder: str
    """Where workers on this machine keep their logs; empty where they can't have one."""

    def revoke(self, job_id: str, attempt: int) -> bool:
        """Keep it from ever beginning; False if it has begun, or nobody can tell."""


class NoStartLogs:
    """Where no worker has a log, what was not reported has not begun."""

    folder = ""

    def revoke(self, job_id: str, attempt: int) -> bool:
        return True
