"""A Desk for a folder whose engine is not running: it can be read, and nothing else.

It takes no lock, so that it never keeps an engine from starting; one that starts meanwhile
does no harm to a reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NoReturn

import apsw

from penstock.adapters.files.blobs import FileBlobs
from penstock.adapters.sqlite import rows, upkeep
from penstock.adapters.sqlite.database import open_reader, storage_errors
from penstock.adapters.sqlite.finding import find_sql
from penstock.config import Settings
from penstock.core.errors import NotFound, NotRunning, WaitTimedOut
from penstock.core.job import Job
from penstock.core.transition import Transition
from penstock.ports.desk import JobUpdate, Logged
from penstock.ports.store import JobQuery, LogLine, Verified


@asynccontextmanager
async def offline(settings: Settings) -> AsyncIterator[OfflineDesk]:
    """Read the folder of an engine that is not running."""
    reader = open_reader(settings.database)
    try:
        yield OfflineDesk(settings, reader)
    finally:
        reader.close()


class OfflineDesk:
    """The part of `penstock.ports.desk.Desk` that only reads; the rest raises NotRunning."""

    def __init__(self, settings: Settings, reader: apsw.Connection) -> None:
        self._settings, self._reader = settings, reader
        self._sql = rows.load_queries()
        self._codec = rows.JournalCodec(reader.execute(self._sql["legal_moves"]))
        self._blobs = FileBlobs(
            settings.blobs,
            inline_limit=settings.inline_limit,
            max_size=max(settings.max_input, settings.max_result),
            sources=settings.allowed_sources,
        )

    async def get(self, job_id: str) -> Job:
        for row in self._read("job_by_id", job_id):
            return rows.read_job(row)
        raise NotFound(f"no job {job_id!r}", hint="'penstock ps' lists the jobs there are")

    async def find(self, query: JobQuery) -> list[Job]:
        sql, values = find_sql(query)
        found: list[Job] = []
        with self._reading() as reader:
            for row in reader.execute(sql, values):
                job = rows.read_job(row)
                if query.labels.items() <= job.request.labels.items():
                    found.append(job)
                    if len(found) == query.limit:
                        break
        return found

    async def history(self, job_id: str) -> list[Transition]:
        job = await self.get(job_id)
        return [self._codec.read(job_id, row) for row in self._read("journal_of_job", job.seq)]

    async def why(self, job_id: str) -> str:
        job = await self.get(job_id)
        if job.is_final:
            error = job.result.error_message if job.result is not None else None
            return f"it ended {job.state}" + (f": {error}" if error else "")
        return f"no engine is running; it was {job.state} when the last one stopped"

    async def wait(self, job_id: str, timeout: float | None = None) -> Job:
        """The final record, following retries; one that has none yet won't get any here."""
        job = await self.get(job_id)
        while job.successor is not None:
            job = await self.get(job.successor)
        if not job.is_final:
            raise WaitTimedOut(
                f"job {job.job_id} is {job.state}, and no engine is running",
                hint="start one with 'penstock up'",
            )
        return job

    async def read_log(self, job_id: str, after: int = 0, limit: int = 1000) -> list[LogLine]:
        await self.get(job_id)
        return [LogLine(job_id, *row) for row in self._read("read_log", job_id, after, limit)]

    async def follow(self, job_id: str, after_log: int = 0) -> AsyncIterator[JobUpdate]:
        """What it wrote so far: nothing more is going to happen."""
        while lines := await self.read_log(job_id, after_log):
            for line in lines:
                yield Logged(line)
            after_log = lines[-1].n

    async def verify(self) -> Verified:
        def work() -> Verified:
            reader = open_reader(self._settings.database)
            try:
                with storage_errors(self._settings.database):
                    return upkeep.verify(reader.execute, self._sql, self._codec)
            finally:
                reader.close()

        return await asyncio.to_thread(work)

    async def get_blob(self, uri: str) -> bytes:
        return await self._blobs.get(uri)

    def _read(self, query: str, *values: object) -> list[rows.Row]:
        with self._reading() as reader:
            return list(reader.execute(self._sql[query], values))

    @contextmanager
    def _reading(self) -> Iterator[apsw.Connection]:
        with storage_errors(self._settings.database):
            yield self._reader

    async def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotRunning(
            f"no engine is running on {self._settings.data_dir}",
            hint="start one with 'penstock up'",
        )

    submit = cancel = retry = workers = pools = status = prune = put_blob = _refuse
