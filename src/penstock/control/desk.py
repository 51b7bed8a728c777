"""The engine's own Desk: what its services can tell and do, for one caller.

Every question passes the caller's `Guard`: what they may not do is refused, and what is not
theirs is not there.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from penstock.control.approvals import ApprovalBox
from penstock.control.backlog import Lane
from penstock.control.batch_counter import BatchesCounter
from penstock.control.batches import BatchKeeper, Uploading
from penstock.control.board import Board
from penstock.control.counters import (
    ApprovalsCounter,
    AuditCounter,
    KeysCounter,
    LimitsCounter,
    PolicyCounter,
    SchedulesCounter,
)
from penstock.control.feed import Feed
from penstock.control.gateway import Gateway, check_batch
from penstock.control.guard import Guard
from penstock.control.journal import JournalHub
from penstock.control.keys import KeyRing
from penstock.control.limit_book import LimitKeeper
from penstock.control.pipeline_counter import PipelinesCounter
from penstock.control.pipelines import PipelineKeeper
from penstock.control.placement import paused_everywhere, why_waiting
from penstock.control.policy_desk import PolicyDesk
from penstock.control.pools import PoolKeeper
from penstock.control.pruner import Pruner
from penstock.control.rulebook import Rulebook
from penstock.control.safety import SafetyKernel
from penstock.control.schedules import ScheduleKeeper
from penstock.control.uploads import Uploads
from penstock.core.caller import OWNER, Caller, KeyRole
from penstock.core.errors import WaitTimedOut
from penstock.core.job import Job, JobRequest
from penstock.core.pipes import PipesView, merged, told_in
from penstock.core.policy import ready_at
from penstock.core.transition import Transition
from penstock.lifecycles.canonical import JobState
from penstock.ports.blobs import Blobs, BlobStat
from penstock.ports.clock import Clock
from penstock.ports.desk import (
    Bulk,
    Cancellation,
    Cleaned,
    EngineStatus,
    EventBatch,
    JobUpdate,
    Logged,
    PoolView,
    WorkerView,
)
from penstock.ports.store import JobQuery, LogLine, Store, Verified

_BATCH = 100_000


@dataclass(frozen=True)
class Services:
    """What a Desk needs of the engine behind it."""

    store: Store
    blobs: Blobs
    board: Board
    gateway: Gateway
    approvals: ApprovalBox
    feed: Feed
    hub: JournalHub
    pruner: Pruner
    kernel: SafetyKernel
    rulebook: Rulebook
    policy: PolicyDesk
    schedules: ScheduleKeeper
    limits: LimitKeeper
    pools: PoolKeeper
    keys: KeyRing
    pipelines: PipelineKeeper
    batches: BatchKeeper
    uploading: Uploading
    clock: Clock
    about: EngineStatus


class EngineDesk:
    """See `penstock.ports.desk.Desk`."""

    def __init__(self, services: Services, caller: Caller = OWNER) -> None:
        self._services = services
        self._store, self._blobs, self._board = services.store, services.blobs, services.board
        self._gateway, self._feed, self._clock = services.gateway, services.feed, services.clock
        self._guard = guard = Guard(caller, services.store, services.clock)
        self._uploads = Uploads(
            services.store, services.clock, caller.tenant, services.pipelines.runs
        )
        self.approvals = ApprovalsCounter(services.approvals, guard, services.store)
        self.policy = PolicyCounter(services.policy, guard, services.store)
        self.schedules = SchedulesCounter(services.schedules, guard, self._uploads)
        self.limits = LimitsCounter(services.limits, guard)
        self.keys = KeysCounter(services.keys, guard)
        self.audit = AuditCounter(guard, services.store)
        self.pipelines = PipelinesCounter(
            services.pipelines, guard, services.store, services.gateway, services.feed
        )
        self.batches = BatchesCounter(services.batches, services.uploading, guard)

    @property
    def guard(self) -> Guard:
        return self._guard

    def serving(self, caller: Caller) -> EngineDesk:
        """The same engine, for somebody else."""
        return EngineDesk(self._services, caller)

    # -- jobs ---------------------------------------------------------------------

    async def submit(self, requests: Sequence[JobRequest]) -> list[Job]:
        guard = self._guard
        guard.require(KeyRole.SUBMIT, "job.submit")
        check_batch(requests, _BATCH)
        if guard.caller.tenant is not None:
            requests = [guard.stamped(request) for request in requests]
            for request in requests:
                await self._uploads.check(request.context_ptr)
        return await self._gateway.submit(requests, by=guard.by)

    async def get(self, job_id: str) -> Job:
        return self._guard.shown(await self._store.get(job_id), job_id)

    async def find(self, query: JobQuery) -> list[Job]:
        mine = self._guard.narrowed(query)
        return [] if mine is None else await self._store.find(mine)

    async def history(self, job_id: str) -> list[Transition]:
        await self.get(job_id)
        return await self._store.history(job_id)

    async def why(self, job_id: str) -> str:
        job = await self.get(job_id)
        match job.state:
            case JobState.PENDING | JobState.SCHEDULED:
                return self._why_waiting(job)
            case JobState.DISPATCHED | JobState.RUNNING:
                return self._what_happens(job)
            case _:
                return _how_it_ended(job)

    def _why_waiting(self, job: Job) -> str:
        if (doubt := self._board.doubtful.get(job.seq)) is not None:
            return f"it is parked: {doubt}"
        now = self._clock.now()
        if (held_back := self._board.why(job, now)) is not None:
            return held_back
        start = ready_at(job.request, job.accepted_at)
        if start > now:
            kind = "its retry is backed off" if job.request.retry_number else "it is delayed"
            return f"{kind}: it may start in {start - now:.1f} s"
        roster = self._board.roster
        return why_waiting(Lane.of(job), roster.workers.values(), roster.pools, roster.paused)

    def _what_happens(self, job: Job) -> str:
        if (lost := self._board.adrift.get(job.job_id)) is not None:
            roster = self._board.roster
            next_up = why_waiting(
                Lane.of(job), roster.workers.values(), roster.pools, roster.paused
            )
            return f"{lost}; attempt {job.attempt + 1} waits: {next_up}"
        doing = "runs it" if job.state is JobState.RUNNING else "has it and is about to start it"
        said = f"worker {job.worker_id} {doing} (attempt {job.attempt})"
        if (progress := self._feed.progress_of(job.job_id)) is not None:
            share = "" if progress.fraction is None else f"{progress.fraction:.0%} "
            said += f": {share}{progress.message}".rstrip()
        return said + ("; it was asked to end" if job.cancel_requested else "")

    async def wait(self, job_id: str, timeout: float | None = None) -> Job:
        try:
            async with asyncio.timeout(timeout):
                return await self._final(job_id)
        except TimeoutError:
            job = await self.get(job_id)
            raise WaitTimedOut(
                f"job {job_id} is still {job.state} after {timeout:g} s",
                hint="it goes on; ask again later, or cancel it",
            ) from None

    async def _final(self, job_id: str) -> Job:
        await self.get(job_id)  # it must be there, and the caller's to see
        job = await self._feed.ended(job_id)
        while job.successor is not None:
            job = await self._feed.ended(job.successor)
        return job

    async def read_log(self, job_id: str, after: int = 0, limit: int = 1000) -> list[LogLine]:
        await self.get(job_id)
        return await self._store.read_log(job_id, after, limit)

    async def follow(self, job_id: str, after_log: int | None = 0) -> AsyncIterator[JobUpdate]:
        await self.get(job_id)
        with self._feed.reading(job_id) as updates:
            ended = (await self.get(job_id)).is_final
            update: JobUpdate | None = None
            while True:
                if update is None or isinstance(update, Logged):
                    if after_log is not None:
                        async for line in self._new_lines(job_id, after_log):
                            after_log = line.n
                            yield Logged(line)
                else:
                    yield update
                if ended:
                    return
                update = await updates.get()
                ended = update is None

    async def _new_lines(self, job_id: str, after: int) -> AsyncIterator[LogLine]:
        await self._store.apply([])  # lines ride with a commit: see this one through
        while lines := await self._store.read_log(job_id, after):
            for line in lines:
                yield line
            after = lines[-1].n

    async def cancel(
        self, job_id: str, *, reason: str = "", children: bool = False, timeout: float = 10.0
    ) -> Cancellation:
        await self.get(job_id)
        with self._guard.doing("job.cancel", job_id, role=KeyRole.SUBMIT, detail=reason):
            job = await self._gateway.cancel(
                job_id, reason=reason, children=children, by=self._guard.by
            )
        if not job.is_final and timeout > 0:
            try:
                async with asyncio.timeout(timeout):
                    job = await self._feed.ended(job.job_id)
            except TimeoutError:
                job = await self.get(job.job_id)
        return Cancellation(job, job.is_final)

    async def retry(self, job_id: str) -> Job:
        await self.get(job_id)
        with self._guard.doing("job.retry", job_id, role=KeyRole.SUBMIT):
            return await self._gateway.retry(job_id, by=self._guard.by)

    async def cancel_many(self, query: JobQuery, *, reason: str = "") -> Bulk:
        with self._guard.doing("jobs.cancel", role=KeyRole.OPERATE, detail=_said(query)):
            mine = self._guard.narrowed(query)
            if mine is None:
                return Bulk(0, 0)
            return await self._gateway.cancel_many(mine, reason=reason, by=self._guard.by)

    async def retry_many(self, query: JobQuery) -> Bulk:
        with self._guard.doing("jobs.retry", role=KeyRole.OPERATE, detail=_said(query)):
            mine = self._guard.narrowed(query)
            if mine is None:
                return Bulk(0, 0)
            return await self._gateway.retry_many(mine, by=self._guard.by)

    def events(self, after: int | None = None) -> AsyncIterator[EventBatch]:
        return self._services.hub.events(after, self._guard.caller.tenant)

    # -- the engine ---------------------------------------------------------------

    async def topics(self) -> list[str]:
        return sorted({t for w in self._board.roster.workers.values() for t in w.topics})

    async def workers(self) -> list[WorkerView]:
        self._guard.require(KeyRole.OPERATE, "workers.list")
        monotonic = self._clock.monotonic()
        return [
            WorkerView(
                worker_id=w.worker_id,
                pool=w.pool,
                topics=w.topics,
                slots=w.slots,
                limit=w.limit,
                held=len(w.held),
                labels=w.labels,
                host=w.host,
                pid=w.pid,
                local=w.local,
                status=w.status,
                silent_for=0.0 if w.local else max(0.0, monotonic - w.heard_at),
                facts=w.facts,
            )
            for w in self._board.roster.workers.values()
        ]

    async def pipes(self) -> PipesView:
        self._guard.require(KeyRole.OPERATE, "pipes.list")
        return merged(
            (worker.worker_id, view)
            for worker in self._board.roster.workers.values()
            if worker.missing_since is None and (view := told_in(worker.facts)) is not None
        )

    async def pools(self) -> list[PoolView]:
        self._guard.require(KeyRole.OPERATE, "pools.list")
        return self._services.pools.list()

    async def pause_pool(self, name: str) -> PoolView:
        with self._guard.doing("pool.pause", name, role=None):
            self._guard.require_everywhere(KeyRole.OPERATE, "pool.pause")
            return await self._services.pools.pause(name)

    async def resume_pool(self, name: str) -> PoolView:
        with self._guard.doing("pool.resume", name, role=None):
            self._guard.require_everywhere(KeyRole.OPERATE, "pool.resume")
            return await self._services.pools.resume(name)

    async def status(self) -> EngineStatus:
        tenant, board, rulebook = self._guard.caller.tenant, self._board, self._services.rulebook
        about = self._services.about
        tally = await self._store.tally(tenant)
        paused = paused_everywhere(board.roster.workers.values())
        if tenant is not None:
            # Of the engine, a tenant learns that it is there; of jobs, its own.
            return replace(about, pid=0, data_dir="", tally=tally, paused_topics=paused)
        return replace(
            about,
            rules=self._services.kernel.rules.snapshot,
            tally=tally,
            waiting=board.waiting(),
            held=len(board.held),
            workers=len(board.roster.workers),
            finished=board.finished,
            parked=len(board.parked),
            paused_pools=tuple(sorted(board.roster.paused)),
            paused_topics=paused,
            policy_problem=rulebook.problem,
        )

    async def verify(self) -> Verified:
        self._guard.require_everywhere(KeyRole.ADMIN, "verify")
        return await self._store.verify()

    async def prune(self, older_than: float) -> Cleaned:
        with self._guard.doing("prune", role=None, detail=f"older than {older_than:g} s"):
            self._guard.require_everywhere(KeyRole.ADMIN, "prune")
            return await self._services.pruner.prune(older_than)

    # -- payloads -----------------------------------------------------------------

    async def put_blob(self, data: bytes, media_type: str = "application/json") -> str:
        self._guard.require(KeyRole.SUBMIT, "blob.put")
        uri = await self._blobs.put(data, media_type)
        await self._uploads.note(uri)
        return uri

    async def get_blob(self, uri: str) -> bytes:
        await self._uploads.check(uri)
        return await self._blobs.get(uri)

    async def stat_blob(self, uri: str) -> BlobStat:
        await self._uploads.check(uri)
        return await self._blobs.stat(uri)

    async def read_blob(self, uri: str, start: int, length: int) -> bytes:
        await self._uploads.check(uri)
        return await self._blobs.read(uri, start, length)


def _said(query: JobQuery) -> str:
    """A query in words: the conditions that it states."""
    stated = {
        name: value
        for name in JobQuery.__struct_fields__
        if (value := getattr(query, name)) not in (None, (), {}, False)
        and name not in ("limit", "before", "since")
    }
    return ", ".join(f"{name}={_plain(value)}" for name, value in stated.items()) or "all"


def _plain(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _how_it_ended(job: Job) -> str:
    said = f"it ended {job.state}"
    if job.result is not None and job.result.error_message:
        said += f": {job.result.error_message}"
    if job.successor is not None:
        said += f"; retried as {job.successor}"
    return said
