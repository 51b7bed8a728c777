"""An EngineApi for a folder whose engine is not running: it can be read, and nothing else.

It takes no lock, so that it never keeps an engine from starting; one that starts meanwhile
does no harm to a reader.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn, cast

from penstock.app.migration import OLD_RUNS, is_unmigrated
from penstock.app.parts import open_backend, open_blobs
from penstock.config import Settings
from penstock.control.ledger import Ledger
from penstock.control.shared_state import FactState
from penstock.core.errors import NotFound, NotRunning, StoreFailed, WaitTimedOut
from penstock.core.job import Job, chain_of
from penstock.lifecycles.canonical import JobState
from penstock.ports.blobs import BlobStat
from penstock.ports.clock import SystemClock
from penstock.ports.engine_api import EngineApi, JobUpdate, Logged
from penstock.ports.store import LogLine, StepCount, StepPage, StepQuery
from penstock.workloads.pipeline.records import (
    ItemOutcome,
    ItemRecord,
    PipelineEvent,
    PipelineRecord,
    pipeline_of,
)
from penstock.workloads.pipeline.service import RunReader


@asynccontextmanager
async def offline(settings: Settings) -> AsyncIterator[EngineApi]:
    """Read the folder of an engine that is not running."""
    reader = Ledger(open_backend(settings, own=False), own=False)
    try:
        await reader.open()
        yield cast(EngineApi, OfflineEngineApi(settings, reader))
    finally:
        await reader.close()


class OfflineEngineApi:
    """The reading part of `EngineApi`; the rest raises NotRunning."""

    def __init__(self, settings: Settings, reader: Ledger) -> None:
        self._settings, self._reader = settings, reader
        closed: Any = _Closed(self._refuse)
        self.approvals = self.policy = self.schedules = self.limits = closed
        self.keys = self.credentials = self.audit = self.batches = closed
        self.pipelines: Any = OfflinePipelines(settings, reader, self._refuse)
        if is_unmigrated(settings.data_dir):
            self.pipelines = _Closed(self._refuse_unmigrated)
        self.find, self.history, self.verify = reader.find, reader.history, reader.verify
        self._blobs = blobs = open_blobs(settings)
        self.get_blob, self.read_blob = blobs.get, blobs.read

    async def stat_blob(self, uri: str, *, job_id: str | None = None) -> BlobStat:
        return await self._blobs.stat(uri)

    async def get(self, job_id: str) -> Job:
        job = await self._reader.get(job_id)
        if job is None:
            raise NotFound(f"no job {job_id!r}", hint="'penstock ps' lists the jobs there are")
        return job

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
        return await self._reader.read_log(job_id, after, limit)

    async def read_steps(self, job_id: str, query: StepQuery) -> StepPage:
        await self.get(job_id)
        return await self._reader.read_steps(job_id, query)

    async def count_steps(self, job_id: str) -> list[StepCount]:
        await self.get(job_id)
        return await self._reader.count_steps(job_id)

    async def count_children(self, job_id: str) -> dict[JobState, int]:
        return await self._reader.count_children(chain_of((await self.get(job_id)).request))

    async def follow(
        self, job_id: str, after_log: int | None = 0, after_move: int | None = None
    ) -> AsyncIterator[JobUpdate]:
        """What it wrote so far: nothing more is going to happen."""
        if after_log is None:
            return
        while lines := await self.read_log(job_id, after_log):
            for line in lines:
                yield Logged(line)
            after_log = lines[-1].n

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotRunning(
            f"no engine is running on {self._settings.data_dir}",
            hint="start one with 'penstock up'",
        )

    def _refuse_unmigrated(self, *args: Any, **kwargs: Any) -> NoReturn:
        data = self._settings.data_dir
        raise StoreFailed(
            f"{data / OLD_RUNS} was written by an older Penstock and can't be read as it is",
            hint="start an engine on it once ('penstock up'): it moves the runs to penstock.db",
        )

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """All else takes a running engine."""
        return self._refuse


class OfflinePipelines:
    """The part of `Pipelines` that only reads."""

    def __init__(self, settings: Settings, jobs: Ledger, refuse: Callable[..., Any]) -> None:
        self._jobs, self._refuse = jobs, refuse
        self._runs = RunReader(jobs, open_blobs(settings), FactState(jobs), SystemClock())
        self.start = self.cancel = self.retry_failed = self.reset_breaker = refuse
        self.list, self.show = self._runs.list, self._runs.show
        self.runs, self.breakers = self._runs.find, self._runs.breakers

    async def get(self, job_id: str) -> PipelineRecord:
        return await self._runs.record(await self._job(job_id))

    async def _job(self, job_id: str) -> Job:
        job = await self._jobs.get(job_id)
        if job is None or pipeline_of(job.request.topic) is None:
            raise NotFound(f"no run {job_id!r}", hint="'penstock pipeline runs' lists them")
        return job

    async def items(
        self,
        job_id: str,
        stage: str,
        *,
        after: int = -1,
        limit: int = 100,
        outcomes: tuple[ItemOutcome, ...] = (),
    ) -> list[ItemRecord]:
        return await self._runs.items(await self.get(job_id), stage, after, limit, outcomes)

    async def stream(self, job_id: str, after: int = 0) -> AsyncIterator[PipelineEvent]:
        """What happened so far. Refused at the end of that, where more is to come."""
        job = await self._job(job_id)
        async for event in self._runs.events(job, after):
            yield event
        if not job.is_final:
            self._refuse()


class _Closed:
    """A part of the API that only a running engine has: whatever is asked is refused."""

    def __init__(self, refuse: Callable[..., Any]) -> None:
        self._refuse = refuse

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._refuse
