"""Runs pipelines as canonical jobs: what happens inside RUNNING.

A run's record has its job's id, and its fence is the job's attempt: a worker that was taken for
lost, and comes back, can write nothing any more. A job whose worker is gone is dispatched again,
and the next attempt goes on where the record stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from penstock.core.check import MAX_TIMEOUT
from penstock.core.errors import InvalidRequest, NotFound, PenstockError, Unavailable
from penstock.core.job import TopicDefaults, Unique
from penstock.core.verdict import Constraints
from penstock.lifecycles.canonical import JobState
from penstock.lifecycles.pipeline import ENDS, PipelineJobStatus
from penstock.ports.executor import Context, Environment, Interrupted, Outcome, Task
from penstock.workloads.pipeline.calls import Pools
from penstock.workloads.pipeline.closing import call_hooks
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.items import ItemRunner
from penstock.workloads.pipeline.options import DEFAULTS, Silent
from penstock.workloads.pipeline.orchestrator import (
    AsyncPipelineOrchestrator,
    RunOptions,
    Stop,
)
from penstock.workloads.pipeline.records import (
    TOPIC,
    ItemOutcome,
    ItemRecord,
    PipelineRecord,
    StageKind,
    first_record,
)
from penstock.workloads.pipeline.run_config import read_config
from penstock.workloads.pipeline.spread import Emitter, ItemEnd, ItemTask, Spread, child_topic
from penstock.workloads.pipeline.stage import Stage
from penstock.workloads.pipeline.store import Claim

_MAX_ATTEMPTS = 100
"""How often a run may lose its worker: it goes on where it was, so that costs little."""
_STOPS = {
    JobState.CANCELLED: Stop.CANCEL,
    JobState.TIMEOUT: Stop.FAIL,
    JobState.FAILED: Stop.INTERRUPT,
}
"""What the end that was asked for is to the run; FAILED: the worker stops."""


class PipelineExecutor:
    """Executes pipelines, and items of those whose stages spread them."""

    resumable = True

    def __init__(self, pipelines: Iterable[Definition], options: RunOptions | None = None) -> None:
        self._pipelines = {pipeline.topic: pipeline for pipeline in pipelines}
        self._options = options or RunOptions()
        self._pools = Pools(self._options)
        self._items: dict[str, tuple[Definition, Stage]] = {}
        topic_defaults: dict[str, TopicDefaults] = {}
        for topic, pipeline in self._pipelines.items():
            pipeline.check()
            topic_defaults[topic] = _offer(pipeline)
            for stage in pipeline.stages.values():
                if stage.info.spread:
                    child = child_topic(pipeline.name, stage.name)
                    self._items[child] = pipeline, stage
                    topic_defaults[child] = TopicDefaults(timeout=MAX_TIMEOUT, idempotent=True)
        self.topic_defaults: Mapping[str, TopicDefaults] = topic_defaults
        self.topics: tuple[str, ...] = (*self._pipelines, *self._items)

    async def open(self, environment: Environment) -> None:
        """Say what can be started, before anything is."""
        await environment.pipelines.declare(
            [pipeline.info() for pipeline in self._pipelines.values()]
        )

    def check(self, topic: str, payload: bytes) -> None:
        if (pipeline := self._pipelines.get(topic)) is not None:
            pipeline.config_of(read_config(payload))

    def plain_config(self, topic: str, config: dict[str, Any]) -> dict[str, Any]:
        """A config with all its defaults. Raises InvalidRequest, naming the field."""
        pipeline = self._pipelines.get(topic)
        return config if pipeline is None else pipeline.plain_config(config)

    async def run(self, task: Task, ctx: Context) -> Outcome:
        environment, topic = ctx.environment, task.request.topic
        if topic not in self.topics:
            return _failure("UNKNOWN_TOPIC", f"no pipeline here serves {topic}")
        if environment is None:
            return _failure("NO_RECORDS", "there is no engine behind this worker to keep records")
        if (demand := _unenforceable(task.constraints)) is not None:
            return _failure(
                "CONSTRAINT_NOT_ENFORCED",
                f"the safety rules demand {demand}, to which a pipeline can't be held, so it was"
                " not run: have the rule deny it, or require an approval, instead",
            )
        try:
            if topic in self._items:
                return await self._run_item(task, ctx, environment)
            return await self._run_pipeline(self._pipelines[topic], task, ctx, environment)
        except InvalidRequest as wrong:
            return _failure("BAD_INPUT", str(wrong))

    async def close(self) -> None:
        await self._pools.close()

    async def call_hooks(self, record: PipelineRecord) -> None:
        """For a run that has ended without its runner, who would have called them."""
        if (pipeline := self._pipelines.get(TOPIC + record.pipeline)) is not None:
            await call_hooks(pipeline, record, Silent())

    # -- a run --------------------------------------------------------------------

    async def _run_pipeline(
        self, pipeline: Definition, task: Task, ctx: Context, environment: Environment
    ) -> Outcome:
        record = await self._claim(pipeline, task, environment)
        if record.is_final:
            return await _outcome(record, environment)
        orchestrator = AsyncPipelineOrchestrator(
            pipeline,
            record,
            environment.pipelines,
            environment.blobs,
            environment.clock,
            tell=ctx,
            spread=Spread(environment, task.request, pipeline),
            options=self._options,
            pools=self._pools,
        )
        running = asyncio.ensure_future(orchestrator.run())
        try:
            ended = await _stoppable(running, orchestrator, ctx)
        except Unavailable as lost:
            raise Interrupted(f"its records can't be written: {lost}") from lost
        if ctx.cancel.requested and not _finished_first(ended):
            raise asyncio.CancelledError  # the worker knows what the end counts as
        return await _outcome(ended, environment, orchestrator.output)

    async def _claim(
        self, pipeline: Definition, task: Task, environment: Environment
    ) -> PipelineRecord:
        """The run's record, ours to write from now on."""
        runs, now = environment.pipelines, environment.clock.now()
        config = pipeline.plain_config(read_config(task.payload))
        claim = Claim(
            job_id=task.request.job_id, owner=environment.worker_id, now=now, fence=task.attempt
        )
        try:
            claimed = await runs.claim(claim)
        except NotFound:  # we were quicker than the keeper of records
            parent = task.request.parent_job_id
            before = await runs.get(parent) if parent is not None else None
            await runs.create(first_record(task.request, config, now, before))
            claimed = await runs.claim(claim)
        if claimed is not None:
            return claimed
        record = await runs.get(claim.job_id)
        if record is None or not record.is_final:
            raise PenstockError(
                f"run {claim.job_id} belongs to another attempt by now",
                hint="this attempt was taken for lost",
            )
        return record

    # -- one item -----------------------------------------------------------------

    async def _run_item(self, task: Task, ctx: Context, environment: Environment) -> Outcome:
        pipeline, stage = self._items[task.request.topic]
        given, record, item = await _given(pipeline, stage, task, environment)
        runner = ItemRunner(
            pipeline,
            record,
            environment.pipelines,
            environment.blobs,
            environment.clock,
            ctx.cancel,
            ctx,
            self._options,
            pools=self._pools,
        )
        runner.scope.fans.update(given.fans)
        emitter = Emitter(environment, record, ctx)
        runner.scope.on_emit = emitter.emit
        try:
            ended, notes = await runner.perform(stage, item)
        finally:
            await runner.close()
            await emitter.close()
        if ctx.cancel.requested:
            raise asyncio.CancelledError
        end = msgspec.json.encode(ItemEnd.of(ended, notes))
        if ended.outcome is ItemOutcome.FAILED:
            code = ended.error_code or "ITEM_FAILED"
            return Outcome(JobState.FAILED, end, error_code=code, error_message=ended.error)
        return Outcome(JobState.SUCCEEDED, end)


