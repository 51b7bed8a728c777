"""What goes with a commit, and nobody waits for: what jobs wrote, and the audit log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct

from penstock.adapters.sqlite import rows
from penstock.adapters.sqlite.commit import Commit
from penstock.ports.store import AuditEntry, LogLine


class Riders(Struct, frozen=True):
    """What goes with a commit, and nobody waits for."""

    lines: list[LogLine] = []
    audit: list[AuditEntry] = []

    def __bool__(self) -> bool:
        return bool(self.lines or self.audit)

    def apart(self) -> Iterator[Riders]:
        """In parts, of which one that can't be written costs the others nothing."""
        if self.lines:
            yield Riders(lines=self.lines)
        for entry in self.audit:
            yield Riders(audit=[entry])


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
