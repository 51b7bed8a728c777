"""Reading a database file, whether an engine is writing it or not.

Short reads use one connection, in the caller's own thread; long ones get a thread and a
connection of their own, so that nobody waits behind them. Only what is committed is seen.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import apsw

from penstock.adapters.sqlite import rows, upkeep
from penstock.adapters.sqlite.database import STATE_CODES, open_reader, storage_errors
from penstock.adapters.sqlite.finding import find_sql
from penstock.core.errors import NotFound
from penstock.core.job import Job
from penstock.core.transition import Transition
from penstock.lifecycles.canonical import JobState
from penstock.ports.store import JobQuery, LogLine, Verified

T = TypeVar("T")


class SqliteReader:
    """The reading half of `penstock.ports.store.Store`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.sql = rows.load_queries()
        self._connection = open_reader(path)
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
        sql, values = find_sql(query)

        def read(rows_of: upkeep.Read) -> list[Job]:
            found: list[Job] = []
            for row in rows_of(sql, values):
                job = rows.read_job(row)
                if query.labels.items() <= job.request.labels.items():
                    found.append(job)
                    if len(found) == query.limit:
                        break
            return found

        return await self.aside(read)

    async def unfinished(self) -> list[Job]:
        return [rows.read_job(row) for row in self._read("jobs_unfinished")]

    async def history(self, job_id: str) -> list[Transition]:
        job = await self.get(job_id)
        if job is None:
            raise NotFound(f"no job {job_id!r}", hint="'penstock ps' lists the jobs there are")
        found = self._read("journal_of_job", job.seq)
        return [step for row in found for step in self.codec.read(job_id, row)]

    async def tally(self) -> dict[JobState, int]:
        counted: dict[int, int] = await self.aside(lambda read: dict(read(self.sql["tally"])))
        return {state: count for state in JobState if (count := counted.get(STATE_CODES[state], 0))}

    async def read_log(self, job_id: str, after: int = 0, limit: int = 1000) -> list[LogLine]:
        return [LogLine(job_id, *row) for row in self._read("read_log", job_id, after, limit)]

    async def recall(self, name: str) -> bytes | None:
        found = self._read("recall", name)
        return found[0][0] if found else None

    async def pointers(self) -> Iterable[str]:
        return await self.aside(lambda read: [row[0] for row in read(self.sql["pointers"])])

    async def verify(self) -> Verified:
        return await self.aside(lambda read: upkeep.verify(read, self.sql, self.codec))

    async def prunable(self, finished_before: float, limit: int) -> list[int]:
        return await self.aside(
            lambda read: upkeep.prunable(read, self.sql, finished_before, limit)
        )

    def _read(self, query: str, *values: object) -> list[rows.Row]:
        with storage_errors(self.path):
            return self._connection.execute(self.sql[query], values).fetchall()

    async def aside(self, work: Callable[[upkeep.Read], T]) -> T:
        """Read at length, in a thread with a connection of its own."""

        def run() -> T:
            connection = open_reader(self.path)
            try:
                with storage_errors(self.path):
                    return work(connection.execute)
            finally:
                connection.close()

        return await asyncio.to_thread(run)

    def close(self) -> None:
        self._connection.close()
