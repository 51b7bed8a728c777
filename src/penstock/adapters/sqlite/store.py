"""The default backend: one SQLite file, one writer.

The statements of a commit run in the event loop, and so does the flush of a small one, because
that is soonest done; the flush of a large one, or any on a slow disk, is waited for in a thread,
and the engine goes on meanwhile. The statements of a very large one run there as well.

Short reads use one connection, in the caller's own thread; long ones get a thread and a
connection of their own, so that nobody waits behind them. Only what is committed is seen.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Container, Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import apsw

from penstock.adapters.sqlite import finding
from penstock.adapters.sqlite.database import (
    ReaderPool,
    WriterLock,
    one_state,
    storage_errors,
    to_the_end,
    translated,
)
from penstock.adapters.sqlite.schema import load_queries, open_reader, open_writer
from penstock.core.errors import StoreFailed, Unstorable
from penstock.core.job import Job
from penstock.core.journal import (
    catch_up,
    cursor_of,
    decode_page,
    encode_page,
    last_cursor,
    page_of,
)
from penstock.core.ledger import Commit, Counts, Known, Wanted, counted_as
from penstock.lifecycles.canonical import TERMINAL, JobState
from penstock.ports import rows
from penstock.ports.process import failpoint
from penstock.ports.query import Name, compare_counts, read_events
from penstock.ports.rows import STATE_CODES
from penstock.ports.store import (
    AuditEntry,
    AuditQuery,
    Durability,
    Extras,
    JobQuery,
    JournalEvent,
    JournalPages,
    LogLine,
    Mismatch,
    Opened,
    Pruned,
    StepCount,
    StepPage,
    StepQuery,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

_SHORT = 8
"""Jobs, steps and lines up to which a commit is waited for in the event loop: with more, and just
after it, others have something to do meanwhile."""
_SLOW = 0.005
"""Seconds of a flush beyond which it is waited for in a thread."""
_LONG = 5000
"""The same beyond which its statements run in a thread, too."""
_UNLISTED = 4096
"""Jobs after which the late lists by tenant and topic are filled."""
_FEW_PAGES = 20
"""Journal pages up to which they are read in the caller's own thread."""
_PRUNED_STEPS = 2000
"""Checkpointed rows that one transaction removes at most."""
_COUNTED = 10_000
"""Jobs whose last log line is remembered."""
_LAST_CHARACTER = chr(0x10FFFF)
_UNWRITABLE = (apsw.ConstraintError, ValueError, TypeError, OverflowError)
"""What no disk could ever take: a text that is no text, a broken constraint."""

Line = tuple[int, int]
"""The `seq` of a job, and the number of its last log line."""


class _Writing:
    """Undoes the open transaction if what is done within fails."""

    __slots__ = ("_db", "_path")

    def __init__(self, db: apsw.Connection, path: Path) -> None:
        self._db, self._path = db, path

    def __enter__(self) -> apsw.Connection:
        return self._db

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is None:
            return
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
        if isinstance(error, _UNWRITABLE):
            raise Unstorable("job", f"holds a value that can't be stored: {error}") from error
        if isinstance(error, apsw.Error):
            raise translated(error, self._path) from error


