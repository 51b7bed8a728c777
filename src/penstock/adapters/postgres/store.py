"""A backend on PostgreSQL: one owner writes, others may read, and take over when it is gone.

A commit is one call of the function `write_commit`: one round trip, one transaction, which checks
that its engine still owns the store. Open jobs are rows of a small table; a job that ends moves to
a partition of ended jobs, so the cost of a commit depends on neither the number of ended jobs nor
on a transaction that somebody else keeps open.

If the connection is lost during a commit, nobody knows whether it was committed. The number of its
journal page tells, so the commit waits until the database can be asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Container, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import asyncpg
from msgspec.structs import replace

from penstock.adapters.postgres import finding
from penstock.adapters.postgres.schema import (
    UNREACHABLE,
    Address,
    check_version,
    connect,
    drop_partitions,
    ensure_partitions,
    load_queries,
    migrate,
    shard_in,
    translated,
)
from penstock.core.errors import Misconfigured, NotOwner, OwnedByAnother, StoreFailed, Unstorable
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
from penstock.core.shards import Shard
from penstock.lifecycles.canonical import TERMINAL, JobState
from penstock.ports import rows
from penstock.ports.clock import backoff
from penstock.ports.process import failpoint
from penstock.ports.query import Name, compare_counts, read_events
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
    Newer,
    Opened,
    Pruned,
    StepCount,
    StepPage,
    StepQuery,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

LEASE = 4.0
"""Seconds after which an owner that was not heard of can be replaced."""
_POLL = 0.5
"""Seconds between tries to own the store."""
_COMPACT_EVERY = 500
"""Commits after which the counts are folded."""
_PRUNED_STEPS = 2000
"""Checkpointed rows that one transaction removes at most."""
_WALK = 1000
"""Rows that the search for old jobs reads at once."""
_LOST = (*UNREACHABLE, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError)
"""The connection broke: whether a statement was executed is unknown."""


class Closeable(Protocol):
    def close(self) -> None: ...


class PostgresBackend:
    """See `penstock.ports.store.Backend`."""

    def __init__(
        self,
        url: str,
        *,
        durability: Durability = Durability.DISK,
        max_log_lines: int = 10_000,
        lease: float = LEASE,
        address: str = "",
        patience: float = 2 * LEASE,
        readers: int = 4,
        instance: str = "",
        lock: Closeable | None = None,
        shard: Shard | None = None,
    ) -> None:
        """`lease` of 0 makes an owner that anybody can replace. `address` tells others where this
        engine is reached. `patience` is how many seconds it waits for another owner's lease to
        end. `lock` is held until the backend is closed: who has it can replace an owner with the
        same `instance` at once, because that one is dead. `shard`: what the schema must be of."""
        self._shard = shard or Shard()
        self._lock, self._patience, self._instance = lock, patience, instance
        self.at = Address.parse(url)
        self.durability = durability
        self._max_log_lines, self._lease, self._engine = max_log_lines, lease, address
        self.holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        if instance:
            self.holder = f"{instance} {self.holder}"
        """Names this start of this engine, and no other."""
        self._sql = load_queries(self.at.schema)
        self._writer: asyncpg.Connection | None = None
        self._readers: list[asyncpg.Connection] = []
        self._free = asyncio.Semaphore(readers)
        self._own = False
        self._alone = True
        self._epoch = 0
        """As the ledger knows it."""
        self._fence = 0
        """The epoch in the database, which is raised after a commit whose outcome is unknown."""
        self._last_page = 0
        """The last page of the journal that is committed."""
        self._renewing: asyncio.Task[None] | None = None
        self._lost = ""
        """Why this engine owns the store no more."""
        self._partitioned = 0
        """The `seq` up to which partitions exist."""
        self._commits = 0
        self._closed = False

    # -- opening ------------------------------------------------------------------

    async def open(self, *, own: bool = True) -> Opened:
        try:
            return await self._open(own)
        except BaseException:
            await self.close()
            raise

    async def _open(self, own: bool) -> Opened:
        sql, self._own, self._closed, self._lost = self._sql, own, False, ""
        if own:
            db = await self._connected()
            async with self._errors():
                await migrate(db, self.at.schema)
                self._check_shard(await shard_in(db, self.at.schema))
            await self._acquire(db)
        async with self._reading(one_state=True) as db:
            await check_version(db, self.at)
            self._check_shard(await shard_in(db, self.at.schema))
            marks = dict(await db.fetch(sql["highest"]))
            replayed = await db.fetchval(sql["replayed"])
            jobs = {row[0]: rows.read_job(row) for row in await db.fetch(sql["open_jobs"])}
            newer = await db.fetch(sql["pages_after"], replayed)
            lagging = catch_up(jobs, ((page, decode_page(each)) for page, each in newer))
            counts = _counts(await db.fetch(sql["counts"]))
        self._last_page = marks["page"]
        if own:
            async with self._errors():
                writer = await self._connected()
                self._partitioned = await ensure_partitions(writer, self.at.schema, marks["seq"])
                await writer.execute(sql["compact_counts"], *self._owner)
        return Opened(
            self._epoch,
            marks["seq"] + 1,
            marks["page"] + 1,
            list(jobs.values()),
            lagging,
            counts,
            self._alone,
        )

    def _check_shard(self, found: Shard) -> None:
        if found != self._shard:
            raise Misconfigured(
                f"schema {self.at.schema} of {self.at.name} is {found}, not {self._shard}",
                hint="'penstock up --store URL' runs all shards of a database",
            )

    async def _acquire(self, db: asyncpg.Connection) -> None:
        """Own the store, once nobody does or its owner was silent for too long."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._patience
        dead = f"{self._instance} " if self._instance and self._lock is not None else None
        async with self._errors():
            while True:
                last = await db.fetchrow(self._sql["owner"], 0)
                values = 0, self.holder, self._lease, self._engine, dead
                epoch = await db.fetchval(self._sql["acquire"], *values)
                if epoch is not None:
                    self._alone = epoch == 1 or _has_ended(last, epoch - 1, dead)
                    break
                owner = await db.fetchval(self._sql["holder"], 0)
                if loop.time() >= end:
                    raise OwnedByAnother(
                        f"another engine ({owner}) owns {self.at.name}",
                        hint="connect to that engine, or stop it first",
                    )
                log.info("waiting for %s, whose owner is %s", self.at.name, owner)
                await asyncio.sleep(min(_POLL, max(end - loop.time(), 0.01)))
        self._epoch = self._fence = epoch
        if self._lease > 0:
            self._renewing = loop.create_task(self._renew())

    async def _renew(self) -> None:
        """Keep the lease, over a connection of its own: a long commit must not delay it."""
        db: asyncpg.Connection | None = None
        try:
            while True:
                await asyncio.sleep(self._lease / 4)
                owner = self._owner
                try:
                    if db is None or db.is_closed():
                        db = await connect(self.at, timeout=self._lease)
                    renewed = await db.fetchval(
                        self._sql["renew"], *owner, self._lease, timeout=self._lease
                    )
                except (asyncpg.PostgresError, *_LOST) as error:
                    log.warning("can't renew the lease of %s: %s", self.at.name, error)
                    if db is not None:
                        db.terminate()
                    continue
                if renewed is None and owner == self._owner:
                    self._lost = f"another engine owns {self.at.name} now"
                    log.error("%s; this engine can write no more", self._lost)
                    return
        finally:
            if db is not None:
                db.terminate()

    @property
    def _owner(self) -> tuple[int, int, str]:
        return 0, self._fence, self.holder

    async def close(self) -> None:
        """Give the store up, so that another engine need not wait for the lease to end."""
        self._closed = True
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
            self._renewing = None
        writer, self._writer = self._writer, None
        if writer is not None:
            if self._own and not writer.is_closed():
                with contextlib.suppress(*_LOST, asyncpg.PostgresError, OSError):
                    await writer.execute(self._sql["release"], *self._owner, timeout=2)
            writer.terminate()
        while self._readers:
            self._readers.pop().terminate()
        if self._lock is not None:
            self._lock.close()

    async def _connected(self) -> asyncpg.Connection:
        """The connection for commits. Raises StoreFailed."""
        if self._writer is None or self._writer.is_closed():
            async with self._errors():
                self._writer = await connect(self.at, durability=self.durability)
                if self._last_page and not self._lost:
                    await self._check_kept(self._writer)
        return self._writer

    async def _check_kept(self, db: asyncpg.Connection) -> None:
        """Own a database no more that has lost commits: what this engine knows is not true there.

        Raises NotOwner.
        """
        kept = dict(await db.fetch(self._sql["highest"]))["page"]
        if kept < self._last_page:
            self._lost = (
                f"{self.at.name} has lost the last {self._last_page - kept} commits: a replica that"
                " was behind became the primary, or a backup was restored"
            )
            log.error("%s; this engine can write no more", self._lost)
            raise NotOwner(self._lost)

    @contextlib.asynccontextmanager
    async def _errors(self) -> AsyncIterator[None]:
        """Turn PostgreSQL's errors into ours."""
        fence = self._fence
        try:
            yield
        except (asyncpg.PostgresError, *_LOST, TimeoutError) as error:
            ours = translated(error, self.at)
            if isinstance(ours, NotOwner) and fence != self._fence:
                ours = StoreFailed(f"the connection to {self.at.name} was lost meanwhile")
            raise ours from error

    # -- writing ------------------------------------------------------------------

    async def write(self, commit: Commit, extras: Extras, epoch: int) -> None:
        self._check(epoch)
        values = self._values(commit, extras)
        db = await self._connected()
        if commit.accepted and commit.accepted[-1].seq > self._partitioned:
            async with self._errors():
                last = commit.accepted[-1].seq
                self._partitioned = await ensure_partitions(db, self.at.schema, last)
        failpoint("before-commit")
        try:
            await self._to_the_end(db.execute(self._sql["write_commit"], *values))
        except _LOST as error:
            db.terminate()
            if not await self._was_committed(commit, error):
                raise translated(error, self.at) from error
        except (asyncpg.DataError, asyncpg.IntegrityConstraintViolationError) as error:
            raise Unstorable("job", f"holds a value that can't be stored: {error}") from error
        except asyncpg.ProgramLimitExceededError as error:
            raise Unstorable("job", f"holds a value that is too long: {error}") from error
        except asyncpg.PostgresError as error:
            raise translated(error, self.at) from error
        failpoint("after-commit")
        if commit.pages:
            self._last_page = commit.pages[-1].number
        self._commits += 1
        if self._commits % _COMPACT_EVERY == 0:
            with contextlib.suppress(*_LOST, asyncpg.PostgresError):
                await db.execute(self._sql["compact_counts"], *self._owner)

    def _check(self, epoch: int) -> None:
        if self._lost:
            raise NotOwner(self._lost)
        if self._closed or not self._own:
            raise StoreFailed(f"{self.at.name} is not open for writing")
        if epoch != self._epoch:
            raise NotOwner(f"another engine owns {self.at.name} now")

    def _values(self, commit: Commit, extras: Extras) -> tuple[Any, ...]:
        """The arguments of `write_commit`. Raises Unstorable."""
        try:
            counts = [
                (rows.RETRIED if state is None else rows.STATE_CODES[state], tenant, count)
                for (tenant, state), count in commit.counts.items()
                if (state is None or state in TERMINAL) and count
            ]
            return (
                *self._owner,
                [page.number for page in commit.pages] or None,
                [encode_page(page.strides) for page in commit.pages] or None,
                *_parted(commit.accepted, rows.full_row),
                *_parted(commit.changed, rows.change_row),
                [*_latest(rows.step_row(seq, step) for seq, step in commit.steps)] or None,
                counts or None,
                [*_writable(_line, extras.lines, "a log line")] or None,
                self._max_log_lines,
                [*_writable(audit_row, extras.audit, "an audit entry")] or None,
                [*extras.facts.items()] or None,
                extras.replayed,
            )
        except (ValueError, TypeError, OverflowError) as error:
            raise Unstorable("job", f"holds a value that can't be stored: {error}") from error

    async def _to_the_end(self, work: Awaitable[T]) -> T:
        """Wait for a commit even if the caller is cancelled: its outcome must be known."""
        task = asyncio.ensure_future(work)
        while not task.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait((task,))
        return task.result()

    async def _was_committed(self, commit: Commit, error: BaseException) -> bool:
        """Whether a commit whose answer was lost is there. Waits for the database.

        The server may still work on it, or begin later. Raising the epoch waits for the first,
        which has locked the owner's row, and makes the second fail.
        """
        if not commit.pages:
            return False
        log.warning("the answer to a commit was lost (%s); asking %s", error, self.at.name)
        page = commit.pages[-1].number
        for pause in backoff(0.1, 2.0):
            if self._lost:
                raise NotOwner(self._lost)
            if self._closed:
                raise StoreFailed(f"{self.at.name} was closed")
            try:
                db = await self._connected()
                fence = await db.fetchval(self._sql["fence"], 0, self.holder)
                if fence is None:
                    self._lost = f"another engine owns {self.at.name} now"
                    continue
                self._fence = fence
                found: bool = await db.fetchval(self._sql["has_page"], page)
            except (StoreFailed, *_LOST, asyncpg.PostgresError):
                await asyncio.sleep(pause)
            else:
                return found
        raise AssertionError

    # -- reading ------------------------------------------------------------------

    @contextlib.asynccontextmanager
    async def _reading(self, *, one_state: bool = False) -> AsyncIterator[asyncpg.Connection]:
        """A connection to read from; with `one_state`, all that is read is of one moment."""
        async with self._free, self._errors():
            db = self._readers.pop() if self._readers else None
            if db is None or db.is_closed():
                db = await connect(self.at)
            try:
                if one_state:
                    async with db.transaction(isolation="repeatable_read", readonly=True):
                        yield db
                else:
                    yield db
            except BaseException:
                db.terminate()
                raise
            if self._closed:
                db.terminate()
            else:
                self._readers.append(db)

    async def _fetch(self, name: str, *values: Any) -> list[Any]:
        async with self._reading() as db:
            found: list[Any] = await db.fetch(self._sql[name], *values)
            return found

    async def load(self, wanted: Wanted) -> Known:
        known = Known({}, {}, {})
        if wanted.ids:
            for row in await self._fetch("jobs_by_id", [*wanted.ids]):
                job = rows.read_job(row)
                known.jobs[job.request.job_id] = job
        for name, keys in (("jobs_by_key", wanted.keys), ("jobs_by_unique", wanted.uniques)):
            if not keys:
                continue
            tenants, names = zip(*keys, strict=True)
            for row in await self._fetch(name, tenants, names):
                job = rows.read_job(row)
                request = job.request
                if name == "jobs_by_key":
                    assert request.idempotency_key is not None
                    known.keys[request.tenant, request.idempotency_key] = job
                else:
                    assert request.unique is not None
                    known.uniques[request.tenant, request.unique.key] = [job]
        return known

    async def fetch(self, seqs: Sequence[int]) -> list[Job]:
        found = {row[0]: rows.read_job(row) for row in await self._fetch("jobs_by_seq", [*seqs])}
        return [found[seq] for seq in seqs if seq in found]

    async def find(self, query: JobQuery, skip: Collection[int] = ()) -> list[Job]:
        async with self._reading(one_state=True) as db:
            return await finding.find(query, skip, db, self.at.schema)

    async def journal(self, pages: Sequence[int]) -> JournalPages:
        found = await self._fetch("pages", [*pages])
        return [(page, decode_page(strides)) for page, strides in found]

    async def events(self, after: int, limit: int) -> list[JournalEvent]:
        async with self._reading(one_state=True) as db:
            found: list[JournalEvent] = []
            page = page_of(after) - 1
            while len(found) < limit:
                newer = await db.fetch(self._sql["some_pages_after"], page)
                if not newer:
                    break
                pages = [(number, decode_page(strides)) for number, strides in newer]
                seqs = {seq for _, strides in pages for each in strides for seq in each.seqs}
                known = await db.fetch(self._sql["names"], seqs)
                names: dict[int, Name] = {row[0]: tuple(row)[1:] for row in known}
                found += read_events(pages, partial(_known, names), after, limit - len(found))
                page = pages[-1][0]
            return found

    async def last_event(self) -> int:
        async with self._reading(one_state=True) as db:
            last: int = dict(await db.fetch(self._sql["highest"]))["page"]
            newest = await db.fetchval(self._sql["page"], last)
        if newest is None:  # it was pruned
            return last and cursor_of(last + 1, 0) - 1
        return last_cursor(last, decode_page(newest))

    async def read_log(self, job_id: str, after: int = 0, limit: int = 1000) -> list[LogLine]:
        return [
            LogLine(job_id, attempt, at, level, text.decode(), n)
            for attempt, at, level, text, n in await self._fetch("read_log", job_id, after, limit)
        ]

    async def read_steps(self, job_id: str, query: StepQuery) -> StepPage:
        name, n = query.after or ("", -1)
        values = job_id, query.name, name, n, [*query.outcomes] or None, query.limit + 1
        found = await self._fetch("read_steps", *values)
        return StepPage.of(((len(body), rows.decode_step(body)) for (body,) in found), query.limit)

    async def count_steps(self, job_id: str) -> list[StepCount]:
        return [StepCount(*row) for row in await self._fetch("count_steps", job_id)]

    async def count_children(
        self, first_try: str, tenant: str | None, skip: Collection[int]
    ) -> dict[JobState, int]:
        found = await self._fetch("count_children", first_try, tenant, [*skip])
        return {rows.STATES[code]: count for code, count in found}

    async def read_audit(self, query: AuditQuery) -> list[AuditEntry]:
        async with self._reading() as db:
            found = await db.fetch(*finding.audit_sql(query, self.at.schema))
        return [_read_audit(n, entry) for n, entry in found]

    async def facts(self, prefix: str) -> dict[str, bytes]:
        return dict(await self._fetch("facts", prefix))

    async def pointers(self) -> set[str]:
        return {row[0] for row in await self._fetch("pointers")}

    async def refers(self, tenant: str, pointer: str) -> bool:
        name = pointer.partition(";")[0]
        return bool((await self._fetch("refers", tenant, name))[0][0])

    async def newer(self, epoch: int, page: int) -> Newer:
        async with self._reading(one_state=True) as db:
            replayed, owned = await db.fetchrow(self._sql["followed"])
            begin = max(page, replayed) if owned == epoch else replayed
            found = await db.fetch(self._sql["pages_after"], begin)
            pages = [(number, decode_page(strides)) for number, strides in found]
            seqs = {seq for _, strides in pages for each in strides for seq in each.seqs}
            rows_of = await db.fetch(self._sql["open_by_seq"], seqs) if seqs else ()
        return Newer(owned, replayed, pages, {row[0]: rows.read_job(row) for row in rows_of})

    async def count_open(self, skip: Collection[int]) -> list[tuple[str, str, JobState, int]]:
        found = await self._fetch("count_open", [*skip])
        return [(tenant, topic, rows.STATES[code], n) for tenant, topic, code, n in found]

    async def count_ended(self) -> Counts:
        return _counts(await self._fetch("counts"))

    async def miscounted(self) -> list[Mismatch]:
        async with self._reading(one_state=True) as db:
            stored, counted = [
                _counts(await db.fetch(self._sql[name])) for name in ("counts", "count_jobs")
            ]
        return compare_counts(stored, counted)

    # -- forgetting ---------------------------------------------------------------

    async def prune(
        self, finished_before: float, limit: int, awaited: Container[str], epoch: int
    ) -> tuple[Pruned, Counts]:
        self._check(epoch)
        found = await self._prunable(finished_before, limit, awaited)
        # Somebody may have begun to wait for one of them while they were looked for.
        seqs = [seq for job_id, seq in found.items() if job_id not in awaited]
        gone: Counter[tuple[str, JobState | None]] = Counter()
        transitions = steps = lines = jobs = 0
        async with self._reading() as db, db.transaction():
            for tenant, state, successor, record, *removed in await db.fetch(
                self._sql["prune"], *self._owner, seqs, _PRUNED_STEPS
            ):
                if tenant is None:
                    steps, lines = removed
                    continue
                gone[tenant, counted_as(rows.STATES[state], successor)] -= 1
                transitions += rows.decode_record(record).version
                jobs += 1
            taken = [
                (rows.RETRIED if state is None else rows.STATE_CODES[state], tenant, count)
                for (tenant, state), count in gone.items()
            ]
            await db.execute(self._sql["count_up"], taken)
        if jobs and self._partitioned:
            async with self._reading() as db:
                await drop_partitions(db, self.at.schema)
        return Pruned(jobs, transitions, lines, steps), dict(gone)

    async def _prunable(
        self, finished_before: float, limit: int, awaited: Container[str]
    ) -> dict[str, int]:
        """The oldest jobs that ended before a time, and that no other job waits for."""
        found: dict[str, int] = {}
        retries: set[str | None] = set()
        at = 0
        while some := await self._fetch("oldest", at, _WALK):
            for seq, job_id, successor, finished_at, accepted_at in some:
                if accepted_at >= finished_before or len(found) >= limit:
                    return found
                if job_id in awaited or job_id in retries:
                    retries.add(successor)
                elif finished_at is not None and finished_at < finished_before:
                    found[job_id] = seq
            at = some[-1][0]
        return found


