"""Distributed items: child jobs for whichever worker has room.

A child's idempotency key names run, stage, item and the version of what it runs. So a run that is
taken up again finds the children it had, none is run twice, and a changed pipeline that starts
over does not get the results of its old code. The result of a child is the item's row.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256
from typing import Annotated

import msgspec
from msgspec.structs import replace

from penstock.core.errors import InvalidRequest, NotFound
from penstock.core.job import Job, JobRequest
from penstock.core.steps import MAX_NOTES
from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import Context, Environment, Task
from penstock.ports.store import JobQuery
from penstock.workloads.pipeline.definition import Definition, Stage
from penstock.workloads.pipeline.records import (
    TOPIC,
    ErrorClass,
    ItemOutcome,
    ItemRecord,
    OnChange,
    PipelineRecord,
    StageKind,
    StageRecord,
)
from penstock.workloads.pipeline.rows import ItemReport, RunRows, emit_note, fold
from penstock.workloads.pipeline.run_config import read_config


class ItemTask(msgspec.Struct, frozen=True):
    """The input of a child job: which item of which run.

    Anybody who may submit jobs can submit one like it, so it holds no pointers: the item is read
    from the run's rows."""

    run: str
    stage: str
    seq: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    output_counts: dict[str, int] = {}
    """How many outputs the stages before gave: counted once, by the run."""


class ItemEnd(msgspec.Struct, frozen=True):
    """The result of a child job: how the item ended, and what its function reported."""

    item: ItemRecord
    report: ItemReport | None = None
    emitted: list[tuple[str, str]] = []
    """Events of the item: its key and JSON."""


def child_topic(pipeline: str, stage: str) -> str:
    return f"{TOPIC}{pipeline}.{stage}"


class DistributedItems(msgspec.Struct, frozen=True):
    """Runs items of one run as child jobs."""

    environment: Environment
    request: JobRequest
    pipeline: Definition
    ctx: Context

    async def run(
        self, stage: Stage, record: StageRecord, item: ItemRecord, output_counts: Mapping[str, int]
    ) -> tuple[ItemRecord, ItemReport | None]:
        """The item as it ended, and what it reported. Submits the child, or finds it, and waits
        for its end; the run holds no slot meanwhile. `output_counts` are the outputs that the
        stages before gave."""
        api = self.environment.api
        child = await self._child(stage, record, item, output_counts)
        job = (await api.submit([child]))[0]
        waits, ids = self.ctx.waits, [job.job_id]
        if waits is None or job.is_final:
            return await self._ended(await api.wait(job.job_id), stage, item)
        waits.begin(ids)
        try:
            job = await api.wait(job.job_id)
        except BaseException:
            waits.leave(ids)
            raise
        await waits.end(ids)
        return await self._ended(job, stage, item)

    async def stop(self, stage: Stage, reason: str) -> None:
        """Cancel the children of this stage that still wait or run. The run itself goes on."""
        query = JobQuery(
            child_of=self.request.job_id,
            topic=child_topic(self.pipeline.name, stage.name),
            tenant=self.request.tenant,
        )
        await self.environment.api.cancel_many(query, reason=reason)

    async def _child(
        self, stage: Stage, record: StageRecord, item: ItemRecord, output_counts: Mapping[str, int]
    ) -> JobRequest:
        parent = self.request
        task = ItemTask(parent.job_id, stage.name, item.seq, dict(output_counts))
        return JobRequest(
            job_id="",
            topic=child_topic(self.pipeline.name, stage.name),
            context_ptr=await self.environment.blobs.put(msgspec.json.encode(task)),
            priority=parent.priority,
            parent_job_id=parent.job_id,
            child_of=parent.job_id,
            workflow_id=parent.job_id,
            step_index=item.seq,
            tenant=parent.tenant,
            principal=parent.principal,
            env=parent.env,
            labels=parent.labels,
            capability=parent.capability,
            risk_tags=parent.risk_tags,
            idempotency_key=self._key(stage, record, item),
            idempotent=True,
        )

    def _key(self, stage: Stage, record: StageRecord, item: ItemRecord) -> str:
        """A pipeline that starts over upon any change is another one then; a stage that goes on
        is the same as long as its version is."""
        restarts = self.pipeline.on_change is OnChange.RESTART
        version = self.pipeline.fingerprint if restarts else stage.info.version
        mark = sha256(f"{version}/{record.generation}".encode()).hexdigest()[:8]
        return f"{self.request.job_id}/{stage.name}/{mark}/{item.seq}"

    async def _ended(
        self, job: Job, stage: Stage, item: ItemRecord
    ) -> tuple[ItemRecord, ItemReport | None]:
        pointer = job.result.result_ptr if job.result is not None else None
        if job.state in (JobState.SUCCEEDED, JobState.FAILED) and pointer:
            end = msgspec.json.decode(await self.environment.blobs.get(pointer), type=ItemEnd)
            notes = [emit_note(stage.name, key, data) for key, data in end.emitted]
            for start in range(0, len(notes), MAX_NOTES):
                await self.ctx.checkpoint([], notes[start : start + MAX_NOTES])
            return replace(end.item, seq=item.seq, key=item.key, input=item.input), end.report
        return _failed(job, item, self.environment.clock.now()), None


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


# -- in the child -----------------------------------------------------------------


async def given_item(
    pipeline: Definition, stage: Stage, job: Task, environment: Environment
) -> tuple[ItemTask, PipelineRecord, ItemRecord]:
    """The item that a child job is for, and the run that it belongs to. Raises InvalidRequest;
    another tenant's run is as unknown as one that never was."""
    try:
        task = msgspec.json.decode(job.payload, type=ItemTask)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("input", f"is not an item of a run: {error}") from error
    api = environment.api
    try:
        run = await api.get(task.run)
    except NotFound:
        run = None
    mine = (pipeline.topic, job.request.tenant)
    if run is None or (run.request.topic, run.request.tenant) != mine:
        raise InvalidRequest("run", f"there is no run {task.run!r}")
    rows = RunRows(api.read_steps, run.job_id)
    state, stages, at = await rows.head()
    pointer = run.request.context_ptr
    config = read_config(await environment.blobs.get(pointer) if pointer else b"")
    record = fold(run, pipeline.plain_config(config), pipeline.info(), state, stages, at)
    listed = record.stage(stage.name)
    item = None
    if listed is not None and stage.info.kind is StageKind.STEP and task.seq == 0:
        item = ItemRecord(seq=0, key="")
    elif listed is not None:
        found = await rows.items(listed, after=task.seq - 1, limit=1)
        item = found[0] if found and found[0].seq == task.seq else None
    if item is None:
        raise InvalidRequest("seq", f"stage {stage.name} has no item {task.seq}")
    return task, record, replace(item, outcome=ItemOutcome.PENDING)
