"""A Desk whose engine is elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from penstock.adapters.link.batches import RemoteBatches
from penstock.adapters.link.client import Link
from penstock.adapters.link.parts import (
    RemoteApprovals,
    RemoteAudit,
    RemoteKeys,
    RemoteLimits,
    RemotePolicy,
    RemoteSchedules,
)
from penstock.adapters.link.pipelines import RemotePipelines
from penstock.core.job import Job, JobRequest
from penstock.core.pipes import PipesView
from penstock.core.transition import Transition
from penstock.ports.blobs import BlobStat
from penstock.ports.desk import (
    Bulk,
    Cancellation,
    Cleaned,
    EngineStatus,
    EventBatch,
    JobUpdate,
    PoolView,
    WorkerView,
)
from penstock.ports.store import JobQuery, LogLine, Verified


class RemoteDesk:
    """See `penstock.ports.desk.Desk`."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.approvals = RemoteApprovals(link)
        self.policy = RemotePolicy(link)
        self.schedules = RemoteSchedules(link)
        self.limits = RemoteLimits(link)
        self.keys = RemoteKeys(link)
        self.audit = RemoteAudit(link)
        self.pipelines = RemotePipelines(link)
        self.batches = RemoteBatches(link)

    async def submit(self, requests: Sequence[JobRequest]) -> list[Job]:
        return await self._link.call("submit", list[Job], requests=requests)

    async def get(self, job_id: str) -> Job:
        return await self._link.call("get", Job, job_id=job_id)

    async def find(self, query: JobQuery) -> list[Job]:
        return await self._link.call("find", list[Job], query=query)

    async def history(self, job_id: str) -> list[Transition]:
        return await self._link.call("history", list[Transition], job_id=job_id)

    async def why(self, job_id: str) -> str:
        return await self._link.call("why", str, job_id=job_id)

    async def wait(self, job_id: str, timeout: float | None = None) -> Job:
        return await self._link.call("wait", Job, job_id=job_id, timeout=timeout)

    async def read_log(self, job_id: str, after: int = 0, limit: int = 1000) -> list[LogLine]:
        return await self._link.call(
            "read_log", list[LogLine], job_id=job_id, after=after, limit=limit
        )

    def follow(self, job_id: str, after_log: int | None = 0) -> AsyncIterator[JobUpdate]:
        return self._link.stream("follow", JobUpdate, job_id=job_id, after_log=after_log)

    async def cancel(
        self, job_id: str, *, reason: str = "", children: bool = False, timeout: float = 10.0
    ) -> Cancellation:
        return await self._link.call(
            "cancel",
            Cancellation,
            job_id=job_id,
            reason=reason,
            children=children,
            timeout=timeout,
        )

    async def retry(self, job_id: str) -> Job:
        return await self._link.call("retry", Job, job_id=job_id)

    async def cancel_many(self, query: JobQuery, *, reason: str = "") -> Bulk:
        return await self._link.call("cancel_many", Bulk, query=query, reason=reason)

    async def retry_many(self, query: JobQuery) -> Bulk:
        return await self._link.call("retry_many", Bulk, query=query)

    def events(self, after: int | None = None) -> AsyncIterator[EventBatch]:
        return self._link.stream("events", EventBatch, after=after)

    async def topics(self) -> list[str]:
        return await self._link.call("topics", list[str])

    async def workers(self) -> list[WorkerView]:
        return await self._link.call("workers", list[WorkerView])

    async def pipes(self) -> PipesView:
        return await self._link.call("pipes", PipesView)

    async def pools(self) -> list[PoolView]:
        return await self._link.call("pools", list[PoolView])

    async def pause_pool(self, name: str) -> PoolView:
        return await self._link.call("pause_pool", PoolView, name=name)

    async def resume_pool(self, name: str) -> PoolView:
        return await self._link.call("resume_pool", PoolView, name=name)

    async def status(self) -> EngineStatus:
        return await self._link.call("status", EngineStatus)

    async def verify(self) -> Verified:
        return await self._link.call("verify", Verified)

    async def prune(self, older_than: float) -> Cleaned:
        return await self._link.call("prune", Cleaned, older_than=older_than)

    async def put_blob(self, data: bytes, media_type: str = "application/json") -> str:
        return await self._link.call("put_blob", str, data=data, media_type=media_type)

    async def get_blob(self, uri: str) -> bytes:
        return await self._link.call("get_blob", bytes, uri=uri)

    async def stat_blob(self, uri: str) -> BlobStat:
        return await self._link.call("stat_blob", BlobStat, uri=uri)

    async def read_blob(self, uri: str, start: int, length: int) -> bytes:
        return await self._link.call("read_blob", bytes, uri=uri, start=start, length=length)