def _has_ended(owner: Any, epoch: int, dead: str | None) -> bool:
    """Whether the owner with this epoch gave the store up, or is known to be dead."""
    if owner is None or owner["epoch"] != epoch:
        return False
    return owner["released"] or (dead is not None and owner["holder"].startswith(dead))


def _known(names: dict[int, Name], seqs: Sequence[int]) -> dict[int, Name]:
    return names


def _counts(found: Sequence[Any]) -> Counts:
    return {(tenant, rows.STATES.get(code)): count for tenant, code, count in found}


def _parted(
    jobs: Sequence[Job], row: Callable[[Job], rows.Row]
) -> tuple[list[rows.Row] | None, list[rows.Row] | None]:
    """The rows of those that go on, and of those that have ended."""
    going = [row(job) for job in jobs if job.finished_at is None]
    ended = [row(job) for job in jobs if job.finished_at is not None]
    return going or None, ended or None


def _latest(steps: Any) -> list[rows.Row]:
    """One statement can't write a row twice: the last one counts."""
    return list({row[:3]: row for row in steps}.values())


def _line(line: LogLine) -> rows.Row:
    if line.at != line.at:
        raise ValueError("its time is not a number")
    return line.job_id, line.attempt, line.at, _text(line.level), line.text.encode()


def audit_row(entry: AuditEntry) -> rows.Row:
    """PostgreSQL's text has no NUL; what is searched for goes without."""
    searched = (entry.principal, entry.action, entry.subject, entry.tenant)
    clean = (None if one is None else _text(one).replace("\0", "") for one in searched)
    return *clean, rows.encode(rows.audit_row(entry))


def _read_audit(n: int, entry: bytes) -> AuditEntry:
    return replace(AuditEntry(*rows.decode(entry)), n=n)


def _text(text: str) -> str:
    text.encode()
    return text


def _writable(row: Callable[[T], rows.Row], values: Sequence[T], what: str) -> list[rows.Row]:
    """The rows of what can be written; one that can't costs no other, nor the commit."""
    made = []
    for value in values:
        try:
            made.append(row(value))
        except (ValueError, TypeError, AttributeError) as error:
            log.error("%s can't be stored and is dropped: %s", what, error)
    return made
