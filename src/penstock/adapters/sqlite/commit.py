"""One commit: what many callers want, decided on a scratch copy and written at once."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import apsw

from penstock.adapters.sqlite import rows
from penstock.adapters.sqlite.database import storage_errors
from penstock.core.job import Job
from penstock.core.policy import difference, keeps_out
from penstock.core.transition import (
    Accept,
    Answer,
    Change,
    Move,
    Verdict,
    admit,
    advance,
    followers,
    refusal,
)
from penstock.ports.failpoint import failpoint
from penstock.ports.store import AuditEntry

Counts = dict[tuple[str, int], int]
"""By tenant and state: how many more jobs there are, or fewer."""


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
        next_row: int,
    ) -> None:
        self._writer, self._path, self._sql = writer, path, sql
        self._codec, self._cache = codec, cache
        self.next_seq, self.next_row = next_seq, next_row
        self.heads: dict[str, Job] = {}
        self.moved: list[Answer] = []
        self.answers: list[list[Answer]] = []
        self.line_counts: dict[int, int] = {}
        self.counts: Counts = {}
        self._new: set[int] = set()
        self._keys: dict[tuple[str, str], str] = {}
        self._uniques: dict[tuple[str, str], list[str]] = {}

    def stage(
        self,
        groups: Sequence[Sequence[Change]],
        lines: Callable[[Commit], Sequence[rows.Row]],
        audit: Sequence[AuditEntry] = (),
    ) -> None:
        """Decide every change and write it into an open transaction. Raises StoreFailed."""
        with storage_errors(self._path):
            for group in groups:
                self.answers.append(
                    self._refusal(group) or [self._decide(change) for change in group]
                )
            self._write_out(lines(self), [rows.audit_row(entry) for entry in audit])

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

    def _refusal(self, group: Sequence[Change]) -> list[Answer]:
        """The answers to a batch that must be accepted whole and can't be; else none."""
        for change in group:
            if type(change) is Accept and change.all_or_none:
                held = self._holder(change)
                if held is not None and difference(change.request, held.request) is not None:
                    return refusal(group, change, held)
        return []

    def _decide(self, change: Change) -> Answer:
        if type(change) is Accept:
            return self._accept(change)
        assert isinstance(change, Move)
        job = self.find(change.job_id)
        if job is None:
            return Answer(Verdict.REFUSED, None, why=f"no job {change.job_id}")
        answer = advance(job, change)
        if answer.verdict is Verdict.MOVED:
            return self._follow(job, change, answer) if change.then else self._keep(answer)
        return answer

    def _follow(self, job: Job, move: Move, answer: Answer) -> Answer:
        """Keep a move with what it brings.

        The retry of a job that ends now has its unique key from it. If it ended before,
        another job may have the key by now, and then there is no retry.
        """
        accepts = followers(job, move)
        if job.is_final:
            for accept in accepts:
                keeper = self._keeper(accept)
                if keeper is not None and keeper.job_id != job.job_id:
                    why = f"job {keeper.job_id} has its unique key now"
                    return Answer(Verdict.REFUSED, job, why=why)
        self._keep(answer)
        for accept in accepts:
            self._accept(accept, follows=True)
        return answer

    def _accept(self, accept: Accept, *, follows: bool = False) -> Answer:
        request = accept.request
        held = self._holder(accept)
        if held is None and request.unique is not None and not follows:
            held = self._keeper(accept)
        if held is not None:
            return Answer(Verdict.REPEATED, held)
        answer = admit(accept, self.next_seq)
        self._new.add(self.next_seq)
        self.next_seq += 1
        if request.idempotency_key is not None:
            self._keys[request.tenant, request.idempotency_key] = request.job_id
        if request.unique is not None:
            key = (request.tenant, request.unique.key)
            self._uniques.setdefault(key, []).append(request.job_id)
        return self._keep(answer)

    def _holder(self, accept: Accept) -> Job | None:
        """The job that has this one's id or idempotency key."""
        request = accept.request
        held = None if accept.fresh else self.find(request.job_id)
        if held is None and request.idempotency_key is not None:
            held = self._find_key(request.tenant, request.idempotency_key)
        return held

    def _keep(self, answer: Answer) -> Answer:
        assert answer.job is not None
        self.heads[answer.job.request.job_id] = answer.job
        self.moved.append(answer)
        return answer

    def find(self, job_id: str) -> Job | None:
        job = self.heads.get(job_id) or self._cache.get(job_id)
        return job if job is not None else self._read("job_by_id", (job_id,))

    def _find_key(self, tenant: str, key: str) -> Job | None:
        job_id = self._keys.get((tenant, key))
        if job_id is not None:
            return self.heads[job_id]
        return self._read("job_by_key", (tenant, key))

    def _keeper(self, accept: Accept) -> Job | None:
        """The newest job that keeps this one out by its unique key."""
        unique = accept.request.unique
        if unique is None:
            return None
        for held in self._sharing(accept.request.tenant, unique.key):
            if keeps_out(held, accept.at):
                return held
        return None

    def _sharing(self, tenant: str, key: str) -> Iterator[Job]:
        """Jobs with a unique key: those of this commit, the newest, and all that are open."""
        for job_id in reversed(self._uniques.get((tenant, key), ())):
            yield self.heads[job_id]
        for query in ("job_by_unique", "open_by_unique"):
            for row in self._writer.execute(self._sql[query], (tenant, key)).fetchall():
                job = rows.read_job(row)
                yield self.heads.get(job.job_id, job)

    def _read(self, query: str, values: tuple[object, ...]) -> Job | None:
        row = self._writer.execute(self._sql[query], values).fetchone()
        return None if row is None else rows.read_job(row)

    def last_line(self, seq: int) -> int:
        last: int = self._writer.execute(self._sql["last_log"], (seq,)).get
        return last

    # -- writing ------------------------------------------------------------------

    def _write_out(self, lines: Sequence[rows.Row], audit: Sequence[rows.Row]) -> None:
        if not (self.moved or lines or audit):
            return
        journal, happened = self._codec.write(self.moved, self.next_row)
        self.next_row += len(journal)
        self.counts = tally_changes(happened, self._codec.effects)
        counts = [(state, tenant, count) for (tenant, state), count in self.counts.items()]
        writer, sql = self._writer, self._sql
        with self._undone():
            writer.execute("BEGIN IMMEDIATE")
            for name, values in (
                *self._records(),
                ("append_journal", journal),
                ("count_up", counts),
                ("append_log", lines),
                ("append_audit", audit),
            ):
                if values:
                    writer.executemany(sql[name], values)

    def _records(self) -> Iterator[tuple[str, list[rows.Row]]]:
        """What is to be written of the jobs: no more columns than there is something in."""
        new = self._new
        inserts: list[rows.Row] = []
        full: list[rows.Row] = []
        updates: list[rows.Row] = []
        gated: list[rows.Row] = []
        for job in self.heads.values():
            passed_rule = job.verdict is not None or job.hold is not None
            if job.seq not in new:
                if passed_rule:
                    gated.append(rows.update_gated_row(job))
                else:
                    updates.append(rows.update_row(job))
            elif passed_rule or job.request.unique is not None or job.request.schedule is not None:
                full.append(rows.insert_full_row(job))
            else:
                inserts.append(rows.insert_row(job))
        yield "insert_job", inserts
        yield "insert_full", full
        yield "update_job", updates
        yield "update_gated", gated


def tally_changes(
    happened: Mapping[tuple[str, int], int], effects: Mapping[int, rows.Effect]
) -> Counts:
    """What so many moves along each path do to the number of jobs in each state."""
    counts: Counts = {}
    for (tenant, path), times in happened.items():
        for state, change in effects[path]:
            counts[tenant, state] = counts.get((tenant, state), 0) + change * times
    return {key: count for key, count in counts.items() if count}
