"""Pipelines in the engine: starting runs, and folding their records from jobs and rows.

A run is a canonical job; nothing else is stored of it. A run that ended without its runner
(cancelled while it waited, denied, lost) gets its hooks called here, once.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec.structs import replace

from penstock.core.errors import (
    IllegalMove,
    InvalidRequest,
    NotFound,
    NotPermitted,
    PipelineBusy,
    did_you_mean,
)
from penstock.core.job import IdSource, Job, JobRequest
from penstock.core.journal import Stride, Transition
from penstock.lifecycles.canonical import TERMINAL, JobEvent, JobState
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.blobs import Blobs
from penstock.ports.clock import Clock
from penstock.ports.engine_api import Moved, Progressed
from penstock.ports.shared_state import SharedState
from penstock.ports.store import JobQuery
from penstock.workloads.pipeline.breakers import load_breaker, load_breakers, reset, store_breaker
from penstock.workloads.pipeline.interface import MAX_PAGE, CancelAnswer, Pipelines, RunQuery
from penstock.workloads.pipeline.records import (
    TOPIC,
    Breaker,
    ItemRecord,
    PipelineEvent,
    PipelineEventKind,
    PipelineInfo,
    PipelineRecord,
    pipeline_of,
)
from penstock.workloads.pipeline.rows import (
    JOB_STATES,
    Outcomes,
    RunRows,
    emitted,
    fold,
    retried,
    status_of,
)
from penstock.workloads.pipeline.run_config import check_depth, check_fields, read_config
from penstock.workloads.pipeline.summary import ending_of, progress_of, stage_ending

if TYPE_CHECKING:
    from penstock.control.feed import Feed
    from penstock.control.gateway import Gateway
    from penstock.control.guard import Guard
    from penstock.control.ledger import Ledger
    from penstock.workloads.pipeline.executor import PipelineExecutor

log = logging.getLogger(__name__)

DECLARED = "pipeline/"
"""How the names begin that definitions of pipelines are kept under."""
_HOOKED = "pipeline-hooks/"
"""How the names begin that the ends of runs are kept under whose hooks were called here."""
_HOOK_WINDOW = 3600.0
"""Seconds after its end within which a restarted engine calls the hooks of a run."""
_RECENT = 200
"""Runs that a restarted engine looks at for that."""
_PAGE = 200
_FRESH = 1.0
"""Seconds for which a definition is cached: a worker may bring a newer one."""
_NOTHING_FAILED = "nothing failed in it, so there is nothing to run again"

_JOB_STATES = {
    **JOB_STATES,
    PipelineJobStatus.PARTIAL: (JobState.SUCCEEDED,),
    # A stale run is a job that was cancelled (`was_stale`).
    PipelineJobStatus.FAILED: (*JOB_STATES[PipelineJobStatus.FAILED], JobState.CANCELLED),
}


class RunStore(Protocol):
    """What is read of jobs to fold runs: a Ledger, or a reader of a store without an owner."""

    async def get(self, job_id: str) -> Job | None: ...
    async def find(self, query: JobQuery) -> list[Job]: ...
    async def read_steps(self, job_id: str, query: Any = None) -> Any: ...
    async def history(self, job_id: str) -> list[Transition]: ...


class RunReader:
    """Folds runs from jobs and their rows."""

    def __init__(self, jobs: RunStore, blobs: Blobs, shared: SharedState, clock: Clock) -> None:
        self._jobs, self._blobs, self._shared, self._clock = jobs, blobs, shared, clock
        self._known: dict[str, PipelineInfo] = {}
        self._known_since = float("-inf")

    # -- definitions --------------------------------------------------------------

    async def list(self) -> builtins.list[PipelineInfo]:
        found = await self._shared.read_all(DECLARED)
        return [msgspec.json.decode(value, type=PipelineInfo) for value in found.values()]

    async def show(self, name: str) -> PipelineInfo:
        info = await self.info(name)
        if info is None:
            nobody = "no worker serves a pipeline: start one with 'penstock up --app MODULE:APP'"
            hint = did_you_mean(name, self._known) or nobody
            raise NotFound(f"no pipeline {name!r}", hint=hint)
        return info

    async def info(self, name: str) -> PipelineInfo | None:
        now = self._clock.monotonic()
        if name not in self._known or now - self._known_since > _FRESH:
            self._known = {info.name: info for info in await self.list()}
            self._known_since = now
        return self._known.get(name)

    # -- runs ---------------------------------------------------------------------

    async def record(self, job: Job, config: dict[str, Any] | None = None) -> PipelineRecord:
        """`config` is what it was started with, where that is known."""
        job = await self._with_reason(job)
        rows = RunRows(self._jobs.read_steps, job.job_id)
        state, stages, at = await rows.head() if job.attempt else (None, (), None)
        info = await self.info(pipeline_of(job.request.topic) or "")
        retry_of = await retried(job.request, self._jobs.get)
        if config is None:
            config = await self.config(job)
        return fold(job, config, info, state, stages, at, retry_of=retry_of)

    async def _with_reason(self, job: Job) -> Job:
        """A cancelled job whose worker was gone ends with a word about the worker; its history
        has the reason that was given."""
        if job.state is not JobState.CANCELLED or not job.cancel_requested or job.result is None:
            return job
        for entry in await self._jobs.history(job.job_id):
            if entry.event is JobEvent.REQUEST_CANCEL and entry.reason:
                return replace(job, result=replace(job.result, error_message=entry.reason))
        return job

    async def latest(self, job: Job) -> PipelineRecord:
        """The record of a run whose job may have moved on."""
        return await self.record(await self._jobs.get(job.job_id) or job)

    async def config(self, job: Job) -> dict[str, Any]:
        """What a run was started with; nothing, if that is no config: no executor runs it."""
        try:
            return await self.checked_config(job)
        except InvalidRequest:
            return {}

    async def checked_config(self, job: Job) -> dict[str, Any]:
        pointer = job.request.context_ptr
        return read_config(await self._blobs.get(pointer) if pointer else b"")

    async def find(self, query: RunQuery) -> builtins.list[PipelineRecord]:
        topic = TOPIC + ("*" if query.pipeline is None else query.pipeline)
        states = tuple({s: None for status in query.statuses for s in _JOB_STATES[status]})
        found: list[PipelineRecord] = []
        asked = JobQuery(
            topic=topic,
            states=states,
            tenant=query.tenant,
            parent_job_id=query.retry_of,
            tries=True,
            limit=_PAGE,
        )
        if query.before is not None:
            at, job_id = query.before
            before = await self._jobs.get(job_id) if job_id else None
            place = {"accepted_to": at} if before is None else {"before": before.seq}
            asked = replace(asked, **place)
        while len(found) < query.limit:
            page = await self._jobs.find(asked)
            for job in page:
                if pipeline_of(job.request.topic) is None:
                    continue
                if query.statuses and status_of(await self._with_reason(job)) not in query.statuses:
                    continue
                found.append(await self.record(job))
                if len(found) == query.limit:
                    break
            if len(page) < _PAGE:
                break
            asked = replace(asked, before=page[-1].seq)
        return found

    async def items(
        self, record: PipelineRecord, stage: str, after: int, limit: int, outcomes: Outcomes
    ) -> builtins.list[ItemRecord]:
        known = record.stage(stage)
        if known is None:
            there = ", ".join(one.name for one in record.stages) or "none"
            raise NotFound(f"run {record.id} has no stage {stage!r}", hint=f"there are: {there}")
        rows = RunRows(self._jobs.read_steps, record.id)
        return await rows.items(known, after, limit, outcomes)

    # -- events -------------------------------------------------------------------

    async def event(self, job: Job, entry: Transition) -> PipelineEvent | None:
        """What an entry of a job's history says of its run."""
        found = await self._kind_and_data(job, entry)
        return None if found is None else PipelineEvent(entry.n, entry.job_id, entry.at, *found)

    async def _kind_and_data(
        self, job: Job, entry: Transition
    ) -> tuple[PipelineEventKind, dict[str, Any]] | None:
        if entry.event is JobEvent.START:
            name = pipeline_of(job.request.topic) or ""
            info = await self.info(name)
            stages = [] if info is None else [stage.name for stage in info.stages]
            return PipelineEventKind.JOB_START, {"pipeline": name, "stages": stages}
        if entry.event is not JobEvent.NOTE:
            if entry.after not in TERMINAL:
                return None
            return PipelineEventKind.JOB_COMPLETE, ending_of(await self.latest(job))
        if (own := emitted(entry.reason)) is not None:
            return PipelineEventKind.CUSTOM, own
        word, name, _ = f"{entry.reason}  ".split(" ", 2)
        if word not in ("stage_start", "stage_complete"):
            return None
        stage = (await self.latest(job)).stage(name)
        if stage is None:
            return None
        if word == "stage_start":
            return PipelineEventKind.STAGE_START, {"stage": name, "index": stage.index}
        return PipelineEventKind.STAGE_COMPLETE, stage_ending(stage)

    async def events(self, job: Job, after: int = 0) -> AsyncIterator[PipelineEvent]:
        """What happened so far."""
        for entry in await self._jobs.history(job.job_id):
            if entry.n > after and (event := await self.event(job, entry)) is not None:
                yield event

    async def breakers(self) -> builtins.list[Breaker]:
        return await load_breakers(self._shared)


