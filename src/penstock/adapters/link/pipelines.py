"""Pipelines, asked of an engine elsewhere; and their records, for workers that run them there."""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from penstock.adapters.link.client import Link
from penstock.core.stages import (
    Breaker,
    ItemOutcome,
    ItemRecord,
    PipelineEvent,
    PipelineInfo,
    PipelineRecord,
)
from penstock.ports.pipelines import CancelAnswer, Claim, RunQuery, Save, Saved

# mypy takes no union for a type that is handed over.
_MAYBE_RECORD: Any = PipelineRecord | None
_MAYBE_SAVED: Any = Saved | None
_MAYBE_BREAKER: Any = Breaker | None
_MAYBE_BYTES: Any = bytes | None

RECORDS = "records"
"""How the names of calls to the pipeline store begin."""


class RemotePipelines:
    """See `penstock.ports.pipelines.Pipelines`."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def list(self) -> builtins.list[PipelineInfo]:
        return await self._link.call("pipelines.list", builtins.list[PipelineInfo])

    async def show(self, name: str) -> PipelineInfo:
        return await self._link.call("pipelines.show", PipelineInfo, name=name)

    async def start(
        self,
        name: str,
        config: dict[str, Any] | None = None,
        *,
        tenant: str = "default",
        idempotency_key: str | None = None,
        retry_of: str | None = None,
    ) -> PipelineRecord:
        return await self._link.call(
            "pipelines.start",
            PipelineRecord,
            name=name,
            config=config,
            tenant=tenant,
            idempotency_key=idempotency_key,
            retry_of=retry_of,
        )

    async def get(self, job_id: str) -> PipelineRecord:
        return await self._link.call("pipelines.get", PipelineRecord, job_id=job_id)

    async def runs(self, query: RunQuery) -> builtins.list[PipelineRecord]:
        return await self._link.call("pipelines.runs", builtins.list[PipelineRecord], query=query)

    async def items(
        self,
        job_id: str,
        stage: str,
        *,
        after: int = -1,
        limit: int = 100,
        outcomes: tuple[ItemOutcome, ...] = (),
    ) -> builtins.list[ItemRecord]:
        return await self._link.call(
            "pipelines.items",
            builtins.list[ItemRecord],
            job_id=job_id,
            stage=stage,
            after=after,
            limit=limit,
            outcomes=outcomes,
        )

    async def cancel(self, job_id: str, *, reason: str = "", timeout: float = 10.0) -> CancelAnswer:
        return await self._link.call(
            "pipelines.cancel", CancelAnswer, job_id=job_id, reason=reason, timeout=timeout
        )

    async def retry_failed(self, job_id: str) -> PipelineRecord:
        return await self._link.call("pipelines.retry_failed", PipelineRecord, job_id=job_id)

    def stream(self, job_id: str, after: int = 0) -> AsyncIterator[PipelineEvent]:
        return self._link.stream("pipelines.stream", PipelineEvent, job_id=job_id, after=after)

    async def breakers(self) -> builtins.list[Breaker]:
        return await self._link.call("pipelines.breakers", builtins.list[Breaker])

    async def reset_breaker(self, name: str) -> Breaker:
        return await self._link.call("pipelines.reset_breaker", Breaker, name=name)


class RemotePipelineStore:
    """See `penstock.ports.pipelines.PipelineStore`. Nobody listens through a link."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def create(
        self, record: PipelineRecord, *, single_flight: bool = False
    ) -> PipelineRecord:
        return await self._link.call(
            "records.create", PipelineRecord, record=record, single_flight=single_flight
        )

    async def get(self, job_id: str) -> PipelineRecord | None:
        return await self._link.call("records.get", _MAYBE_RECORD, job_id=job_id)

    async def glance(self, job_id: str) -> Saved | None:
        return await self._link.call("records.glance", _MAYBE_SAVED, job_id=job_id)

    async def find(self, query: RunQuery) -> list[PipelineRecord]:
        return await self._link.call("records.find", list[PipelineRecord], query=query)

    async def unfinished(self) -> list[PipelineRecord]:
        return await self._link.call("records.unfinished", list[PipelineRecord])

    async def claim(self, claim: Claim) -> PipelineRecord | None:
        return await self._link.call("records.claim", _MAYBE_RECORD, claim=claim)

    async def save(self, save: Save) -> Saved:
        return await self._link.call("records.save", Saved, save=save)

    async def request_cancel(self, job_id: str, now: float) -> CancelAnswer:
        return await self._link.call("records.request_cancel", CancelAnswer, job_id=job_id, now=now)

    async def fail_stale(self, job_id: str, now: float, message: str, version: int) -> bool:
        return await self._link.call(
            "records.fail_stale", bool, job_id=job_id, now=now, message=message, version=version
        )

    async def items(
        self,
        job_id: str,
        stage: str,
        *,
        after: int = -1,
        limit: int = 1000,
        outcomes: tuple[ItemOutcome, ...] = (),
    ) -> list[ItemRecord]:
        return await self._link.call(
            "records.items",
            list[ItemRecord],
            job_id=job_id,
            stage=stage,
            after=after,
            limit=limit,
            outcomes=outcomes,
        )

    async def items_by_key(self, job_id: str, stage: str, keys: Sequence[str]) -> list[ItemRecord]:
        return await self._link.call(
            "records.items_by_key", list[ItemRecord], job_id=job_id, stage=stage, keys=keys
        )

    async def fan(self, job_id: str, stage: str) -> int:
        return await self._link.call("records.fan", int, job_id=job_id, stage=stage)

    async def forget_stages(self, job_id: str, fence: int, stages: Sequence[str]) -> None:
        await self._link.call(
            "records.forget_stages", type(None), job_id=job_id, fence=fence, stages=stages
        )

    async def events(self, job_id: str, after: int = 0, limit: int = 1000) -> list[PipelineEvent]:
        return await self._link.call(
            "records.events", list[PipelineEvent], job_id=job_id, after=after, limit=limit
        )

    async def breaker(self, name: str) -> Breaker | None:
        return await self._link.call("records.breaker", _MAYBE_BREAKER, name=name)

    async def breakers(self) -> list[Breaker]:
        return await self._link.call("records.breakers", list[Breaker])

    async def put_breaker(self, breaker: Breaker) -> bool:
        return await self._link.call("records.put_breaker", bool, breaker=breaker)

    async def declare(self, infos: Sequence[PipelineInfo]) -> None:
        await self._link.call("records.declare", type(None), infos=infos)

    async def declared(self) -> list[PipelineInfo]:
        return await self._link.call("records.declared", list[PipelineInfo])

    async def remember(self, name: str, value: bytes) -> None:
        await self._link.call("records.remember", type(None), name=name, value=value)

    async def recall(self, name: str) -> bytes | None:
        return await self._link.call("records.recall", _MAYBE_BYTES, name=name)

    async def refers(self, tenant: str, pointer: str) -> bool:
        return await self._link.call("records.refers", bool, tenant=tenant, pointer=pointer)

    async def pointers(self) -> list[str]:
        return await self._link.call("records.pointers", list[str])

    async def prune(self, finished_before: float, limit: int = 1000) -> int:
        return await self._link.call(
            "records.prune", int, finished_before=finished_before, limit=limit
        )

    def listen(self, listener: Callable[[Sequence[str]], None]) -> Callable[[], None]:
        return lambda: None

    async def close(self) -> None:
        """The link is somebody else's."""
