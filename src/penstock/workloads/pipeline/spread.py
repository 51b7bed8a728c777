"""Items as jobs of their own, for whichever worker has room.

A child's idempotency key names run, stage, item and round, so a run that is taken up again finds
the children it had, and none is run twice.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from penstock.core.job import Job, JobRequest
from penstock.core.stages import TOPIC, ErrorClass, ItemOutcome, ItemRecord, PipelineRecord
from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import World
from penstock.workloads.pipeline.context import Notes
from penstock.workloads.pipeline.stage import Stage


class ItemTask(msgspec.Struct, frozen=True):
    """The input of a child job: one item of one stage of one run."""

    run: str
    stage: str
    item: ItemRecord


class ItemEnd(msgspec.Struct, frozen=True):
    """The result of a child job: how the item ended, and what its function reported."""

    item: ItemRecord
    metrics: dict[str, float | int | str | bool] = {}
    errors: list[str] = []

    def notes(self) -> Notes:
        notes = Notes()
        for name, value in self.metrics.items():
            notes.metric(name, value, fix=isinstance(value, str | bool))
        notes.errors.extend(self.errors)
        return notes


class Spread:
    """Runs items of one run as child jobs."""

    def __init__(self, world: World, request: JobRequest) -> None:
        self._world, self._request = world, request

    async def run(
        self, record: PipelineRecord, stage: Stage, item: ItemRecord
    ) -> tuple[ItemRecord, Notes | None]:
        """Submit the child, or find it, and wait for its end."""
        desk = self._world.desk
        job = (await desk.submit([await self._child(record, stage, item)]))[0]
        job = await desk.wait(job.job_id)
        return await self._ended(job, item)

    async def stop(self, record: PipelineRecord) -> None:
        """Cancel whatever still waits or runs, and see it ended."""
        await self._world.desk.cancel(record.id, children=True, timeout=0)

    async def _child(self, record: PipelineRecord, stage: Stage, item: ItemRecord) -> JobRequest:
        payload = msgspec.json.encode(ItemTask(record.id, stage.name, item))
        parent = self._request
        return JobRequest(
            job_id="",
            topic=child_topic(record.pipeline, stage.name),
            context_ptr=await self._world.blobs.put(payload),
            priority=parent.priority,
            parent_job_id=record.id,
            workflow_id=record.id,
            step_index=item.seq,
            tenant=parent.tenant,
            principal=parent.principal,
            env=parent.env,
            capability=parent.capability,
            risk_tags=parent.risk_tags,
            idempotency_key=_key(record, stage, item),
            idempotent=True,
        )

    async def _ended(self, job: Job, item: ItemRecord) -> tuple[ItemRecord, Notes | None]:
        result = job.result
        pointer = result.result_ptr if result is not None else None
        if job.state is JobState.SUCCEEDED and pointer:
            end = msgspec.json.decode(await self._world.blobs.get(pointer), type=ItemEnd)
            ended = replace(end.item, seq=item.seq, key=item.key, input=item.input)
            return ended, end.notes()
        return _failed(job, item, self._world.clock.now()), None


def child_topic(pipeline: str, stage: str) -> str:
    return f"{TOPIC}{pipeline}.{stage}"


def _key(record: PipelineRecord, stage: Stage, item: ItemRecord) -> str:
    return f"{record.id}/{stage.name}/{item.seq}"


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
