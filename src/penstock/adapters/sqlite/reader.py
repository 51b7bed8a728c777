"""Reading a database file, whether an engine is writing it or not.

Short reads use one connection, in the caller's own thread; long ones get a thread and a
connection of their own, so that nobody waits behind them. Only what is committed is seen.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import apsw

from penstock.adapters.sqlite import rows, upkeep
from penstock.adapters.sqlite.aside import Aside, one_state
from penstock.adapters.sqlite.audit import audit_sql
from penstock.adapters.sqlite.database import open_reader, storage_errors
from penstock.adapters.sqlite.finding import gather, may_be_short, plan
from penstock.adapters.sqlite.tally import Tally
from penstock.core.errors import NotFound
from penstock.core.job import Job
from penstock.core.transition import Transition
from penstock.lifecycles.canonical import JobState
from penstock.ports.store import (
    AuditEntry,
    AuditQuery,
    JobQuery,
    JournalEvent,
    LogLine,
    Verified,
)

T = TypeVar("T")

_STEP_BITS = 4
"""A cursor is the number of a journal row, and in its last bits a step within it."""
_STEPS = (1 << _STEP_BITS) - 1
_FEW_ROWS = 200
"""Events up to which they are read in the caller's own thread."""
_LAST_CHARACTER = chr(0x10FFFF)


class SqliteReader:
    """The reading half of `penstock.ports.store.Store`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sql = rows.load_queries()
        self._connection = open_reader(path)
        self._aside = Aside(path, partial(open_reader, path))
        self.codec = rows.JournalCodec(self._connection.execute(self.sql["paths"]))

    async def get(self, job_id: str) -> Job | None:
        found = self._read("job_by_id", job_id)
        return rows.read_job(found[0]) if found else None

    async def fetch(
        self, seqs: Sequence[int], connection: apsw.Connection | None = None
    ) -> list[Job]:
        """As in the Store; over another connection, if that has the pages at hand."""
        with storage_errors(self.path):
            reading = (connection or self._connection).execute(
                self.sql["jobs_by_seq"], (json.dumps(list(seqs)),)
            )
            found = {row[0]: row for row in reading}
        return [rows.read_job(found[seq]) for seq in seqs if seq in found]

    async def find(self, query: JobQuery) -> list[Job]:
        """As in the Store; what is found by its index at once, the rest in a thread."""
        if query.limit <= 0:
            return []

        def read(execute: upkeep.Read) -> list[Job]:
            return gather(query, plan(query, execute), execute)

        if may_be_short(query):
            with self._snapshot() as execute:
                search = plan(query, execute)
                if search.is_short:
                    return gather(query, search, execute)
        return await self.aside(read)

    async def unfinished(self) -> list[Job]:
        return [rows.read_job(row) for row in self._read("jobs_unfinished")]

    async def history(self, job_id: str) -> list[Transition]:
        job = await self.get(job_id)
        if job is None:
            raise NotFound(f"no job {job_id!r}", hint="'penstock ps' lists the jobs there are")
        found = self._read("journal_of_job", job.seq)
        return [step for row in found for step in self.codec.read(job_id, row)]

    async def events(self, after: int, limit: int = 1000) -> list[JournalEvent]:
        """As in the Store; more than `limit` only to finish a move."""
        last = self._read("last_row")[0][0]
        if min(limit, last - (after >> _STEP_BITS)) <= _FEW_ROWS:
            with storage_errors(self.path):
                return self._events(self._connection.execute, after, limit)
        return await self.aside(lambda read: self._events(read, after, limit))

    def _events(self, read: upkeep.Read, after: int, limit: int) -> list[JournalEvent]:
        events: list[JournalEvent] = []
        # One row more than asked for: the first may be known to the reader already.
        for row in read(self.sql["events"], (after >> _STEP_BITS, limit + 1)):
            if len(events) >= limit:
                break
            number, tenant, topic, job_id = row[:4]
            for step, transition in enumerate(self.codec.read(job_id, row[4:]), start=1):
                cursor = number << _STEP_BITS | step
                if cursor > after:
                    events.append(JournalEvent(cursor, tenant, topic, transition))
        return events

    async def last_event(self) -> int:
        last: int = self._read("last_row")[0][0]
        newest = self._read("newest_row")
        if newest and newest[0][0] == last:
            return last << _STEP_BITS | self.codec.steps(newest[0][1])
        return last and last << _STEP_BITS | _STEPS

    async def tally(self, tenant: str | None = None) -> dict[JobState, int]:
        return self.load_tally().of(tenant)

    def load_tally(self) -> Tally:
        return Tally(self._read("tally"))

    async def read_log(self, job_id: str, after: int = 0, limit: int = 1000) -> list[LogLine]:
        return [LogLine(job_id, *row) for row in self._read("read_log", job_id, after, limit)]

    async def recall(self, name: str) -> bytes | None:
        found = self._read("recall", name)
        return found[0][0] if found else None

    async def recall_all(self, prefix: str) -> dict[str, bytes]:
        return dict(self._read("recall_all", prefix, prefix + _LAST_CHARACTER))

    async def refers(self, tenant: str, pointer: str) -> bool:
        """A blob is the same under each of its media types."""
        name = pointer.partition(";")[0]
        return bool(self._read("refers", tenant, name, name + "<")[0][0])  # "<" follows ";"

    async def read_audit(self, query: AuditQuery) -> list[AuditEntry]:
        sql, values = audit_sql(query)
        found = await self.aside(lambda read: list(read(sql, values)))
        return [AuditEntry(*row) for row in found]

    async def pointers(self) -> Iterable[str]:
        return await self.aside(lambda read: [row[0] for row in read(self.sql["pointers"])])

    async def verify(self) -> Verified:
        return await self.aside(lambda read: upkeep.verify(read, self.sql, self.codec))

    async def prunable(
        self, finished_before: float, limit: int, awaited: Container[str]
    ) -> dict[str, int]:
        return await self.aside(
            lambda read: upkeep.prunable(read, self.sql, finished_before, limit, awaited)
        )

    def _read(self, query: str, *values: object) -> list[rows.Row]:
        with storage_errors(self.path):
            return self._connection.execute(self.sql[query], values).fetchall()

    @contextmanager
    def _snapshot(self) -> Generator[upkeep.Read]:
        """One state of the file, for several short reads in the caller's own thread."""
        with storage_errors(self.path), one_state(self._connection) as read:
            yield read

    async def aside(self, work: Callable[[upkeep.Read], T]) -> T:
        return await self._aside.run(work)

    def close(self) -> None:
        self._connection.close()
        self._aside.close()
