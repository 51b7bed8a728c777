"""Pipelines in the engine: canonical jobs with a record of their own.

A run's record is made when its job is accepted and closed when its job has ended, by hearing
of both from the job store. Neither is part of those commits; what a crash leaves undone is made
good at the next start. In between, whoever runs the job writes the record.
"""

from __future__ import annotations

import asyncio
import builtins
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from penstock.core.errors import (
    IllegalMove,
    InvalidRequest,
    NotFound,
    NotPermitted,
    PenstockError,
    PipelineBusy,
    did_you_mean,
)
from penstock.core.job import IdSource, Job, JobRequest
from penstock.core.journal import Stride
from penstock.lifecycles.canonical import TERMINAL, JobState
from penstock.lifecycles.pipeline import PIPELINE, PipelineJobEvent, PipelineJobStatus
from penstock.ports.blobs import Blobs
from penstock.ports.clock import Clock
from penstock.ports.engine_api import KeyRole
from penstock.workloads.pipeline.breaker_rules import reset
from penstock.workloads.pipeline.records import (
    STALE_AFTER,
    STALE_MESSAGE,
    Breaker,
    ItemOutcome,
    ItemRecord,
    PipelineEvent,
    PipelineEventKind,
    PipelineInfo,
    PipelineRecord,
    first_record,
    pipeline_of,
)
from penstock.workloads.pipeline.run_config import check_depth, check_fields, read_config
from penstock.workloads.pipeline.store import (
    CancelAnswer,
    Claim,
    Happening,
    PipelineStore,
    RunQuery,
    Save,
)
from penstock.workloads.pipeline.store_rules import CANCELLED, WAS_CANCELLED, ended_alone
from penstock.workloads.pipeline.summary import ending_of

if TYPE_CHECKING:
    from penstock.control.feed import Feed
    from penstock.control.gateway import Gateway
    from penstock.control.guard import Guard
    from penstock.control.ledger import Ledger
    from penstock.control.store_retry import Retry
    from penstock.workloads.pipeline.executor import PipelineExecutor

log = logging.getLogger(__name__)

_PAGE = 500
_SWEEP = 60.0
"""Seconds between looks at records that should have ended."""
_FRESH = 1.0
"""Seconds for which a definition is known by heart: a worker may bring a newer one."""
_TRIES = 3
_NOTHING_FAILED = "nothing failed in it, so there is nothing to run again"