class PipelineService:
    """What all callers share; it calls the hooks of runs that end without their runner."""

    def __init__(
        self,
        jobs: Ledger,
        gateway: Gateway,
        blobs: Blobs,
        shared: SharedState,
        clock: Clock,
        *,
        executors: Sequence[PipelineExecutor] = (),
        ids: IdSource | None = None,
    ) -> None:
        """`executors` know the pipelines of this process: the defaults of their configs, and the
        hooks to call for a run that ends without its runner."""
        self.reader = RunReader(jobs, blobs, shared, clock)
        self.jobs, self.gateway, self.blobs, self.shared = jobs, gateway, blobs, shared
        self.clock, self.executors, self.ids = clock, executors, ids or IdSource()
        self._ended: asyncio.Queue[str] = asyncio.Queue()
        self._forgot_at = float("-inf")

    # -- hooks of runs without a runner -------------------------------------------

    def hear(self, strides: Sequence[Stride]) -> None:
        """Listen to the ledger for runs that have ended."""
        for stride in strides:
            if stride.path.after in TERMINAL:
                for job in stride.jobs:
                    if any(one.has_hooks(job.request.topic) for one in self.executors):
                        self._ended.put_nowait(job.job_id)

    async def restore(self) -> None:
        """Call hooks that an engine before this one did not get to."""
        since = self.clock.now() - _HOOK_WINDOW
        await self._forget_called(since)
        for executor in self.executors:
            for topic in filter(executor.has_hooks, executor.topics):
                query = JobQuery(topic=topic, states=tuple(TERMINAL), tries=True, limit=_RECENT)
                for job in await self.jobs.find(query):
                    if (job.finished_at or 0.0) >= since:
                        self._ended.put_nowait(job.job_id)

    async def _forget_called(self, before: float) -> None:
        """Drop the marks of hooks that no restarted engine would call again."""
        for name, at in (await self.shared.read_all(_HOOKED)).items():
            if float(at) < before:
                await self.shared.write(name, None)
        self._forgot_at = self.clock.now()

    async def run(self) -> None:
        """Call hooks until cancelled, one run after the other."""
        while True:
            job_id = await self._ended.get()
            try:
                await self._call_hooks(job_id)
            except Exception:
                log.exception("the hooks of run %s were not called", job_id)

    async def _call_hooks(self, job_id: str) -> None:
        state, _, _ = await RunRows(self.jobs.read_steps, job_id).head()
        job = await self.jobs.get(job_id)
        called = state is not None and state.hooks_called
        if job is None or called or await self.shared.read(_HOOKED + job_id) is not None:
            return
        record = await self.reader.record(job)
        for executor in self.executors:
            await executor.call_hooks(record)
        now = self.clock.now()
        await self.shared.write(_HOOKED + job_id, str(now).encode())
        if self._forgot_at < now - _HOOK_WINDOW:
            await self._forget_called(now - _HOOK_WINDOW)