class SqliteBackend:
    """See `penstock.ports.store.Backend`."""

    def __init__(
        self,
        path: Path,
        *,
        durability: Durability = Durability.DISK,
        slow_disk: bool | None = None,
        max_log_lines: int = 10_000,
        lock: WriterLock | None = None,
    ) -> None:
        """`slow_disk`: wait for every flush in a thread; None means to find out by the flushes.
        `lock`: the database's lock, if the caller has taken it already."""
        self.path = path
        self.durability = durability
        self._slow_disk, self._max_log_lines = slow_disk, max_log_lines
        self._crowd = 0
        """Jobs, steps and lines of the last commits; the older, the less they count."""
        self._flushes: deque[float] = deque([0.0], maxlen=8)
        """Seconds that the last flushes of small commits took."""
        self._sql = load_queries()
        self._lock = lock
        self._writer: apsw.Connection | None = None
        self._reader: apsw.Connection | None = None
        self._pool = ReaderPool(path, partial(open_reader, path))
        self._thread: ThreadPoolExecutor | None = None
        self._busy: asyncio.Future[Any] | None = None
        """What a thread does with the writer, while it does."""
        self._listed = 0
        """The `seq` up to which jobs are in the late lists."""
        self._lines: dict[str, Line] = {}

    # -- opening ------------------------------------------------------------------

    async def open(self, *, own: bool = True) -> Opened:
        try:
            return self._open(own)
        except BaseException:
            await self.close()
            raise

    def _open(self, own: bool) -> Opened:
        sql = self._sql
        if own:
            self._lock = self._lock or WriterLock(self.path.with_suffix(".lock"))
            self._writer = open_writer(self.path, self.durability)
            self._thread = ThreadPoolExecutor(1, "penstock-store")
        self._reader = open_reader(self.path)
        epoch = 0
        with storage_errors(self.path):
            if self._writer is not None:
                epoch = self._writer.execute(sql["mark"], ("epoch",)).get + 1
                self._writer.execute(sql["set_mark"], ("epoch", epoch))
            db = self._reader
            with one_state(db):
                self._listed = db.execute(sql["mark"], ("listed",)).get
                replayed = db.execute(sql["mark"], ("replayed",)).get
                jobs = {row[0]: rows.read_job(row) for row in db.execute(sql["open_jobs"])}
                newer = db.execute(sql["pages_after"], (replayed,))
                lagging = catch_up(jobs, ((page, decode_page(each)) for page, each in newer))
                return Opened(
                    epoch,
                    db.execute(sql["last_seq"]).get + 1,
                    db.execute(sql["last_page"]).get + 1,
                    list(jobs.values()),
                    lagging,
                    _counts(db.execute(sql["counts"])),
                )

    async def close(self) -> None:
        """Finish what is under way, then let go of the file."""
        await self._idle()
        self._release()

    def _release(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()
        self._pool.close()
        for held in (self._reader, self._writer, self._lock):
            if held is not None:
                held.close()
        self._reader = self._writer = self._lock = self._thread = None

    # -- writing ------------------------------------------------------------------

    async def write(self, commit: Commit, extras: Extras, epoch: int) -> None:
        if self._busy is not None:
            await self._idle()
        size = len(commit.accepted) + len(commit.changed) + len(commit.lagging)
        size += len(commit.steps) + len(extras.lines)
        listed = self._listed
        if commit.accepted and commit.accepted[-1].seq >= listed + _UNLISTED:
            listed = commit.accepted[-1].seq
        stage = partial(self._stage, commit, extras, epoch, listed)
        if size > _LONG or listed > self._listed:
            lines = await self._in_thread(lambda: self._flush(stage()))
        else:
            lines = stage()
            self._crowd = max(size, self._crowd // 2)
            if self._crowd > _SHORT:
                await self._in_thread(partial(self._flush, lines))
            elif self._is_slow():
                await self._in_thread(partial(self._flush_timed, lines))
            else:
                self._flush_timed(lines)
        failpoint("after-commit")
        self._listed = listed
        self._lines.update(lines)
        for job in commit.changed:
            if job.finished_at is not None:
                self._lines.pop(job.request.job_id, None)
        while len(self._lines) > _COUNTED:
            del self._lines[next(iter(self._lines))]

    def _stage(self, commit: Commit, extras: Extras, epoch: int, listed: int) -> dict[str, Line]:
        """Write all of it in an open transaction; answers the last log lines of jobs."""
        sql, lines = self._sql, {}
        with self._undone() as db:
            self._begin(db, epoch)
            plain, full = rows.inserts(commit.accepted)
            changed, rarely = rows.updates(commit.changed)
            pages = [(page.number, encode_page(page.strides)) for page in commit.pages]
            for name, values in (
                ("insert_plain", plain),
                ("insert_full", full),
                ("update_plain", changed),
                ("update_full", rarely),
                ("append_journal", pages),
                ("write_step", [rows.step_row(seq, step) for seq, step in commit.steps]),
            ):
                if values:
                    db.executemany(sql[name], values)
            self._count(db, commit.counts)
            if listed > self._listed:
                for name in ("list_tenants", "list_topics"):
                    db.execute(sql[name], (self._listed, listed))
                db.execute(sql["set_mark"], ("listed", listed))
            if extras:
                lines = self._write_extras(db, extras)
        return lines

    def _begin(self, db: apsw.Connection, epoch: int) -> None:
        db.execute("BEGIN IMMEDIATE")
        if db.execute(self._sql["mark"], ("epoch",)).get != epoch:
            raise StoreFailed(f"another engine owns {self.path} now")

    def _is_slow(self) -> bool:
        """Whether a flush takes too long for the event loop: one that was quick says no."""
        return min(self._flushes) > _SLOW if self._slow_disk is None else self._slow_disk

    def _flush_timed(self, staged: T) -> T:
        begin = time.perf_counter()
        self._flush(staged)
        self._flushes.append(time.perf_counter() - begin)
        return staged

    def _flush(self, staged: T) -> T:
        """Commit what is staged; it waits for the disk."""
        failpoint("before-commit")
        with self._undone() as db:
            db.execute("COMMIT")
        return staged

    def _undone(self) -> _Writing:
        """The writer; on failure nothing is left of its transaction."""
        if self._writer is None:
            raise StoreFailed(f"{self.path} is not open for writing")
        return _Writing(self._writer, self.path)

    def _count(self, db: apsw.Connection, counts: Counts) -> None:
        ended = [
            (rows.RETRIED if state is None else STATE_CODES[state], tenant, count)
            for (tenant, state), count in counts.items()
            if state is None or state in TERMINAL
        ]
        if ended:
            db.executemany(self._sql["count_up"], ended)

    def _write_extras(self, db: apsw.Connection, extras: Extras) -> dict[str, Line]:
        sql = self._sql
        for name, value in extras.facts.items():
            if value is None:
                db.execute(sql["forget"], (name,))
            else:
                db.execute(sql["remember"], (name, value))
        if extras.replayed is not None:
            db.execute(sql["set_mark"], ("replayed", extras.replayed))
        if extras.audit:
            self._write_audit(db, extras.audit)
        return self._write_lines(db, extras.lines) if extras.lines else {}

    def _write_audit(self, db: apsw.Connection, entries: Sequence[AuditEntry]) -> None:
        """All that can be written; one that can't costs no other, nor the commit."""
        try:
            with db:
                db.executemany(self._sql["append_audit"], map(rows.audit_row, entries))
        except _UNWRITABLE as error:
            if len(entries) == 1:
                log.error("an audit entry can't be stored and is dropped: %s", error)
                return
            for entry in entries:
                self._write_audit(db, [entry])

    def _write_lines(self, db: apsw.Connection, lines: Sequence[LogLine]) -> dict[str, Line]:
        """The same for log lines; answers the last ones of each job."""
        sql = self._sql["append_log"]
        written: dict[str, Line] = {}
        try:
            with db:
                db.executemany(sql, self._numbered(db, lines, written))
            return written
        except _UNWRITABLE:
            written.clear()
        for line in lines:
            last = {line.job_id: written[line.job_id]} if line.job_id in written else {}
            try:
                with db:
                    db.executemany(sql, self._numbered(db, [line], last))
                written.update(last)
            except _UNWRITABLE as error:
                log.error("a log line of %r is dropped: %s", line.job_id, error)
        return written

    def _numbered(
        self, db: apsw.Connection, lines: Iterable[LogLine], written: dict[str, Line]
    ) -> list[rows.Row]:
        """Give each line its place in its job's output; a job is cut off after too many."""
        most = self._max_log_lines
        numbered: list[rows.Row] = []
        for line in lines:
            last = written.get(line.job_id) or self._lines.get(line.job_id)
            last = last or db.execute(self._sql["last_line"], (line.job_id,)).fetchone()
            if last is None:
                continue
            seq, n = last[0], last[1] + 1
            written[line.job_id] = (seq, n)
            if n < most:
                numbered.append((seq, n, line.attempt, line.at, line.level, line.text))
            elif n == most:
                cut = f"cut off: a job may write {most} lines"
                numbered.append((seq, n, line.attempt, line.at, "warning", cut))
        return numbered

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Let the thread have the writer; not even a cancelled caller leaves before it is done."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        self._busy = future
        try:
            return await to_the_end(future)
        finally:
            self._busy = None

    async def _idle(self) -> None:
        """Wait until no thread has the writer."""
        while self._busy is not None:
            await asyncio.wait((self._busy,))

    # -- reading ------------------------------------------------------------------

    async def load(self, wanted: Wanted) -> Known:
        sql, known = self._sql, Known({}, {}, {})
        with self._reading() as db:
            for job in self._jobs(db, sql["job_by_id"], ((one,) for one in wanted.ids)):
                known.jobs[job.request.job_id] = job
            for job in self._jobs(db, sql["job_by_key"], wanted.keys):
                assert job.request.idempotency_key is not None
                known.keys[job.request.tenant, job.request.idempotency_key] = job
            for job in self._jobs(db, sql["job_by_unique"], wanted.uniques):
                assert job.request.unique is not None
                known.uniques[job.request.tenant, job.request.unique.key] = [job]
        return known

    async def fetch(self, seqs: Sequence[int]) -> list[Job]:
        with self._reading() as db:
            return self._jobs(db, self._sql["job_by_seq"], ((seq,) for seq in seqs))

    @contextmanager
    def _reading(self) -> Generator[apsw.Connection]:
        """The connection for short reads: the writer, which has the newest pages at hand."""
        db = self._reader if self._writer is None or self._busy is not None else self._writer
        if db is None:
            raise StoreFailed(f"{self.path} is not open")
        with storage_errors(self.path):
            yield db

    def _jobs(self, db: apsw.Connection, sql: str, values: Iterable[rows.Row]) -> list[Job]:
        return [rows.read_job(row) for row in db.executemany(sql, values)]

    async def find(self, query: JobQuery, skip: Collection[int] = ()) -> list[Job]:
        if not finding.is_short(query, skip):
            return await self._pool.run(partial(finding.find, query, skip))
        with self._state() as db:
            return finding.find(query, skip, db)

    @contextmanager
    def _state(self) -> Generator[apsw.Connection]:
        """One state of the file, for several short reads."""
        if self._reader is None:
            raise StoreFailed(f"{self.path} is not open")
        with storage_errors(self.path), one_state(self._reader):
            yield self._reader

    async def journal(self, pages: Sequence[int]) -> JournalPages:
        def read(db: apsw.Connection) -> JournalPages:
            found = db.executemany(self._sql["page"], ((page,) for page in sorted(pages)))
            return [(page, decode_page(strides)) for page, strides in found]

        if len(pages) > _FEW_PAGES:
            return await self._pool.run(read)
        with self._reading() as db:
            return read(db)

    async def events(self, after: int, limit: int) -> list[JournalEvent]:
        sql = self._sql

        def read(db: apsw.Connection) -> list[JournalEvent]:
            def names(seqs: Sequence[int]) -> dict[int, Name]:
                found = db.executemany(sql["names"], {(seq,) for seq in seqs})
                return {seq: (job_id, tenant, topic) for seq, job_id, tenant, topic in found}

            newer = db.execute(sql["pages_after"], (page_of(after) - 1,))
            pages = ((page, decode_page(strides)) for page, strides in newer)
            return read_events(pages, names, after, limit)

        with self._state() as db:
            if db.execute(sql["last_page"]).get <= page_of(after) + _FEW_PAGES:
                return read(db)
        return await self._pool.run(read)

    async def last_event(self) -> int:
        with self._state() as db:
            last: int = db.execute(self._sql["last_page"]).get
            newest = db.execute(self._sql["page"], (last,)).fetchone()
        if newest is None:  # it was pruned
            return last and cursor_of(last + 1, 0) - 1
        return last_cursor(last, decode_page(newest[1]))

    async def read_log(self, job_id: str, after: int = 0, limit: int = 1000) -> list[LogLine]:
        found = self._read("read_log", job_id, after, limit)
        return [LogLine(job_id, *row) for row in found]

    async def read_steps(self, job_id: str, query: StepQuery) -> StepPage:
        after, limit = query.after or ("", -1), query.limit + 1
        outcomes = json.dumps(query.outcomes) if query.outcomes else None
        values: rows.Row = (job_id, *after, limit, outcomes)
        sql = self._sql["read_steps"]
        if query.name is not None:
            if after[0] > query.name:
                return StepPage([], more=False)
            n = after[1] if after[0] == query.name else -1
            values, sql = (job_id, query.name, n, *values[3:]), self._sql["read_steps_named"]
        with self._reading() as db:
            found = ((len(body), rows.decode_step(body)) for (body,) in db.execute(sql, values))
            return StepPage.of(found, query.limit)

    async def count_steps(self, job_id: str) -> list[StepCount]:
        sql = self._sql["count_steps"]
        return await self._pool.run(
            lambda db: [StepCount(*row) for row in db.execute(sql, (job_id,))]
        )

    async def count_children(
        self, first_try: str, tenant: str | None, skip: Collection[int]
    ) -> dict[JobState, int]:
        sql, values = self._sql["count_children"], (first_try, tenant, json.dumps([*skip]))
        return await self._pool.run(
            lambda db: {rows.STATES[code]: count for code, count in db.execute(sql, values)}
        )

    async def read_audit(self, query: AuditQuery) -> list[AuditEntry]:
        sql, values = finding.audit_sql(query)
        found = await self._pool.run(lambda db: list(db.execute(sql, values)))
        return [AuditEntry(*row) for row in found]

    async def facts(self, prefix: str) -> dict[str, bytes]:
        return dict(self._read("facts", prefix, prefix + _LAST_CHARACTER))

    async def pointers(self) -> set[str]:
        sql = self._sql["pointers"]
        return await self._pool.run(lambda db: {row[0] for row in db.execute(sql)})

    async def refers(self, tenant: str, pointer: str) -> bool:
        """A blob is the same under each of its media types."""
        name = pointer.partition(";")[0]
        return bool(self._read("refers", tenant, name, name + "<")[0][0])  # "<" follows ";"

    def _read(self, query: str, *values: object) -> list[rows.Row]:
        with self._reading() as db:
            return db.execute(self._sql[query], values).fetchall()

    async def miscounted(self) -> list[Mismatch]:
        def read(db: apsw.Connection) -> list[Mismatch]:
            stored, counted = (_counts(db.execute(sql)) for sql in queries)
            return compare_counts(stored, counted)

        queries = self._sql["counts"], self._sql["count_jobs"]
        return await self._pool.run(read)

    # -- forgetting ---------------------------------------------------------------

    async def prune(
        self, finished_before: float, limit: int, awaited: Container[str], epoch: int
    ) -> tuple[Pruned, Counts]:
        found = await self._pool.run(partial(self._prunable, finished_before, limit, awaited))
        await self._idle()
        # Somebody may have begun to wait for one of them while they were looked for.
        seqs = [(seq,) for job_id, seq in found.items() if job_id not in awaited]
        with self._undone() as db:
            self._begin(db, epoch)
            pruned = self._delete(db, seqs)
            db.execute("COMMIT")
        self._lines.clear()
        return pruned

    def _prunable(
        self, finished_before: float, limit: int, awaited: Container[str], db: apsw.Connection
    ) -> dict[str, int]:
        """The oldest jobs that ended before a time, and that no other job waits for.

        Jobs come in the order of acceptance, so the walk ends at the first that was accepted
        too late to qualify, and costs nothing when there is nothing to do.
        """
        found: dict[str, int] = {}
        retries: set[str | None] = set()
        for seq, job_id, successor, finished_at, accepted_at in db.execute(self._sql["oldest"]):
            if accepted_at >= finished_before or len(found) >= limit:
                break
            if job_id in awaited or job_id in retries:
                retries.add(successor)
            elif finished_at is not None and finished_at < finished_before:
                found[job_id] = seq
        return found

    def _delete(self, db: apsw.Connection, seqs: Sequence[tuple[int]]) -> tuple[Pruned, Counts]:
        """Remove these jobs with all that belongs to them. Runs inside a transaction."""
        sql = self._sql
        last_page = db.execute(sql["last_page"]).get
        for mark, last in (("seq", db.execute(sql["last_seq"]).get), ("page", last_page)):
            db.execute(sql["set_mark"], (mark, last))
        seqs, steps = self._delete_steps(db, seqs)
        gone: Counter[tuple[str, JobState | None]] = Counter()
        transitions = 0
        listed: list[tuple[str, str, int]] = []
        for (seq,) in seqs:
            row: Any = db.execute(sql["to_prune"], (seq,)).fetchone()
            tenant, topic, state, successor, record = row
            gone[tenant, counted_as(rows.STATES[state], successor)] -= 1
            transitions += rows.decode_record(record).version
            listed.append((tenant, topic, seq))
        db.executemany(sql["prune_tenant"], [(tenant, seq) for tenant, _, seq in listed])
        db.executemany(sql["prune_topic"], [(topic, seq) for _, topic, seq in listed])
        db.executemany(sql["prune_job"], seqs)
        before = db.total_changes()
        db.executemany(sql["prune_log"], seqs)
        lines = db.total_changes() - before
        db.execute(sql["prune_journal"], (last_page + 1,))
        self._count(db, gone)
        db.execute(sql["tidy_counts"])
        return Pruned(len(seqs), transitions, lines, steps), dict(gone)

    def _delete_steps(
        self, db: apsw.Connection, seqs: Sequence[tuple[int]]
    ) -> tuple[Sequence[tuple[int]], int]:
        """Remove steps of these jobs, not too many; answers the jobs that have none left."""
        steps = 0
        for index, (seq,) in enumerate(seqs):
            db.execute(self._sql["prune_steps"], (seq, _PRUNED_STEPS - steps))
            steps += db.changes()
            if steps == _PRUNED_STEPS:
                return seqs[:index], steps
        return seqs, steps


def _counts(found: Iterable[rows.Row]) -> Counts:
    return {(tenant, rows.STATES.get(code)): count for tenant, code, count in found}
