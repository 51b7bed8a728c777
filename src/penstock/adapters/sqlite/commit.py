"""One commit: what many callers want, decided on a scratch copy and written at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import apsw

from penstock.adapters.sqlite import rows
from penstock.adapters.sqlite.database import storage_errors
from penstock.core.job import Job
from penstock.core.transition import (
    Accept,
    Answer,
    Change,
    Move,
    Verdict,
    admit,
    advance,
    followers,
)
from penstock.ports.failpoint import failpoint
from penstock.ports.store import LogLine


class Commit:
    """Decides and writes a group of changes; holds what they changed until it is adopted.

    Decisions are made against `heads` (records already changed by this commit), then the
    store's own cache, then the file. The cache is never touched here, so a failed write
    leaves no trace.
    """

    def __init__(
        self,
        writer: apsw.Connection,
        path: Path,
        sql: Mapping[str, str],
        codec: rows.JournalCodec,
        cache: Mapping[str, Job],
        next_seq: int,
    ) -> None:
        self._writer, self._path, self._sql = writer, path, sql
        self._codec, self._cache = codec, cache
        self.next_seq = next_seq
        self.heads: dict[str, Job] = {}
        self.moved: list[Answer] = []
        self.answers: list[list[Answer]] = []
        self.line_counts: dict[int, int] = {}
        self._new: set[int] = set()
        self._keys: dict[tuple[str, str], str] = {}

    def stage(
        self, groups: Sequence[Sequence[Change]], lines: Callable[[Commit], Sequence[rows.Row]]
    ) -> None:
        """Decide every change and write it into an open transaction. Raises StoreFailed."""
        with storage_errors(self._path):
            for group in groups:
                self.answers.append([self._decide(change) for change in group])
            self._write_out(lines(self))

    def seal(self) -> None:
        """Commit what is staged; it waits for the disk. Raises StoreFailed."""
        failpoint("before-commit")
        with storage_errors(self._path), self._undone():
            if self._writer.in_transaction:
                self._writer.execute("COMMIT")

    @contextmanager
    def _undone(self) -> Generator[None]:
        """On failure nothing is left of the transaction."""
        try:
            yield
        except BaseException:
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")
            raise

    # -- deciding -----------------------------------------------------------------

    def _decide(self, change: Change) -> Answer:
        if type(change) is Accept:
            return self._accept(change)
        assert isinstance(change, Move)
        job = self.find(change.job_id)
        if job is None:
            return Answer(Verdict.REFUSED, None, why=f"no job {change.job_id}")
        answer = advance(job, change)
        if answer.verdict is Verdict.MOVED:
            self._keep(answer)
            for follower in followers(job, change):
                self._accept(follower)
        return answer

    def _accept(self, accept: Accept) -> Answer:
        request = accept.request
        held = None if accept.fresh else self.find(request.job_id)
        if held is None and request.idempotency_key is not None:
            held = self._find_key(request.tenant, request.idempotency_key)
        if held is not None:
            return Answer(Verdict.REPEATED, held)
        answer = admit(accept, self.next_seq)
        self._new.add(self.next_seq)
        self.next_seq += 1
        if request.idempotency_key is not None:
            self._keys[request.tenant, request.idempotency_key] = request.job_id
        self._keep(answer)
        return answer

    def _keep(self, answer: Answer) -> None:
        assert answer.job is not None
        self.heads[answer.job.request.job_id] = answer.job
        self.moved.append(answer)

    def find(self, job_id: str) -> Job | None:
        job = self.heads.get(job_id) or self._cache.get(job_id)
        return job if job is not None else self._read("job_by_id", (job_id,))

    def _find_key(self, tenant: str, key: str) -> Job | None:
        job_id = self._keys.get((tenant, key))
        if job_id is not None:
            return self.heads[job_id]
        return self._read("job_by_key", (tenant, key))

    def _read(self, query: str, values: tuple[object, ...]) -> Job | None:
        row = self._writer.execute(self._sql[query], values).fetchone()
        return None if row is None else rows.read_job(row)

    def last_line(self, seq: int) -> int:
        last: int = self._writer.execute(self._sql["last_log"], (seq,)).get
        return last

    # -- writing ------------------------------------------------------------------

    def _write_out(self, lines: Sequence[rows.Row]) -> None:
        new = self._new
        inserts = [rows.insert_row(job) for job in self.heads.values() if job.seq in new]
        updates = [rows.update_row(job) for job in self.heads.values() if job.seq not in new]
        journal = [
            row
            for answer in self.moved
            for row in self._codec.rows(answer.job.seq, answer.entry)  # type: ignore[union-attr, arg-type]
        ]
        if not (journal or lines):
            return
        writer, sql = self._writer, self._sql
        with self._undone():
            writer.execute("BEGIN IMMEDIATE")
            if inserts:
                writer.executemany(sql["insert_job"], inserts)
            if updates:
                writer.executemany(sql["update_job"], updates)
            writer.executemany(sql["append_journal"], journal)
            if lines:
                writer.executemany(sql["append_log"], lines)


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