class PipelineApi:
    """`Pipelines`, for one caller and within their rights."""

    def __init__(self, service: PipelineService, guard: Guard, feed: Feed) -> None:
        self._service, self._guard, self._feed = service, guard, feed
        self._reader, self._jobs, self._gateway = service.reader, service.jobs, service.gateway

    async def list(self) -> builtins.list[PipelineInfo]:
        return await self._reader.list()

    async def show(self, name: str) -> PipelineInfo:
        return await self._reader.show(name)

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
        with self._guard.doing(Pipelines.start, name):
            mine = self._mine(tenant)
            if old is not None and old.request.tenant != mine:
                raise NotFound(f"no run {retry_of!r} of tenant {mine!r}", hint="name its tenant")
            info, given = await self._reader.show(name), config or {}
            check_depth(given)
            check_fields("config", given, info.config_schema)
            for executor in self._service.executors:
                given = executor.plain_config(info.topic, given)
            wanted = JobRequest(
                job_id=self._service.ids.next(self._service.clock.now()),
                topic=info.topic,
                context_ptr=await self._service.blobs.put(msgspec.json.encode(given)),
                tenant=mine,
                idempotency_key=idempotency_key,
                parent_job_id=retry_of,
            )
            job = (await self._gateway.submit([wanted], by=self._guard.by, fresh=True))[0]
            if job.job_id == wanted.job_id:
                return await self._reader.record(job, given)
            if idempotency_key is None or job.request.idempotency_key != idempotency_key:
                raise PipelineBusy(
                    f"pipeline {name} runs once at a time, and job {job.job_id} is {job.state}",
                    running=job.job_id,
                    hint="wait for it, or cancel it",
                )
            return await self._reader.record(job)

    def _mine(self, tenant: str) -> str:
        meant = self._guard.tenant(tenant)
        if not self._guard.caller.sees(meant):
            raise NotPermitted(
                f"tenant: {self._guard.by} may not start a run for {tenant!r}",
                hint="leave it out: the key says whose it is",
            )
        return meant

    async def get(self, job_id: str) -> PipelineRecord:
        return await self._reader.record(await self._job(job_id))

    async def runs(self, query: RunQuery) -> builtins.list[PipelineRecord]:
        mine = self._guard.caller.tenant
        if mine is not None:
            if query.tenant not in (None, mine):
                return []
            query = replace(query, tenant=mine)
        _check_limit(query.limit)
        return await self._reader.find(query)

    async def items(
        self, job_id: str, stage: str, *, after: int = -1, limit: int = 100, outcomes: Outcomes = ()
    ) -> builtins.list[ItemRecord]:
        _check_limit(limit)
        record = await self.get(job_id)
        return await self._reader.items(record, stage, after, limit, outcomes)

    async def cancel(self, job_id: str, *, reason: str = "", timeout: float = 10.0) -> CancelAnswer:
        before = await self.get(job_id)
        with self._guard.doing(Pipelines.cancel, job_id, detail=reason):
            if before.is_final:
                return CancelAnswer(False, before.status, f"it has ended {before.status}")
            by = self._guard.by
            job = await self._gateway.cancel(job_id, reason=reason, children=True, by=by)
        if not job.is_final and timeout > 0:
            with suppress(TimeoutError):  # the answer says that it still runs
                async with asyncio.timeout(timeout):
                    await self._feed.ended(job_id)
        after = await self.get(job_id)
        if after.is_final and after.status is not PipelineJobStatus.CANCELLED:
            return CancelAnswer(False, after.status, f"it ended {after.status} first")
        return CancelAnswer(True, after.status)

    async def retry_failed(self, job_id: str) -> PipelineRecord:
        job = await self._job(job_id)
        record = await self._reader.record(job)
        self._guard.require(Pipelines.retry_failed)
        if not record.is_final:
            raise IllegalMove("pipeline job", record.status, "retry_failed")
        if not record.left_undone:
            raise InvalidRequest("job_id", _NOTHING_FAILED)
        config = await self._reader.checked_config(job)
        return await self.start(record.pipeline, config, tenant=record.tenant, retry_of=record.id)

    async def stream(self, job_id: str, after: int = 0) -> AsyncIterator[PipelineEvent]:
        job = await self._job(job_id)
        async with aclosing(self._feed.follow(job_id, None, after)) as updates:
            async for update in updates:
                if isinstance(update, Moved):
                    event = await self._reader.event(job, update.transition)
                    if event is not None:
                        yield event
                elif isinstance(update, Progressed):
                    yield await self._progress(job, update)

    async def _progress(self, job: Job, update: Progressed) -> PipelineEvent:
        record = await self._reader.latest(job)
        stage = record.stage(record.current_stage or "")
        data = {"fraction": update.fraction, "message": update.message}
        if stage is not None:
            data |= progress_of(stage)
        kind = PipelineEventKind.STAGE_PROGRESS
        return PipelineEvent(None, job.job_id, self._service.clock.now(), kind, data)

    async def breakers(self) -> builtins.list[Breaker]:
        self._guard.require(Pipelines.breakers)
        return await self._reader.breakers()

    async def reset_breaker(self, name: str) -> Breaker:
        with self._guard.doing(Pipelines.reset_breaker, name):
            shared = self._service.shared
            while True:
                breaker = await load_breaker(shared, name)
                if breaker is None:
                    there = ", ".join(b.name for b in await load_breakers(shared)) or "none"
                    raise NotFound(f"no breaker {name!r}", hint=f"there are: {there}")
                closed = reset(breaker)
                if await store_breaker(shared, closed):
                    return closed

    async def _job(self, job_id: str) -> Job:
        job = self._guard.shown(await self._jobs.get(job_id), job_id)
        if pipeline_of(job.request.topic) is None:
            raise NotFound(
                f"job {job_id} is not a run of a pipeline", hint="'penstock show' says what it is"
            )
        return job


def _check_limit(limit: int) -> None:
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequest("limit", f"must be between 1 and {MAX_PAGE}")