class PipelineService:
    """Starts runs and keeps their records in step with their jobs. It checks no rights."""

    def __init__(
        self,
        runs: PipelineStore,
        jobs: Ledger,
        gateway: Gateway,
        blobs: Blobs,
        clock: Clock,
        retry: Retry,
        *,
        executors: Sequence[PipelineExecutor] = (),
        ids: IdSource | None = None,
    ) -> None:
        """`executors` know the pipelines of this process: the defaults of their configs, and the
        hooks to call for a run that ends without its runner."""
        self.runs = runs
        self._jobs, self._gateway, self._blobs, self._clock = jobs, gateway, blobs, clock
        self._executors = executors
        self._ids = ids or IdSource()
        self._settling = asyncio.Lock()
        self._ended: asyncio.Queue[PipelineRecord] = asyncio.Queue()
        self._news: asyncio.Queue[Job] = asyncio.Queue()
        self._retry = retry
        self._readers: dict[str, set[asyncio.Event]] = {}
        self._known: dict[str, PipelineInfo] = {}
        self._known_since = 0.0
        self._stop_listening = runs.listen(self._wake)

    # -- in step with jobs --------------------------------------------------------

    def hear(self, strides: Sequence[Stride]) -> None:
        """Listen to the ledger: what was accepted, and what has ended."""
        for stride in strides:
            if stride.path.before is None or stride.path.after in TERMINAL:
                for job in stride.jobs:
                    if pipeline_of(job.request.topic) is not None:
                        self._news.put_nowait(job)

    async def restore(self) -> None:
        """Close the records of runs whose jobs have ended: what a crash left undone."""
        for record in await self.runs.unfinished():
            try:
                job = await self._jobs.get(record.id)
                if (job is None and not self._is_held(record)) or (job and job.is_final):
                    await self._settle(record.id, job)
            except Exception:  # one record must not keep the engine from starting
                log.exception("the record of run %s can't be closed", record.id)

    def _is_held(self, record: PipelineRecord) -> bool:
        """Whether a run without a job is a `PipelineJobManager`'s, on the same file: held by a
        lease, and to be resumed by the next manager when that is over. Only when nothing has
        become of it for as long as the seed allows is it given up."""
        if record.lease_until is None:
            return False
        moved = max(record.created_at, record.started_at or 0.0, record.progress_at or 0.0)
        return max(record.lease_until, moved + STALE_AFTER) > self._clock.now()

    async def run(self) -> None:
        """Keep the records in step until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(self._sweep(), name="penstock pipelines")
            tasks.create_task(self._call_hooks())

    async def _call_hooks(self) -> None:
        """Tell of runs that were ended here, one after the other: there is no runner who would."""
        while True:
            record = await self._ended.get()
            try:
                for executor in self._executors:
                    await executor.call_hooks(record)
            except Exception:
                log.exception("a hook of run %s failed", record.id)

    async def _sweep(self) -> None:
        """Now and then: see to what could not be written when it happened."""
        while True:
            await self._clock.sleep(_SWEEP)
            try:
                await self.restore()
            except Exception:  # the next look may do better, and there must be one
                log.exception("can't look after the records of runs")

    async def _follow(self) -> None:
        while True:
            job = await self._news.get()
            try:
                await self._retry(
                    f"keep the record of run {job.job_id}", partial(self._keep_up, job)
                )
            except PenstockError as error:
                log.error("the record of run %s can't be kept: %s", job.job_id, error)
            except Exception:  # no job may end the engine, whatever it was submitted with
                log.exception("the record of run %s can't be kept", job.job_id)

    async def _keep_up(self, job: Job) -> None:
        """See that a job's record is there, and that it has ended if the job has."""
        seen = await self.runs.glance(job.job_id)
        if seen is None or (job.is_final and not PIPELINE.is_final(seen.status)):
            record = await self.ensure(job)
            if job.is_final and not record.is_final:
                await self._settle(job.job_id, job)

    async def ensure(self, job: Job, config: dict[str, Any] | None = None) -> PipelineRecord:
        """The record of a job, made if it is not there yet. Raises if its config is out of reach:
        then whoever runs the job makes its record, or its end does."""
        record = await self.runs.get(job.job_id)
        if record is not None:
            return record
        request = job.request
        parent = request.parent_job_id
        before = await self.runs.get(parent) if parent is not None else None
        if config is None:
            config = await self._recorded_config(job)
        return await self.runs.create(first_record(request, config, job.accepted_at, before))

    async def _recorded_config(self, job: Job) -> dict[str, Any]:
        """The config for the record. One that can't be decoded is left out: no executor runs a
        job with it, so the record ends FAILED as its job does."""
        try:
            payload = await self._payload(job)
        except PenstockError:
            if not job.is_final:
                raise
            return {}
        try:
            return read_config(payload)
        except InvalidRequest:
            return {}

    async def config_of(self, job: Job) -> dict[str, Any]:
        """What a run's job was submitted with. Raises InvalidRequest if that is no config."""
        return read_config(await self._payload(job))

    async def _payload(self, job: Job) -> bytes:
        pointer = job.request.context_ptr
        return await self._blobs.get(pointer) if pointer else b""

    async def _settle(self, job_id: str, job: Job | None) -> None:
        """Close the record of a run whose job has ended without its word."""
        async with self._settling:  # or two would be in each other's way
            for _ in range(_TRIES):  # a runner that was taken for lost may still be writing
                record = await self.runs.get(job_id)
                if record is None or record.is_final:
                    return
                if await self._close(record, job):
                    break
            else:
                return  # the next sweep tries again
        ended = await self.runs.get(job_id)
        if ended is not None:
            self._ended.put_nowait(ended)

    async def _close(self, record: PipelineRecord, job: Job | None) -> bool:
        """Whether it was ended by this."""
        now = self._clock.now()
        if job is None or job.state is not JobState.CANCELLED:
            return await self.runs.fail_stale(record.id, now, _why(job), record.version)
        answer = await self.runs.request_cancel(record.id, now)
        if PIPELINE.is_final(answer.status):
            return answer.accepted
        return await self._close_cancelled(record, _cancelled(job), now)

    async def _close_cancelled(self, record: PipelineRecord, reason: str, now: float) -> bool:
        """The worker of a cancelled run is gone: say in its stead that it has stopped."""
        claim = Claim(job_id=record.id, owner="reconciler", now=now, fence=record.fence + 1)
        mine = await self.runs.claim(claim)
        if mine is None:
            return False
        info = next((one for one in await self.list() if one.name == mine.pipeline), None)
        ended = ended_alone(
            replace(mine, status=PipelineJobStatus.CANCELLED, finished_at=now),
            info,
            reason,
            CANCELLED,
        )
        await self.runs.save(
            Save(
                job_id=record.id,
                fence=mine.fence,
                at=now,
                event=PipelineJobEvent.CANCEL,
                cancel_effective=True,
                stages=ended.stages,
                errors=ended.errors,
                alerts=ended.alerts,
                summary=ended.summary or UNSET,
                happened=(Happening(PipelineEventKind.JOB_COMPLETE, ending_of(ended)),),
            )
        )
        return True

    # -- asked by callers ---------------------------------------------------------

    async def list(self) -> builtins.list[PipelineInfo]:
        return sorted(await self.runs.declared(), key=lambda info: info.name)

    async def show(self, name: str) -> PipelineInfo:
        now = self._clock.monotonic()
        if name not in self._known or now - self._known_since > _FRESH:
            self._known = {info.name: info for info in await self.list()}
            self._known_since = now
        known = self._known
        if name in known:
            return known[name]
        raise NotFound(f"no pipeline {name!r}", hint=did_you_mean(name, known))

    async def start(
        self,
        name: str,
        config: dict[str, Any],
        *,
        by: str,
        tenant: str,
        idempotency_key: str | None = None,
        retry_of: str | None = None,
    ) -> PipelineRecord:
        info = await self.show(name)
        check_depth(config)
        check_fields("config", config, info.config_schema)
        for executor in self._executors:
            config = executor.plain_config(info.topic, config)
        payload = msgspec.json.encode(config)
        wanted = JobRequest(
            job_id=self._ids.next(self._clock.now()),
            topic=info.topic,
            context_ptr=await self._blobs.put(payload),
            tenant=tenant,
            idempotency_key=idempotency_key,
            parent_job_id=retry_of,
        )
        job = (await self._gateway.submit([wanted], by=by))[0]
        is_repeat = idempotency_key is not None and job.request.idempotency_key == idempotency_key
        if job.job_id != wanted.job_id and not is_repeat:
            raise PipelineBusy(
                f"pipeline {name} runs once at a time, and job {job.job_id} is {job.state}",
                running=job.job_id,
                hint="wait for it, or cancel it",
            )
        return await self.ensure(job, config if job.job_id == wanted.job_id else None)

    async def get(self, job: Job) -> PipelineRecord:
        """The record as it is; what its job alone knows is added."""
        record = await self.ensure(job)
        if job.is_final and not record.is_final:
            await self._settle(job.job_id, job)
            record = await self.ensure(job)
        asked = record.cancel_requested or job.cancel_requested
        return (
            record if asked is record.cancel_requested else replace(record, cancel_requested=asked)
        )

    async def find(self, query: RunQuery) -> builtins.list[PipelineRecord]:
        return await self.runs.find(query)

    async def items(
        self,
        record: PipelineRecord,
        stage: str,
        after: int,
        limit: int,
        outcomes: Iterable[ItemOutcome],
    ) -> builtins.list[ItemRecord]:
        found = await self.runs.items(
            record.id, stage, after=after, limit=limit, outcomes=tuple(outcomes)
        )
        if not found and record.stage(stage) is None:
            names = [info.name for info in (await self.show(record.pipeline)).stages]
            if stage not in names:
                raise NotFound(
                    f"pipeline {record.pipeline} has no stage {stage!r}",
                    hint=f"there are: {', '.join(names)}",
                )
        return found

    async def request_cancel(self, job_id: str) -> CancelAnswer:
        """Mark the run; its job is to be cancelled, too."""
        seen = await self.runs.glance(job_id)
        if seen is None or seen.status is PipelineJobStatus.PENDING:
            # Its job decides: it may be starting at this very moment.
            return CancelAnswer(True, PipelineJobStatus.PENDING)
        return await self.runs.request_cancel(job_id, self._clock.now())

    def check_retry(self, record: PipelineRecord) -> None:
        """Whether a run has ended, and left something to run again."""
        if not record.is_final:
            raise IllegalMove("pipeline job", record.status, "retry_failed")
        if not record.left_undone:
            raise InvalidRequest("job_id", _NOTHING_FAILED)

    async def stream(self, job_id: str, after: int = 0) -> AsyncGenerator[PipelineEvent]:
        """Events as they are committed, each once, until the last."""
        woken = asyncio.Event()
        self._readers.setdefault(job_id, set()).add(woken)
        try:
            while True:
                woken.clear()
                ended = await self._has_ended(job_id)
                events = await self.runs.events(job_id, after, _PAGE)
                for event in events:
                    after = event.id
                    yield event
                    if event.kind is PipelineEventKind.JOB_COMPLETE:
                        return
                if events:
                    continue
                if ended:
                    return
                await woken.wait()
        finally:
            readers = self._readers.get(job_id, set())
            readers.discard(woken)
            if not readers:
                self._readers.pop(job_id, None)

    async def _has_ended(self, job_id: str) -> bool:
        seen = await self.runs.glance(job_id)
        return seen is None or PIPELINE.is_final(seen.status)

    def _wake(self, job_ids: Sequence[str]) -> None:
        if self._readers:
            for job_id in job_ids:
                for woken in self._readers.get(job_id, ()):
                    woken.set()

    # -- clean-up -----------------------------------------------------------------

    def needs_since(self) -> float:
        """No job is needed any longer because of its run's record."""
        return float("inf")

    async def prune(self, before: float) -> None:
        """Delete the records of runs that ended before a time, in small commits."""
        while await self.runs.prune(before, _PAGE) >= _PAGE:
            pass

    async def pointers(self) -> builtins.list[str]:
        """Blobs that the records refer to."""
        return await self.runs.pointers()

    # -- breakers -----------------------------------------------------------------

    async def reset_breaker(self, name: str) -> Breaker:
        while True:
            breaker = await self.runs.breaker(name)
            if breaker is None:
                there = ", ".join(b.name for b in await self.runs.breakers()) or "none"
                raise NotFound(f"no breaker {name!r}", hint=f"there are: {there}")
            closed = reset(breaker)
            if await self.runs.put_breaker(closed):
                return closed


