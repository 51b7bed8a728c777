"""`penstock.Pipeline` and `penstock.PipelineJobManager`: stages that run as one job, and the ways
to start it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from penstock.app.client import DefaultClient, JobHandle
from penstock.core.errors import Misconfigured, NotFound, Unavailable
from penstock.lifecycles.pipeline import ACTIVE, PipelineJobStatus
from penstock.ports.engine_api import EngineApi
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.interface import MAX_PAGE, CancelAnswer, RunQuery
from penstock.workloads.pipeline.records import (
    STALE_MESSAGE,
    ItemOutcome,
    ItemRecord,
    PipelineEvent,
    PipelineRecord,
)
from penstock.workloads.pipeline.rows import stale_since

if TYPE_CHECKING:
    from penstock.app.application import App, Session
    from penstock.app.client import Client


class Pipeline(Definition):
    """A row of stages that runs as one durable job.

    It belongs to an application (`app.add(pipeline)`), and is started through that one's engine.
    Alone, in a script, it starts an engine of its own inside the process when it is first needed,
    or uses the one that runs on the same data folder.
    """

    _app: App | None = None
    _default: DefaultClient | None = None

    async def start(
        self,
        config: Any = None,
        *,
        tenant: str = "default",
        key: str | None = None,
        retry_of: str | None = None,
    ) -> JobHandle[Any]:
        """Start a run: a canonical job, durable when this returns.

        Raises InvalidRequest, naming the config's field, and PipelineBusy while one is running.
        """
        client = await asyncio.to_thread(self._connected)
        given = self.plain_config(config)
        record = await client.pipelines.astart(
            self.name, given, tenant=tenant, idempotency_key=key, retry_of=retry_of
        )
        return await client.aget(record.id)

    def run(self, config: Any = None, *, timeout: float | None = None) -> PipelineRecord:
        """Start a run, wait for its end, and return its record, whatever the end."""
        client = self._connected()
        record = client.pipelines.start(self.name, self.plain_config(config))
        client.get(record.id).wait(timeout=timeout)
        return client.pipelines.get(record.id)

    def _connected(self) -> Client:
        if self._app is not None and self._app.is_running:
            return self._app.client()
        if self._default is None:
            self._default = DefaultClient(self._embedded, self._check_served)
        return self._default.client()

    def _embedded(self) -> Session:
        from penstock.app.application import App

        app = self._app or App()
        if self.name not in app.pipelines:
            app.add(self)
        return app.run()

    def _check_served(self, client: Client) -> None:
        if self.name not in {info.name for info in client.pipelines.list()}:
            raise NotFound(
                f"the engine that is running here does not serve the pipeline {self.name}",
                hint="start it with 'penstock up --pipeline MODULE:NAME', or give this one an"
                " application with a data folder of its own",
            )

    def close(self) -> None:
        """Let go of the engine that this pipeline started for itself; runs go on at its next
        start."""
        if self._default is not None:
            self._default.close()


class PipelineJobManager:
    """Starts, cancels, follows and cleans up pipeline jobs, in an engine inside this process.

        async with PipelineJobManager("data", [news]) as manager:
            job = await manager.start_job(news, {"classify_limit": 50})
            record = await manager.wait(job.id)

    Several managers, in several processes, may share a folder: one of them has the engine, and
    each runs jobs of its pipelines. Runs that were not finished when the last one ended stay
    RUNNING and go on at the next start.
    """

    def __init__(self, data: str | Path, pipelines: Iterable[Definition], **settings: Any) -> None:
        """`data` is the engine's folder. Settings are given by name; `timeouts__drain` is how long
        leaving waits for runs to end, 0 if not given."""
        from penstock.app.application import App

        if Path(data).is_file():
            raise Misconfigured(f"{data} is a file", hint="name the folder to keep runs in")
        self._app = App()
        self._app.add(*pipelines)
        self._session = self._app.run(data, **{"timeouts__drain": 0.0, **settings})
        self._engine: EngineApi | None = None

    async def __aenter__(self) -> Self:
        self._engine = (await self._session.__aenter__()).api
        return self

    async def __aexit__(self, *error: Any) -> None:
        if self._engine is not None:
            self._engine = None
            await self._session.__aexit__(*error)

    async def shutdown(self) -> None:
        """Leave: runs stay RUNNING, and go on at the next start."""
        await self.__aexit__(None, None, None)

    @property
    def _api(self) -> EngineApi:
        if self._engine is None:
            raise Unavailable("this manager is not running", hint="enter it with 'async with'")
        return self._engine

    async def start_job(
        self,
        pipeline: Definition | str,
        config: Any = None,
        *,
        tenant: str = "default",
        key: str | None = None,
        retry_of: str | None = None,
    ) -> PipelineRecord:
        """Record a job, PENDING, and run it in the background. NotFound, InvalidRequest (names
        the field), PipelineBusy. The same `key` again is the same job."""
        name = pipeline if isinstance(pipeline, str) else pipeline.name
        known = self._app.pipelines.get(name)
        if isinstance(pipeline, Definition) and known is not pipeline:
            there = ", ".join(self._app.pipelines) or "none"
            raise NotFound(f"no pipeline {name!r} in this manager", hint=f"there are: {there}")
        return await self._api.pipelines.start(
            name,
            config if known is None else known.plain_config(config),
            tenant=tenant,
            idempotency_key=key,
            retry_of=retry_of,
        )

    create_job = start_job
    """The seed's other name for it."""

    async def execute_job(self, job_id: str) -> PipelineRecord:
        """Wait for a job that was started, and return its record at the end."""
        return await self.wait(job_id)

    _execute_job = execute_job

    async def wait(self, job_id: str, timeout: float | None = None) -> PipelineRecord:
        """Its record when it has ended. NotFound, WaitTimedOut."""
        await self.get_job(job_id)
        await self._api.wait(job_id, timeout)
        return await self.get_job(job_id)

    async def cancel_job(
        self, job_id: str, *, reason: str = "", timeout: float = 10.0
    ) -> CancelAnswer:
        """Ask a job to end, and wait for that. The answer says which won, the cancel or the
        finish. NotFound."""
        return await self._api.pipelines.cancel(job_id, reason=reason, timeout=timeout)

    async def cleanup_stale_jobs(self) -> list[str]:
        """End jobs that are PENDING or RUNNING and made no progress for longer than their
        pipeline's `stale_after`: FAILED, with the seed's error. The ids of those."""
        api, ended = self._api, []
        infos = {info.name: info for info in await api.pipelines.list()}
        for record in await api.pipelines.runs(RunQuery(statuses=tuple(ACTIVE), limit=MAX_PAGE)):
            since = stale_since(record, await api.get(record.id), infos.get(record.pipeline))
            if since is not None and since <= time.time():
                answer = await api.pipelines.cancel(record.id, reason=STALE_MESSAGE)
                if answer.status is PipelineJobStatus.FAILED:
                    ended.append(record.id)
        return ended

    async def get_job(self, job_id: str) -> PipelineRecord:
        """NotFound."""
        return await self._api.pipelines.get(job_id)

    async def list_jobs(self, query: RunQuery | None = None) -> list[PipelineRecord]:
        """Newest first."""
        return await self._api.pipelines.runs(query or RunQuery())

    async def items(
        self,
        job_id: str,
        stage: str,
        *,
        after: int = -1,
        limit: int = 100,
        outcomes: tuple[ItemOutcome, ...] = (),
    ) -> list[ItemRecord]:
        """Items of one stage, in order. NotFound also for a stage that the job does not have."""
        return await self._api.pipelines.items(
            job_id, stage, after=after, limit=limit, outcomes=outcomes
        )

    def events(self, job_id: str, after: int = 0) -> AsyncIterator[PipelineEvent]:
        """Its events after an id, as they come; ends after `job_complete`."""
        return self._api.pipelines.stream(job_id, after)

    async def retry_failed(self, job_id: str) -> PipelineRecord:
        """A new job of what failed in this one and what depends on it. IllegalMove unless it has
        ended, InvalidRequest if nothing failed in it."""
        return await self._api.pipelines.retry_failed(job_id)


def pipeline_jobs(path: str | Path, *pipelines: Definition, **settings: Any) -> PipelineJobManager:
    """A `PipelineJobManager` on a folder of its own, for `async with`."""
    return PipelineJobManager(path, pipelines, **settings)
