"""The part of the engine's Desk for pipelines, served within a caller's rights."""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from msgspec.structs import replace

from penstock.control.feed import Feed
from penstock.control.gateway import Gateway
from penstock.control.guard import Guard
from penstock.control.pipelines import PipelineKeeper
from penstock.core.caller import KeyRole
from penstock.core.errors import InvalidRequest, NotFound, NotPermitted
from penstock.core.job import Job
from penstock.core.stages import (
    Breaker,
    ItemOutcome,
    ItemRecord,
    PipelineEvent,
    PipelineInfo,
    PipelineRecord,
    pipeline_of,
)
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.pipelines import CancelAnswer, RunQuery
from penstock.ports.store import Store

MAX_PAGE = 1000


class PipelinesCounter:
    """See `penstock.ports.pipelines.Pipelines`."""

    def __init__(
        self, keeper: PipelineKeeper, guard: Guard, store: Store, gateway: Gateway, feed: Feed
    ) -> None:
        self._keeper, self._guard, self._store = keeper, guard, store
        self._gateway, self._feed = gateway, feed

    async def list(self) -> builtins.list[PipelineInfo]:
        return await self._keeper.list()

    async def show(self, name: str) -> PipelineInfo:
        return await self._keeper.show(name)

    async def start(
        self,
        name: str,
        config: dict[str, Any] | None = None,
        *,
        tenant: str = "default",
        idempotency_key: str | None = None,
        retry_of: str | None = None,
    ) -> PipelineRecord:
        old = None if retry_of is None else await self._job(retry_of)
        with self._guard.doing("pipeline.start", name, role=KeyRole.SUBMIT):
            mine = self._mine(tenant)
            if old is not None and old.request.tenant != mine:
                raise NotFound(f"no run {retry_of!r} of tenant {mine!r}", hint="name its tenant")
            return await self._keeper.start(
                name,
                config or {},
                by=self._guard.by,
                tenant=mine,
                idempotency_key=idempotency_key,
                retry_of=retry_of,
            )

    def _mine(self, tenant: str) -> str:
        meant = self._guard.tenant(tenant)
        if not self._guard.caller.sees(meant):
            raise NotPermitted(
                f"tenant: {self._guard.by} may not start a run for {tenant!r}",
                hint="leave it out: the key says whose it is",
            )
        return meant

    async def get(self, job_id: str) -> PipelineRecord:
        return await self._keeper.get(await self._job(job_id))

    async def runs(self, query: RunQuery) -> builtins.list[PipelineRecord]:
        mine = self._guard.caller.tenant
        if mine is not None:
            if query.tenant not in (None, mine):
                return []
            query = replace(query, tenant=mine)
        if not 1 <= query.limit <= MAX_PAGE:
            raise InvalidRequest("limit", f"must be between 1 and {MAX_PAGE}")
        return await self._keeper.find(query)

    async def items(
        self,
        job_id: str,
        stage: str,
        *,
        after: int = -1,
        limit: int = 100,
        outcomes: tuple[ItemOutcome, ...] = (),
    ) -> builtins.list[ItemRecord]:
        if not 1 <= limit <= MAX_PAGE:
            raise InvalidRequest("limit", f"must be between 1 and {MAX_PAGE}")
        record = await self.get(job_id)
        return await self._keeper.items(record, stage, after, limit, outcomes)

    async def cancel(self, job_id: str, *, reason: str = "", timeout: float = 10.0) -> CancelAnswer:
        before = await self.get(job_id)
        with self._guard.doing("pipeline.cancel", job_id, role=KeyRole.SUBMIT, detail=reason):
            if before.is_final:
                return CancelAnswer(False, before.status, f"it has ended {before.status}")
            answer = await self._keeper.request_cancel(job_id)
            if not answer.accepted:
                return answer
            job = await self._gateway.cancel(
                job_id, reason=reason, children=True, by=self._guard.by
            )
        await self._ended(job, timeout)
        after = await self.get(job_id)
        if after.is_final and after.status is not PipelineJobStatus.CANCELLED:
            return CancelAnswer(False, after.status, f"it ended {after.status} first")
        return CancelAnswer(True, after.status)

    async def _ended(self, job: Job, timeout: float) -> None:
        if not job.is_final and timeout > 0:
            try:
                async with asyncio.timeout(timeout):
                    await self._feed.ended(job.job_id)
            except TimeoutError:
                pass  # the answer says that it still runs

    async def retry_failed(self, job_id: str) -> PipelineRecord:
        job = await self._job(job_id)
        record = await self._keeper.get(job)
        self._guard.require(KeyRole.SUBMIT, "pipeline.retry_failed")
        self._keeper.check_retry(record)
        # Of the job: a record whose config could not be read has none.
        config = record.config or await self._keeper.config_of(job)
        return await self.start(record.pipeline, config, tenant=record.tenant, retry_of=record.id)

    async def stream(self, job_id: str, after: int = 0) -> AsyncIterator[PipelineEvent]:
        await self.get(job_id)
        async with aclosing(self._keeper.stream(job_id, after)) as events:
            async for event in events:
                yield event

    async def breakers(self) -> builtins.list[Breaker]:
        self._guard.require(KeyRole.OPERATE, "breakers.list")
        return sorted(await self._keeper.runs.breakers(), key=lambda breaker: breaker.name)

    async def reset_breaker(self, name: str) -> Breaker:
        with self._guard.doing("breaker.reset", name, role=None):
            self._guard.require_everywhere(KeyRole.OPERATE, "breaker.reset")
            return await self._keeper.reset_breaker(name)

    async def _job(self, job_id: str) -> Job:
        job = self._guard.shown(await self._store.get(job_id), job_id)
        if pipeline_of(job.request.topic) is None:
            raise NotFound(
                f"job {job_id} is not a run of a pipeline", hint="'penstock show' tells what it is"
            )
        return job