async def _given(
    pipeline: Definition, stage: Stage, task: Task, environment: Environment
) -> tuple[ItemTask, PipelineRecord, ItemRecord]:
    """The item that a child job is for. Another tenant's run is as unknown as one that never
    was."""
    try:
        given = msgspec.json.decode(task.payload, type=ItemTask)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("input", f"is no item of a run: {error}") from error
    record = await environment.pipelines.get(given.run)
    mine = pipeline.name, task.request.tenant
    if record is None or (record.pipeline, record.tenant) != mine:
        raise InvalidRequest("run", f"there is no run {given.run!r}")
    items = await environment.pipelines.items(record.id, stage.name, after=given.seq - 1, limit=1)
    if not items or items[0].seq != given.seq:
        raise InvalidRequest("seq", f"stage {stage.name} has no item {given.seq}")
    return given, record, items[0]


def make(app: Any, options: Mapping[str, Any]) -> PipelineExecutor:
    """The executor of an application's pipelines (entry point `penstock.executors`)."""
    pipelines = app.pipelines.values() if app is not None else ()
    known = ("kill_grace", "threads", "processes")
    chosen = {name: options[name] for name in known if options.get(name) is not None}
    # A run has more than one item at once, so that few runs need not mean few threads.
    chosen["threads"] = max(chosen.get("threads", 0), DEFAULTS.threads)
    return PipelineExecutor(pipelines, RunOptions(**chosen))


