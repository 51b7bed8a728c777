"""What has begun, known even of a worker that died at once.

A job that may not run twice needs an answer to one question when its worker is lost before
it said anything: had it begun? A worker on the engine's own machine writes that down in a
book before it begins, and the engine reads the book when the worker is gone. What was
written survives the death of the process. A worker elsewhere has no such book; it asks the
engine first (`penstock.ports.bus.Started.confirm`).

A worker that seemed lost may only have been held up. So the engine does not just read: it
writes that a start is revoked, and of the two, what was written first counts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class StartBook(Protocol):
    """One worker's side."""

    def begin(self, job_id: str, attempt: int) -> bool:
        """Write it down; returns when a crash of the process can't undo it.

        False if the engine has revoked it: it must not begin. Raises OSError.
        """

    def trim(self, running: Iterable[tuple[str, int]]) -> None:
        """Forget, now and then, all but what runs."""

    def close(self, *, keep: bool) -> None:
        """`keep` it for the engine to read, if there is something it may not know."""


class Starts(Protocol):
    """The engine's side."""

    folder: str
    """Where workers on this machine keep their books; empty where there are none."""

    def revoke(self, job_id: str, attempt: int) -> bool:
        """Keep it from ever beginning; False if it has begun, or nobody can tell."""


class NoStarts:
    """Where no worker has a book, what was not reported had not begun."""

    folder = ""

    def revoke(self, job_id: str, attempt: int) -> bool:
        return True
