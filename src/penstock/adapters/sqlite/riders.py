"""What goes with a commit, and nobody waits for: what jobs wrote, and the audit log."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from msgspec import Struct

from penstock.adapters.sqlite import rows
from penstock.adapters.sqlite.commit import Commit
from penstock.ports.store import AuditEntry, LogLine

T = TypeVar("T")


class Riders(Struct, frozen=True):
    """What goes with a commit, and nobody waits for."""

    lines: list[LogLine] = []
    audit: list[AuditEntry] = []

    def __bool__(self) -> bool:
        return bool(self.lines or self.audit)

    def __str__(self) -> str:
        jobs = ", ".join(sorted({line.job_id for line in self.lines}))
        return f"log lines of {jobs}" if jobs else "audit entries"

    def apart(self) -> list[Riders]:
        """In halves, in order: by halving again, the one that can't be written is found."""
        if self.lines and self.audit:
            return [Riders(lines=self.lines), Riders(audit=self.audit)]
        lines = [Riders(lines=half) for half in _halves(self.lines)]
        return lines + [Riders(audit=half) for half in _halves(self.audit)]


def _halves(items: list[T]) -> list[list[T]]:
    middle = (len(items) + 1) // 2
    return [half for half in (items[:middle], items[middle:]) if half]


def number_lines(
    lines: Sequence[LogLine], counts: Mapping[int, int], most: int
) -> Callable[[Commit], list[rows.Row]]:
    """Give each line its place in its job's output; beyond `most` a job is cut off."""

    def number(commit: Commit) -> list[rows.Row]:
        numbered: list[rows.Row] = []
        for line in lines:
            job = commit.find(line.job_id)
            if job is None:
                continue
            n = commit.line_counts.get(job.seq, counts.get(job.seq))
            if n is None:
                n = commit.last_line(job.seq)
            commit.line_counts[job.seq] = n = n + 1
            if n < most:
                numbered.append((job.seq, n, line.attempt, line.at, line.level, line.text))
            elif n == most:
                cut = f"cut off: a job may write {most} lines"
                numbered.append((job.seq, n, line.attempt, line.at, "warning", cut))
        return numbered

    return number
