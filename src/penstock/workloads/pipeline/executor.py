"""Runs pipelines as canonical jobs: what happens inside RUNNING.

What a run must remember are rows of its job (`rows`), fenced by the job's attempt: a worker that
was taken for lost, and comes back, can write nothing any more. A job whose worker is gone is
dispatched again, and the next attempt goes on where the rows stand.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock import values
from penstock.core.check import MAX_TIMEOUT
from penstock.core.errors import InvalidRequest, NotFound
from penstock.core.job import Job, TopicDefaults, Unique
from penstock.core.ledger import MAX_HISTORY
from penstock.core.verdict import Constraints
from penstock.lifecycles.canonical import JobState
from penstock.lifecycles.pipeline import ENDS, PipelineJobStatus
from penstock.ports.executor import RUNS, SCHEMA, Context, Environment, Outcome, Task
from penstock.workloads.pipeline.breakers import Breakers
from penstock.workloads.pipeline.calls import Pools
from penstock.workloads.pipeline.context import DEFAULTS, RunOptions, RunScope
from penstock.workloads.pipeline.definition import Definition, Stage
from penstock.workloads.pipeline.distributed import (
    DistributedItems,
    ItemEnd,
    child_topic,
    given_item,
)
from penstock.workloads.pipeline.items import ItemRunner
from penstock.workloads.pipeline.orchestrator import AsyncPipelineOrchestrator, call_hooks
from penstock.workloads.pipeline.records import (
    STALE_MESSAGE,
    TOPIC,
    ItemOutcome,
    OnOrphan,
    PipelineInfo,
    PipelineRecord,
)
from penstock.workloads.pipeline.rows import RunRows, RunState, fold, retried, run_row
from penstock.workloads.pipeline.run_config import read_config
from penstock.workloads.pipeline.service import DECLARED
from penstock.workloads.pipeline.stage_run import Stop

log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 100
"""How often a run may lose its worker: it goes on where it was, so that costs little."""
_STOPS = {
    JobState.CANCELLED: Stop.CANCEL,
    JobState.TIMEOUT: Stop.FAIL,
    JobState.FAILED: Stop.INTERRUPT,
}
"""What the end that was requested is to the run; FAILED: the worker stops."""


class PipelineExecutor:
    """Executes pipelines, and items of stages that are distributed."""

    resumable = True

    def __init__(self, pipelines: Iterable[Definition], options: RunOptions | None = None) -> None:
        self._pipelines = {pipeline.topic: pipeline for pipeline in pipelines}
        self._options = options or RunOptions()
        self._pools = Pools(self._options)
        self._breakers: Breakers | None = None
        self._items: dict[str, tuple[Definition, Stage]] = {}
        self._ended: dict[str, dict[str, Counter[str]]] = {}
        """Runs by status and items by outcome, by pipeline."""
        self._infos: dict[str, PipelineInfo] = {}
        topic_defaults: dict[str, TopicDefaults] = {}
        for topic, pipeline in self._pipelines.items():
            self._infos[topic] = pipeline.info()
            topic_defaults[topic] = _defaults(pipeline)
            for stage in pipeline.stages.values():
                if stage.info.distributed:
                    child = child_topic(pipeline.name, stage.name)
                    self._items[child] = pipeline, stage
                    topic_defaults[child] = TopicDefaults(timeout=MAX_TIMEOUT, idempotent=True)
        self.topic_defaults: Mapping[str, TopicDefaults] = topic_defaults
        self.topics: tuple[str, ...] = (*self._pipelines, *self._items)
        self._schemas: dict[str, Any] = {SCHEMA + topic: None for topic in self._items}
        for topic, info in self._infos.items():
            schema = values.flat_schema(info.config_schema) or {"type": "object"}
            self._schemas[SCHEMA + topic] = {"description": info.doc, "input": schema}

    async def open(self, environment: Environment) -> None:
        """Declare what can be started, before anything is."""
        for declared in self._infos.values():
            name, info = DECLARED + declared.name, msgspec.json.encode(declared)
            if await environment.state.read(name) != info:
                await environment.state.write(name, info)

    def facts(self) -> Mapping[str, Any]:
        """What each pipeline takes, and what ended here; the items of its stages are submitted by
        its runs alone."""
        return {**self._schemas, RUNS: self._ended} if self._ended else self._schemas

    def _count(self, record: PipelineRecord) -> None:
        ended = self._ended.setdefault(record.pipeline, {"runs": Counter(), "items": Counter()})
        ended["runs"][record.status] += 1
        for stage in record.stages:
            items = {"ok": stage.ok, "failed": stage.failed, "skipped": stage.skipped}
            ended["items"].update(items)

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
            return _failure("NO_ENGINE", "there is no engine behind this worker to keep its rows")
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

    def has_hooks(self, topic: str) -> bool:
        pipeline = self._pipelines.get(topic)
        return pipeline is not None and bool(pipeline.on_end or pipeline.on_alert)

    async def call_hooks(self, record: PipelineRecord) -> None:
        """For a run that has ended without its runner, who would have called them."""
        if (pipeline := self._pipelines.get(TOPIC + record.pipeline)) is not None:
            await call_hooks(pipeline, record, log.error)

    # -- a run --------------------------------------------------------------------

    async def _run_pipeline(
        self, pipeline: Definition, task: Task, ctx: Context, environment: Environment
    ) -> Outcome:
        info = self._infos[pipeline.topic]
        record, state = await _taken_up(pipeline, info, task, environment)
        if state is None or state.status is None:
            scope = self._scope(pipeline, record, ctx, environment)
            distributed = DistributedItems(environment, task.request, pipeline, ctx)
            orchestrator = AsyncPipelineOrchestrator(scope, state, ctx.checkpoint, distributed)
            record = await orchestrator.run(partial(_requested_stop, ctx))
            state = orchestrator.state
            self._count(record)
        else:  # an earlier attempt came to the end of the run, but not of its job
            record = replace(record, status=state.status)
        if not state.hooks_called and (pipeline.on_end or pipeline.on_alert):
            report = partial(ctx.log, level="error")
            await call_hooks(pipeline, _ended_now(record, environment, ctx), report)
            await ctx.checkpoint([run_row(replace(state, hooks_called=True))])
        if ctx.cancel.requested and record.status not in _FINISHED:
            raise asyncio.CancelledError  # the worker knows what the end counts as
        return await _outcome(record, state, environment)

    def _scope(
        self, pipeline: Definition, record: PipelineRecord, ctx: Context, environment: Environment
    ) -> RunScope:
        """All runs of a worker share its threads and processes, and one view of the breakers."""
        if self._breakers is None:
            self._breakers = Breakers(environment.state, environment.clock)
        return RunScope(
            pipeline,
            record,
            ctx,
            environment,
            options=self._options,
            pools=self._pools,
            breakers=self._breakers,
        )

    # -- one item -----------------------------------------------------------------

    async def _run_item(self, task: Task, ctx: Context, environment: Environment) -> Outcome:
        pipeline, stage = self._items[task.request.topic]
        given, record, item = await given_item(pipeline, stage, task, environment)
        scope = self._scope(pipeline, record, ctx, environment)
        scope.output_counts.update(given.output_counts)
        emitted: list[tuple[str, str]] = []
        scope.on_emit = partial(_keep_emitted, emitted)
        runner = ItemRunner(scope)
        try:
            ended, report = await runner.perform(stage, item, ctx.cancel)
        finally:
            await runner.close()
        if ctx.cancel.requested:
            raise asyncio.CancelledError
        end = msgspec.json.encode(ItemEnd(ended, report, emitted))
        if ended.outcome is ItemOutcome.FAILED:
            code = ended.error_code or "ITEM_FAILED"
            return Outcome(JobState.FAILED, end, error_code=code, error_message=ended.error)
        return Outcome(JobState.SUCCEEDED, end)


_FINISHED = (PipelineJobStatus.COMPLETED, PipelineJobStatus.PARTIAL)


def _keep_emitted(emitted: list[tuple[str, str]], stage: str, key: str, data: bytes) -> None:
    if len(emitted) < MAX_HISTORY:  # the engine keeps no more
        emitted.append((key, data.decode()))


def _ended_now(record: PipelineRecord, environment: Environment, ctx: Context) -> PipelineRecord:
    """The record as its job will end."""
    cancelled = record.status is PipelineJobStatus.CANCELLED
    asked = ctx.cancel.requested and ctx.ended_as is JobState.CANCELLED
    return replace(
        record,
        finished_at=environment.clock.now(),
        cancel_requested=cancelled or asked,
        cancel_effective=cancelled if cancelled or asked else None,
    )


async def _taken_up(
    pipeline: Definition, info: PipelineInfo, task: Task, environment: Environment
) -> tuple[PipelineRecord, RunState | None]:
    """The run as earlier attempts left it."""
    request, now = task.request, environment.clock.now()
    config = pipeline.plain_config(read_config(task.payload))
    rows = RunRows(environment.api.read_steps, request.job_id)
    state, stages, at = await rows.head() if task.attempt > 1 else (None, (), None)
    started, get = now, partial(_job, environment)
    retry_of = await retried(request, get)
    if task.attempt > 1 and (known := await get(request.job_id)) is not None:
        started = known.started_at or now
    job = Job(
        seq=0,
        request=request,
        state=JobState.RUNNING,
        version=1,
        accepted_at=now,
        updated_at=now,
        attempt=task.attempt,
        started_at=started,
        worker_id=environment.worker_id,
    )
    return fold(job, config, info, state, stages, at, retry_of=retry_of), state


async def _job(environment: Environment, job_id: str) -> Job | None:
    try:
        return await environment.api.get(job_id)
    except NotFound:
        return None


def make(app: Any, options: Mapping[str, Any]) -> PipelineExecutor:
    """The executor of an application's pipelines (entry point `penstock.executors`)."""
    pipelines = app.pipelines.values() if app is not None else ()
    known = ("kill_grace", "threads", "processes")
    chosen = {name: options[name] for name in known if options.get(name) is not None}
    # A run has more than one item at once, so that few runs need not mean few threads.
    chosen["threads"] = max(chosen.get("threads", 0), DEFAULTS.threads)
    return PipelineExecutor(pipelines, RunOptions(**chosen))