def _cancelled(job: Job) -> str:
    return (job.result.error_message if job.result is not None else None) or WAS_CANCELLED


def _why(job: Job | None) -> str:
    """The seed's words where nobody came back to a job; else what its job ended with."""
    if job is None or job.state is JobState.TIMEOUT or job.result is None:
        return STALE_MESSAGE
    return job.result.error_message or f"its job ended {job.state}"


MAX_PAGE = 1000


class PipelineApi:
    """`penstock.workloads.pipeline.store.Pipelines`, for one caller and within their rights."""

    def __init__(
        self, service: PipelineService, guard: Guard, store: Ledger, gateway: Gateway, feed: Feed
    ) -> None:
        self._service, self._guard, self._store = service, guard, store
        self._gateway, self._feed = gateway, feed

    async def list(self) -> builtins.list[PipelineInfo]:
        return await self._service.list()

    async def show(self, name: str) -> PipelineInfo:
        return await self._service.show(name)

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
            return await self._service.start(
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
        return await self._service.get(await self._job(job_id))

    async def runs(self, query: RunQuery) -> builtins.list[PipelineRecord]:
        mine = self._guard.caller.tenant
        if mine is not None:
            if query.tenant not in (None, mine):
                return []
            query = replace(query, tenant=mine)
        if not 1 <= query.limit <= MAX_PAGE:
            raise InvalidRequest("limit", f"must be between 1 and {MAX_PAGE}")
        return await self._service.find(query)

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
        return await self._service.items(record, stage, after, limit, outcomes)

    async def cancel(self, job_id: str, *, reason: str = "", timeout: float = 10.0) -> CancelAnswer:
        before = await self.get(job_id)
        with self._guard.doing("pipeline.cancel", job_id, role=KeyRole.SUBMIT, detail=reason):
            if before.is_final:
                return CancelAnswer(False, before.status, f"it has ended {before.status}")
            answer = await self._service.request_cancel(job_id)
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
        record = await self._service.get(job)
        self._guard.require(KeyRole.SUBMIT, "pipeline.retry_failed")
        self._service.check_retry(record)
        # Of the job: a record whose config could not be read has none.
        config = record.config or await self._service.config_of(job)
        return await self.start(record.pipeline, config, tenant=record.tenant, retry_of=record.id)

    async def stream(self, job_id: str, after: int = 0) -> AsyncIterator[PipelineEvent]:
        await self.get(job_id)
        async with aclosing(self._service.stream(job_id, after)) as events:
            async for event in events:
                yield event

    async def breakers(self) -> builtins.list[Breaker]:
        self._guard.require(KeyRole.OPERATE, "breakers.list")
        return sorted(await self._service.runs.breakers(), key=lambda breaker: breaker.name)

    async def reset_breaker(self, name: str) -> Breaker:
        with self._guard.doing("breaker.reset", name, role=None):
            self._guard.require_everywhere(KeyRole.OPERATE, "breaker.reset")
            return await self._service.reset_breaker(name)

    async def _job(self, job_id: str) -> Job:
        job = self._guard.shown(await self._store.get(job_id), job_id)
        if pipeline_of(job.request.topic) is None:
            raise NotFound(
                f"job {job_id} is not a run of a pipeline", hint="'penstock show' tells what it is"
            )
        return job
