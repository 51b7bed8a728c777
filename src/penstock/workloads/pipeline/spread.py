"""Items as jobs of their own, for whichever worker has room.

A child's idempotency key names run, stage, item and the version of what it runs. So a run that is
taken up again finds the children it had, none is run twice, and a changed pipeline that starts
over does not get the results of its old code.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated, Any

import msgspec
from msgspec.structs import replace

from penstock.core.errors import PenstockError, Superseded
from penstock.core.job import Job, JobRequest
from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import Environment
from penstock.ports.store import JobQuery
from penstock.workloads.pipeline.context import Metric, Notes
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.options import Tell
from penstock.workloads.pipeline.records import (
    TOPIC,
    ErrorClass,
    ItemOutcome,
    ItemRecord,
    OnChange,
    PipelineEventKind,
    PipelineRecord,
)
from penstock.workloads.pipeline.stage import Stage
from penstock.workloads.pipeline.store import Happening, Save


class ItemTask(msgspec.Struct, frozen=True):
    """The input of a child job: which item of which run.

    Anybody who may submit jobs can submit one like it, so it holds no pointers: the item is read
    from the run's record."""

    run: str
    stage: str
    seq: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    fans: dict[str, int] = {}
    """How many outputs the stages before gave: counted once, by the run."""


class ItemEnd(msgspec.Struct, frozen=True):
    """The result of a child job: how the item ended, and what its function reported."""

    item: ItemRecord
    added: dict[str, Metric] = {}
    fixed: dict[str, Metric] = {}
    errors: list[str] = []

    @classmethod
    def of(cls, item: ItemRecord, notes: Notes | None) -> ItemEnd:
        if notes is None:
            return cls(item)
        return cls(item, dict(notes.added), notes.fixed, notes.errors)

    def notes(self) -> Notes:
        notes = Notes()
        for metrics, fix in ((self.added, False), (self.fixed, True)):
            for name, value in metrics.items():
                notes.metric(name, value, fix=fix)
        notes.errors.extend(self.errors)
        return notes


class Spread:
    """Runs items of one run as child jobs."""

    def __init__(self, environment: Environment, request: JobRequest, pipeline: Definition) -> None:
        self._environment, self._request, self._pipeline = environment, request, pipeline

    async def run(
        self, record: PipelineRecord, stage: Stage, item: ItemRecord, fans: Mapping[str, int]
    ) -> tuple[ItemRecord, Notes | None]:
        """Submit the child, or find it, and wait for its end."""
        api = self._environment.api
        job = (await api.submit([await self._child(record, stage, item, fans)]))[0]
        job = await api.wait(job.job_id)
        return await self._ended(job, item)

    async def stop(self, record: PipelineRecord, stage: Stage, reason: str) -> None:
        """Cancel the children of this stage that still wait or run. The run itself goes on."""
        query = JobQuery(
            parent_job_id=record.id,
            topic=child_topic(record.pipeline, stage.name),
            tenant=record.tenant,
        )
        await self._environment.api.cancel_many(query, reason=reason)

    async def _child(
        self, record: PipelineRecord, stage: Stage, item: ItemRecord, fans: Mapping[str, int]
    ) -> JobRequest:
        payload = msgspec.json.encode(ItemTask(record.id, stage.name, item.seq, dict(fans)))
        parent = self._request
        return JobRequest(
            job_id="",
            topic=child_topic(record.pipeline, stage.name),
            context_ptr=await self._environment.blobs.put(payload),
            priority=parent.priority,
            parent_job_id=record.id,
            workflow_id=record.id,
            step_index=item.seq,
            tenant=parent.tenant,
            principal=parent.principal,
            env=parent.env,
            capability=parent.capability,
            risk_tags=parent.risk_tags,
            idempotency_key=self._key(record, stage, item),
            idempotent=True,
        )

    def _key(self, record: PipelineRecord, stage: Stage, item: ItemRecord) -> str:
        """A pipeline that starts over upon any change is another one then; a stage that goes on
        is the same as long as its version is."""
        restarts = self._pipeline.on_change is OnChange.RESTART
        version = self._pipeline.fingerprint if restarts else stage.info.version
        mark = sha256(version.encode()).hexdigest()[:8]
        return f"{record.id}/{stage.name}/{mark}/{item.seq}"

    async def _ended(self, job: Job, item: ItemRecord) -> tuple[ItemRecord, Notes | None]:
        pointer = job.result.result_ptr if job.result is not None else None
        if job.state in (JobState.SUCCEEDED, JobState.FAILED) and pointer:
            end = msgspec.json.decode(await self._environment.blobs.get(pointer), type=ItemEnd)
            ended = replace(end.item, seq=item.seq, key=item.key, input=item.input)
            return ended, end.notes()
        return _failed(job, item, self._environment.clock.now()), None


class Emitter:
    """Writes what an item emits to the record of its run, while the item goes on."""

    def __init__(self, environment: Environment, record: PipelineRecord, tell: Tell) -> None:
        self._store, self._clock, self._tell = environment.pipelines, environment.clock, tell
        self._job_id, self._fence = record.id, record.fence
        self._waiting: list[Happening] = []
        self._writing: asyncio.Task[None] | None = None

    def emit(self, stage: str, key: str, data: dict[str, Any]) -> None:
        told = {"stage": stage, "key": key, "data": data}
        self._waiting.append(Happening(PipelineEventKind.CUSTOM, told))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.ensure_future(self._write())

    async def close(self) -> None:
        """Wait until all of it is written."""
        if self._writing is not None:
            await self._writing

    async def _write(self) -> None:
        while self._waiting:
            happened, self._waiting = tuple(self._waiting), []
            try:
                await self._save(happened)
            except PenstockError as error:  # an event is not worth its item
                self._tell.log(f"{len(happened)} events could not be kept: {error}", level="error")

    async def _save(self, happened: tuple[Happening, ...]) -> None:
        while True:
            save = Save(
                job_id=self._job_id, fence=self._fence, at=self._clock.now(), happened=happened
            )
            try:
                await self._store.save(save)
                return
            except Superseded:  # the run was taken up again; it still waits for this item
                record = await self._store.get(self._job_id)
                if record is None or record.is_final or record.fence == self._fence:
                    raise
                self._fence = record.fence


def child_topic(pipeline: str, stage: str) -> str:
    return f"{TOPIC}{pipeline}.{stage}"


def _failed(job: Job, item: ItemRecord, now: float) -> ItemRecord:
    """An item whose job was denied, cancelled, timed out or lost."""
    result = job.result
    kinds = {
        JobState.CANCELLED: ErrorClass.CANCELLED,
        JobState.TIMEOUT: ErrorClass.TIMEOUT,
        JobState.DENIED: ErrorClass.PERMANENT,
    }
    message = (result.error_message if result is not None else None) or f"its job {job.state}"
    return replace(
        item,
        outcome=ItemOutcome.FAILED,
        attempts=max(1, job.attempt),
        error_class=kinds.get(job.state, ErrorClass.TRANSIENT),
        error_code=(result.error_code if result is not None else None) or str(job.state),
        error=f"{message} (job {job.job_id})",
        duration_ms=(result.execution_ms if result is not None else None) or 0.0,
        finished_at=now,
    )