def _requested_stop(ctx: Context) -> tuple[Stop, str]:
    """How to stop a run: in the way that its job was asked to end."""
    how = _STOPS.get(ctx.ended_as, Stop.CANCEL)
    if how is Stop.CANCEL and ctx.cancel.reason == STALE_MESSAGE:
        how = Stop.FAIL
    return how, ctx.cancel.reason


class RunResult(msgspec.Struct, frozen=True):
    """What a finished run's job returns."""

    status: PipelineJobStatus
    output: Any
    """What its last step that ran returned."""
    stages: dict[str, dict[str, Any]]
    errors: list[str]
    alerts: list[str]


async def _outcome(record: PipelineRecord, state: RunState, environment: Environment) -> Outcome:
    end = ENDS[record.status]
    errors = [f"{error.stage}: {error.message}" for error in record.errors]
    if end.state is not JobState.SUCCEEDED:
        message = "; ".join(errors[:5]) or f"the run ended {record.status}"
        code = record.errors[0].code if len(record.errors) == 1 and record.errors[0].code else None
        return Outcome(end.state, error_code=code or end.error_code, error_message=message)
    output = await environment.blobs.get(state.output) if state.output else b"null"
    result = RunResult(
        status=record.status,
        output=msgspec.Raw(output),
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


def _defaults(pipeline: Definition) -> TopicDefaults:
    unique = Unique(f"pipeline.{pipeline.name}") if pipeline.single_flight else None
    return TopicDefaults(
        timeout=pipeline.timeout or MAX_TIMEOUT,
        idempotent=pipeline.on_orphan is OnOrphan.RESUME,
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
