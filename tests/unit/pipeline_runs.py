"""A place to run one pipeline in, for tests of the orchestrator itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import msgspec

from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.ports.clock import Clock, SystemClock
from penstock.testing.clock import LoopClock, VirtualLoop
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.orchestrator import AsyncPipelineOrchestrator, RunOptions
from penstock.workloads.pipeline.records import (
    ItemRecord,
    PipelineEvent,
    PipelineRecord,
    StageRecord,
)
from penstock.workloads.pipeline.storage.memory import MemoryPipelineStore
from penstock.workloads.pipeline.store import Claim, PipelineStore


class Ear:
    """Keeps what a run tells."""

    def __init__(self) -> None:
        self.logs: list[tuple[str, str]] = []
        self.fractions: list[float | None] = []

    def log(self, text: str, level: str = "info") -> None:
        self.logs.append((level, text))

    def progress(self, fraction: float | None = None, message: str = "") -> None:
        self.fractions.append(fraction)

    def heard(self, text: str) -> bool:
        return any(text in line for _, line in self.logs)


class Place:
    """A store, blobs and a clock, and a way to run pipelines with them."""

    def __init__(
        self,
        *,
        store: PipelineStore | None = None,
        blobs: Any = None,
        clock: Clock | None = None,
        **options: Any,
    ) -> None:
        self.store: Any = store or MemoryPipelineStore()
        self.blobs = blobs or MemoryBlobs()
        loop = asyncio.get_running_loop()
        virtual = isinstance(loop, VirtualLoop)
        self.clock: Clock = clock or (LoopClock(loop) if virtual else SystemClock())
        self.options = RunOptions(**options)
        self.ear = Ear()

    async def create(
        self, pipeline: Definition, config: Any = None, job_id: str = "job", **more: Any
    ) -> PipelineRecord:
        record = PipelineRecord(
            id=job_id,
            trace_id=f"trace-{job_id}",
            pipeline=pipeline.name,
            fingerprint=pipeline.fingerprint,
            config=pipeline.plain_config(config),
            created_at=self.clock.now(),
            **more,
        )
        created: PipelineRecord = await self.store.create(record)
        return created

    async def claimed(
        self, pipeline: Definition, job_id: str = "job", **more: Any
    ) -> AsyncPipelineOrchestrator:
        """An orchestrator for the next run of a job."""
        held = await self.store.get(job_id)
        record = await self.store.claim(
            Claim(job_id=job_id, owner="me", now=self.clock.now(), fence=held.fence + 1)
        )
        return AsyncPipelineOrchestrator(
            pipeline,
            record,
            self.store,
            self.blobs,
            self.clock,
            tell=self.ear,
            options=self.options,
            **more,
        )

    async def run(
        self, pipeline: Definition, config: Any = None, job_id: str = "job", **more: Any
    ) -> PipelineRecord:
        await self.create(pipeline, config, job_id, **more)
        return await (await self.claimed(pipeline, job_id)).run()

    async def items(self, stage: str, job_id: str = "job") -> list[ItemRecord]:
        found: list[ItemRecord] = await self.store.items(job_id, stage, limit=100_000)
        return found

    async def outputs(self, stage: str, job_id: str = "job") -> list[Any]:
        """What its items gave, as it is stored."""
        pointers = [item.output for item in await self.items(stage, job_id) if item.output]
        return [msgspec.json.decode(await self.blobs.get(pointer)) for pointer in pointers]

    async def events(self, job_id: str = "job") -> list[PipelineEvent]:
        found: list[PipelineEvent] = await self.store.events(job_id)
        return found


def stage_of(record: PipelineRecord, name: str) -> StageRecord:
    stage = record.stage(name)
    assert stage is not None
    return stage


def statuses(record: PipelineRecord) -> dict[str, str]:
    return {stage.name: str(stage.status) for stage in record.stages}


def reasons(record: PipelineRecord) -> dict[str, str]:
    return {stage.name: stage.reason for stage in record.stages}


async def turns(count: int = 50) -> None:
    """Let everything that can go on go on."""
    for _ in range(count):
        await asyncio.sleep(0)


async def within(seconds: float, work: Awaitable[Any]) -> Any:
    async with asyncio.timeout(seconds):
        return await work