async def _stoppable(
    running: asyncio.Future[PipelineRecord], orchestrator: AsyncPipelineOrchestrator, ctx: Context
) -> PipelineRecord:
    """Wait for a run; a cancellation stops it in the way that was asked for, and is waited out."""
    while True:
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            if running.done() and running.cancelled():
                raise
            orchestrator.stop(_STOPS.get(ctx.ended_as, Stop.CANCEL), ctx.cancel.reason)


def _finished_first(record: PipelineRecord) -> bool:
    return record.status in (PipelineJobStatus.COMPLETED, PipelineJobStatus.PARTIAL)


class RunResult(msgspec.Struct, frozen=True):
    """What a finished run's job returns."""

    status: PipelineJobStatus
    output: Any
    """What its last step that ran returned."""
    stages: dict[str, dict[str, Any]]
    errors: list[str]
    alerts: list[str]


async def _outcome(record: PipelineRecord, environment: Environment, output: str = "") -> Outcome:
    end = ENDS[record.status]
    errors = [f"{error.stage}: {error.message}" for error in record.errors]
    if end.state is not JobState.SUCCEEDED:
        message = "; ".join(errors[:5]) or f"the run ended {record.status}"
        code = record.errors[0].code if len(record.errors) == 1 and record.errors[0].code else None
        return Outcome(end.state, error_code=code or end.error_code, error_message=message)
    result = RunResult(
        status=record.status,
        output=await _output(record, environment, output),
        stages={
            stage.name: {
                "status": stage.status,
                "total": stage.total,
                "ok": stage.ok,
                "failed": stage.failed,
                **({"reason": stage.reason} if stage.reason else {}),
            }
            for stage in record.stages
        },
        errors=errors,
        alerts=[alert.code for alert in record.alerts],
    )
    return Outcome(
        JobState.SUCCEEDED,
        msgspec.json.encode(result),
        error_code=end.error_code,
        error_message="; ".join(errors[:5]) or None if end.error_code else None,
    )


async def _output(record: PipelineRecord, environment: Environment, pointer: str) -> Any:
    """What the last step that succeeded returned; if that was in an earlier run, it is read."""
    if not pointer:
        pointer = await _last_output(record, environment)
    return msgspec.json.decode(await environment.blobs.get(pointer)) if pointer else None


async def _last_output(record: PipelineRecord, environment: Environment) -> str:
    for stage in reversed(record.stages):
        if stage.kind is StageKind.STEP and stage.ok:
            items = await environment.pipelines.items(record.id, stage.name, limit=1)
            if items and items[0].output:
                return items[0].output
    return ""


def _offer(pipeline: Definition) -> TopicDefaults:
    unique = Unique(f"pipeline.{pipeline.name}") if pipeline.single_flight else None
    return TopicDefaults(
        timeout=pipeline.timeout or MAX_TIMEOUT,
        idempotent=True,
        unique=unique,
        max_attempts=_MAX_ATTEMPTS,
    )


def _unenforceable(constraints: Constraints | None) -> str | None:
    if constraints is None:
        return None
    if constraints.read_only:
        return "read_only"
    if constraints.network is not None:
        return f"network = {list(constraints.network)}"
    return "max_memory" if constraints.max_memory is not None else None


def _failure(code: str, message: str) -> Outcome:
    return Outcome(JobState.FAILED, error_code=code, error_message=message)
