"""The engine's own API, bound to one caller.

Every call is checked by the caller's `Guard`: what they may not do is refused, and other
tenants' things do not exist for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from penstock.control.approvals import ApprovalService
from penstock.control.backlog import QueueKey
from penstock.control.credentials import CredentialRegistry, CredentialService
from penstock.control.feed import Feed, JobSet, JournalHub
from penstock.control.gateway import Gateway, check_batch
from penstock.control.guard import AuditService, Guard, KeyRegistry, KeyService, Uploads
from penstock.control.intake import reattach_timeout
from penstock.control.ledger import Committed, Ledger
from penstock.control.limits import LimitService
from penstock.control.open_jobs import OpenJobs
from penstock.control.policy import PolicyService, Rulebook
from penstock.control.pruner import Pruner
from penstock.control.schedules import ScheduleRunner, ScheduleService
from penstock.control.statistics import Statistics
from penstock.control.stream import EventStream
from penstock.control.workers import (
    Roster,
    WorkerRecord,
    describe_topics,
    models_of,
    paused_everywhere,
    pool_view,
    why_waiting,
    worker_view,
)
from penstock.core.check import check_number
from penstock.core.errors import Conflict, InvalidRequest, NotFound, WaitTimedOut
from penstock.core.job import Job, JobRequest, chain_of, ready_at
from penstock.core.journal import Transition
from penstock.lifecycles.canonical import TERMINAL, JobState
from penstock.ports.blobs import Blobs, BlobStat
from penstock.ports.bus import Bus, Drain, jobs_of
from penstock.ports.clock import Clock
from penstock.ports.engine_api import (
    MAX_LOGS,
    MAX_MINUTES,
    MAX_WAITED,
    OWNER,
    Authenticator,
    Bulk,
    Caller,
    Cancellation,
    Cleaned,
    Ended,
    EngineApi,
    EngineStatus,
    JobCounts,
    JobTotal,
    JobUpdate,
    KeyRole,
    PoolView,
    Session,
    SignedIn,
    StreamBatch,
    StreamKind,
    StreamQuery,
    Submitted,
    Timeline,
    TopicView,
    WorkerView,
    newest_try,
)
from penstock.ports.store import (
    MAX_SEARCHED,
    JobQuery,
    LogLine,
    StepCount,
    StepPage,
    StepQuery,
    Verified,
)

if TYPE_CHECKING:
    from penstock.workloads.llm.batches import Batches
    from penstock.workloads.pipeline.interface import Pipelines

_BATCH = 100_000
_READ = 500
"""Jobs that are read at once."""
_LINGER = 1e-5
"""Seconds for each job of a set by which an answer may be late, so that it tells of more ends: a
caller who asks again costs as much as there are jobs in the set."""
_ANSWER = 8 << 20
"""Bytes of pointers in an answer about a set of jobs."""
_ARTIFACT = 300
"""Bytes of an artifact in such an answer, about."""
MAX_COUNTED = 1_000
"""Jobs up to which a query is counted exactly."""
_SESSIONS = 10_000
_FLEET_KINDS = frozenset({StreamKind.WORKER, StreamKind.POOL})
PAUSED_POOLS = "pool/"
"""Prefix of the stored facts about paused pools."""


@dataclass(frozen=True)
class Services:
    """The services behind an EngineApi."""

    store: Ledger
    blobs: Blobs
    open_jobs: OpenJobs
    gateway: Gateway
    feed: Feed
    hub: JournalHub
    stream: EventStream
    statistics: Statistics
    pruner: Pruner
    rulebook: Rulebook
    schedules: ScheduleRunner
    nudge: Callable[[], None]
    """Wakes the scheduler."""
    bus: Bus
    keys: KeyRegistry
    credentials: CredentialRegistry
    pipelines: Callable[[Guard], Pipelines]
    batches: Callable[[Guard], Batches]
    clock: Clock
    about: EngineStatus


class ReadingEngineApi:
    """What can be answered from the store alone."""

    def __init__(self, store: Ledger, guard: Guard) -> None:
        self._store, self._guard = store, guard

    async def get(self, job_id: str) -> Job:
        return self._guard.shown(await self._store.get(job_id), job_id)

    async def find(self, query: JobQuery) -> list[Job]:
        mine = self._guard.narrowed(query)
        return [] if mine is None else await self._store.find(mine)

    async def count(self, query: JobQuery) -> JobTotal:
        mine = self._guard.narrowed(query)
        if mine is None:
            return JobTotal(0, exact=True)
        mine = replace(mine, before=None, since=None, oldest_first=False, limit=MAX_COUNTED + 1)
        if replace(mine, states=(), tenant=None) == JobQuery(limit=mine.limit):
            tally = await self._store.tally(mine.tenant)
            states = mine.states or tuple(JobState)
            return JobTotal(sum(tally.get(state, 0) for state in set(states)), exact=True)
        found = len(await self._store.find(mine))
        exact = found <= MAX_COUNTED and (mine.error is None or await self._searches_all(mine))
        return JobTotal(min(found, MAX_COUNTED), exact)

    async def _searches_all(self, query: JobQuery) -> bool:
        """Whether a search for an error looks into every job that has one."""
        tally = await self._store.tally(query.tenant)
        states = [state for state in query.states or TERMINAL if state is not JobState.SUCCEEDED]
        return sum(tally.get(state, 0) for state in states) <= MAX_SEARCHED

    async def history(self, job_id: str) -> list[Transition]:
        await self.get(job_id)
        return await self._store.history(job_id)

    async def read_log(self, job_id: str, after: int = 0, limit: int = 1000) -> list[LogLine]:
        await self.get(job_id)
        return await self._store.read_log(job_id, after, limit)

    async def read_steps(self, job_id: str, query: StepQuery) -> StepPage:
        await self.get(job_id)
        return await self._store.read_steps(job_id, query)

    async def count_steps(self, job_id: str) -> list[StepCount]:
        await self.get(job_id)
        return await self._store.count_steps(job_id)

    async def count_children(self, job_id: str) -> dict[JobState, int]:
        job = await self.get(job_id)
        return await self._store.count_children(chain_of(job.request), self._guard.caller.tenant)


class LocalEngineApi(ReadingEngineApi):
    """See `penstock.ports.engine_api.EngineApi`."""

    def __init__(self, services: Services, caller: Caller = OWNER) -> None:
        self._services, store, clock = services, services.store, services.clock
        guard = Guard(caller, store, clock)
        super().__init__(store, guard)
        self._blobs, self._open_jobs = services.blobs, services.open_jobs
        self._gateway, self._feed, self._clock = services.gateway, services.feed, clock
        self._uploads = Uploads(store, clock, caller.tenant)
        self.approvals = ApprovalService(store, services.rulebook.kernel, clock, guard)
        self.policy = PolicyService(services.rulebook, store, guard)
        self.schedules = ScheduleService(services.schedules, guard, self._uploads)
        self.limits = LimitService(store, services.open_jobs.limiter, clock, guard)
        self.keys = KeyService(services.keys, guard)
        self.credentials = CredentialService(services.credentials, guard)
        self.audit = AuditService(store, guard)
        self.pipelines = services.pipelines(guard)
        self.batches = services.batches(guard)

    @property
    def guard(self) -> Guard:
        return self._guard

    def serving(self, caller: Caller) -> LocalEngineApi:
        """The same engine's API for another caller."""
        return LocalEngineApi(self._services, caller)

    # -- jobs ---------------------------------------------------------------------

    def begin_submit(
        self, requests: Sequence[JobRequest], fresh: bool = False
    ) -> tuple[asyncio.Future[Any], Callable[[asyncio.Future[Any]], list[Job]]]:
        """Like `submit`, without a task for one plain request: a future, and how to read it.

        `fresh`: their ids were made for them just now, and sent for the first time.
        """
        if len(requests) == 1 and (committed := self._begin(requests[0], fresh)) is not None:
            return committed, _jobs_of
        submitting = self._submit(requests, fresh)
        return asyncio.get_running_loop().create_task(submitting), asyncio.Future.result

    async def submit(self, requests: Sequence[JobRequest]) -> list[Job]:
        if len(requests) == 1 and (begun := self._begin(requests[0], repeats=True)) is not None:
            ((answer,), _) = await begun
            if answer.moved and (job := answer.job) is not None:
                return Submitted([job], frozenset((job.request.job_id,)))
        return await self._submit(requests)

    async def _submit(self, requests: Sequence[JobRequest], fresh: bool = False) -> list[Job]:
        guard = self._guard
        guard.require(EngineApi.submit)
        check_batch(requests, _BATCH)
        if guard.caller.tenant is not None:
            requests = [guard.stamped(request) for request in requests]
            for request in requests:
                await self._uploads.check(request.context_ptr)
        return await self._gateway.submit(requests, by=guard.by, fresh=fresh)

    def _begin(
        self, request: JobRequest, fresh: bool = False, repeats: bool = False
    ) -> Committed | None:
        """See `Gateway.begin`."""
        guard = self._guard
        if not guard.may_submit_anything:
            guard.require(EngineApi.submit)
            request = guard.stamped(request)
        by = guard.caller.principal
        return self._gateway.begin(request, by=by, fresh=fresh, repeats=repeats)

    async def counts(self) -> JobCounts:
        tenant = self._guard.caller.tenant
        topics = self._services.statistics.open_by_topic(tenant)
        return JobCounts(await self._store.tally(tenant), topics)

    async def timeline(self, minutes: int = 60, topic: str | None = None) -> Timeline:
        check_number("minutes", minutes, 1, MAX_MINUTES)
        return self._services.statistics.timeline(minutes, self._guard.caller.tenant, topic)

    async def why(self, job_id: str) -> str:
        job = await self.get(job_id)
        if job.successor is None:
            return self._why(job)
        newest = await newest_try(self, job)
        number = newest.request.try_number
        return f"{self._why(job)}; try {number} is {newest.job_id}: {self._why(newest)}"

    def _why(self, job: Job) -> str:
        match job.state:
            case JobState.PENDING | JobState.SCHEDULED:
                return self._why_waiting(job)
            case JobState.DISPATCHED | JobState.RUNNING:
                return self._what_happens(job)
            case _:
                return how_it_ended(job)

    def _why_waiting(self, job: Job) -> str:
        if (doubt := self._open_jobs.doubtful.get(job.seq)) is not None:
            return f"held: {doubt}"
        now = self._clock.now()
        if (held_back := self._open_jobs.why(job, now)) is not None:
            return held_back
        start = ready_at(job.request, job.accepted_at)
        if start > now:
            kind = "retry backoff" if job.request.retry_number else "delayed"
            return f"{kind}: may start in {start - now:.1f} s"
        roster = self._open_jobs.roster
        return why_waiting(QueueKey.of(job), roster.workers.values(), roster.pools, roster.paused)

    def _what_happens(self, job: Job) -> str:
        if (lost := self._open_jobs.orphaned.get(job.job_id)) is not None:
            if job.job_id in self._open_jobs.reattaching:
                seconds = reattach_timeout(self._open_jobs, job)
                return f"{lost}; it waits up to {seconds:g} s for a worker that can reattach to it"
            roster = self._open_jobs.roster
            next_up = why_waiting(
                QueueKey.of(job), roster.workers.values(), roster.pools, roster.paused
            )
            return f"{lost}; attempt {job.attempt + 1} waits: {next_up}"
        if (waits := self._open_jobs.why_awaiting(job)) is not None:
            return f"{waits} (attempt {job.attempt} on worker {job.worker_id})"
        doing = "runs it" if job.state is JobState.RUNNING else "has it and is about to start it"
        said = f"worker {job.worker_id} {doing} (attempt {job.attempt})"
        if (progress := self._feed.progress_of(job.job_id)) is not None:
            share = "" if progress.fraction is None else f"{progress.fraction:.0%}"
            how_far = " ".join(filter(None, (share, progress.message)))
            said = "; ".join(filter(None, (how_far, said)))
        return said + ("; it was asked to end" if job.cancel_requested else "")

    async def wait(self, job_id: str, timeout: float | None = None) -> Job:
        if timeout is None:
            return await self._final(job_id)
        try:
            async with asyncio.timeout(timeout):
                return await self._final(job_id)
        except TimeoutError:
            job = await newest_try(self, await self.get(job_id))
            raise WaitTimedOut(
                f"job {job_id} is still {job.state} after {timeout:g} s",
                hint="the job goes on; wait again later, or cancel it",
            ) from None

    async def _final(self, job_id: str) -> Job:
        job = await self.get(job_id)  # NotFound if the caller may not see it
        if not job.is_final:
            job = await self._feed.ended(job_id)
        while job.successor is not None:
            job = await self._feed.ended(job.successor)
        return job

    async def wait_many(
        self,
        job_ids: Sequence[str],
        count: int = 1,
        *,
        or_failure: bool = False,
        timeout: float | None = None,
    ) -> list[Ended]:
        if len(job_ids) > MAX_WAITED:
            raise InvalidRequest("job_ids", f"{len(job_ids)} jobs; at most {MAX_WAITED} at once")

        jobs = JobSet(self._feed, count, or_failure)
        try:
            async with asyncio.timeout(timeout):
                await self._look_up(jobs, job_ids)
                if job_ids:
                    await jobs.wait(len(job_ids) * _LINGER)
        except TimeoutError:
            pass
        finally:
            jobs.close()
        return _in_order(jobs.ended)

    async def _look_up(self, jobs: JobSet, job_ids: Sequence[str]) -> None:
        """Find out which of them have ended. Raises NotFound."""
        every = list(dict.fromkeys(job_ids))
        for begin in range(0, len(every), _READ):
            wanted = every[begin : begin + _READ]
            jobs.add(wanted)
            while wanted:  # the retries of those that have ended, and theirs
                known = await self._store.get_many(wanted)
                found = [self._guard.shown(known.get(job_id), job_id) for job_id in wanted]
                wanted = [retry for job in found if (retry := jobs.find(job)) is not None]

    async def follow(
        self, job_id: str, after_log: int | None = 0, after_move: int | None = None
    ) -> AsyncIterator[JobUpdate]:
        await self.get(job_id)
        async with aclosing(self._feed.follow(job_id, after_log, after_move)) as updates:
            async for update in updates:
                yield update

    async def cancel(
        self, job_id: str, *, reason: str = "", children: bool = False, timeout: float = 10.0
    ) -> Cancellation:
        await self.get(job_id)
        with self._guard.doing(EngineApi.cancel, job_id, detail=reason):
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
        with self._guard.doing(EngineApi.retry, job_id):
            return await self._gateway.retry(job_id, by=self._guard.by)

    async def cancel_many(self, query: JobQuery, *, reason: str = "") -> Bulk:
        with self._guard.doing(EngineApi.cancel_many, detail=_said(query)):
            mine = self._guard.narrowed(query)
            if mine is None:
                return Bulk(0, 0)
            return await self._gateway.cancel_many(mine, reason=reason, by=self._guard.by)

    async def retry_many(self, query: JobQuery) -> Bulk:
        with self._guard.doing(EngineApi.retry_many, detail=_said(query)):
            mine = self._guard.narrowed(query)
            if mine is None:
                return Bulk(0, 0)
            return await self._gateway.retry_many(mine, by=self._guard.by)

    def stream(self, query: StreamQuery, after: str | None = None) -> AsyncIterator[StreamBatch]:
        guard = self._guard
        if len(query.logs) > MAX_LOGS:
            raise InvalidRequest("logs", f"{len(query.logs)} jobs; at most {MAX_LOGS}")
        kinds = frozenset(query.kinds) or frozenset(StreamKind)
        if not guard.caller.may(KeyRole.OPERATE):
            if kinds & _FLEET_KINDS and query.kinds:
                guard.require(EngineApi.workers)
            kinds -= _FLEET_KINDS
        return self._services.stream.read(query, after, guard.caller.tenant, kinds, self.get)

    # -- the engine ---------------------------------------------------------------

    async def topics(self) -> list[str]:
        return sorted({t for w in self._open_jobs.roster.workers.values() for t in w.topics})

    async def describe_topics(self) -> list[TopicView]:
        if not self._guard.caller.may(KeyRole.SUBMIT):
            return []
        return describe_topics(self._open_jobs.roster.workers.values())

    async def workers(self) -> list[WorkerView]:
        self._guard.require(EngineApi.workers)
        monotonic = self._clock.monotonic()
        return [worker_view(w, monotonic) for w in self._open_jobs.roster.workers.values()]

    async def worker(self, worker_id: str) -> WorkerView:
        self._guard.require(EngineApi.worker)
        return worker_view(self._worker(worker_id), self._clock.monotonic())

    async def drain_worker(self, worker_id: str) -> WorkerView:
        with self._guard.doing(EngineApi.drain_worker, worker_id):
            record = self._worker(worker_id)
            if record.local:
                raise Conflict(
                    f"worker {worker_id} is part of the engine's own process",
                    hint="pause its pool, or stop the engine",
                )
            self._open_jobs.roster.ask_to_leave(record)
            self._services.bus.publish(jobs_of(worker_id), [Drain(record.session)])
            return worker_view(record, self._clock.monotonic())

    def _worker(self, worker_id: str) -> WorkerRecord:
        record = self._open_jobs.roster.workers.get(worker_id)
        if record is None:
            raise NotFound(f"no worker {worker_id!r}", hint="'penstock worker list' lists them")
        return record

    async def pools(self) -> list[PoolView]:
        self._guard.require(EngineApi.pools)
        return [pool_view(self._open_jobs.roster, name) for name in self._open_jobs.roster.pools]

    async def pool(self, name: str) -> PoolView:
        self._guard.require(EngineApi.pool)
        self._check_pool(name)
        return pool_view(self._open_jobs.roster, name)

    async def pause_pool(self, name: str) -> PoolView:
        with self._guard.doing(EngineApi.pause_pool, name):
            self._check_pool(name)
            await self._store.home.remember(PAUSED_POOLS + name, b"paused")
            self._open_jobs.roster.pause(name)
            return pool_view(self._open_jobs.roster, name)

    async def resume_pool(self, name: str) -> PoolView:
        with self._guard.doing(EngineApi.resume_pool, name):
            self._check_pool(name)
            await self._store.home.forget(PAUSED_POOLS + name)
            self._open_jobs.roster.resume(name)
            self._services.nudge()
            return pool_view(self._open_jobs.roster, name)

    def _check_pool(self, name: str) -> None:
        roster = self._open_jobs.roster
        if name not in roster.pools and name not in roster.paused:
            raise NotFound(f"no pool {name!r}", hint="'penstock pool list' shows them")

    async def status(self) -> EngineStatus:
        tenant, open_jobs, rulebook = (
            self._guard.caller.tenant,
            self._open_jobs,
            self._services.rulebook,
        )
        about = self._services.about
        tally, retried = await self._store.tally(tenant), await self._store.retried(tenant)
        paused = paused_everywhere(open_jobs.roster.workers.values())
        models = models_of(open_jobs.roster.workers.values())
        if tenant is not None:
            # A tenant sees its own jobs, and nothing else of the engine.
            about = replace(about, pid=0, data_dir="")
            return replace(about, tally=tally, retried=retried, paused_topics=paused, models=models)
        return replace(
            about,
            rules=rulebook.kernel.rules.snapshot,
            tally=tally,
            retried=retried,
            waiting=open_jobs.waiting(),
            held=len(open_jobs.held),
            workers=len(open_jobs.roster.workers),
            finished=open_jobs.finished,
            awaiting_approval=len(open_jobs.awaiting_approval),
            paused_pools=tuple(sorted(open_jobs.roster.paused)),
            paused_topics=paused,
            models=models,
            policy_problem=rulebook.problem,
            activity=self._services.statistics.activity(),
        )

    async def verify(self) -> Verified:
        self._guard.require(EngineApi.verify)
        return await self._store.verify()

    async def prune(self, older_than: float) -> Cleaned:
        said = f"older than {older_than:g} s"
        with self._guard.doing(EngineApi.prune, detail=said):
            return await self._services.pruner.prune(older_than)

    # -- payloads -----------------------------------------------------------------

    async def put_blob(self, data: bytes, media_type: str = "application/json") -> str:
        self._guard.require(EngineApi.put_blob)
        uri = await self._blobs.put(data, media_type)
        await self._uploads.note(uri)
        return uri

    async def get_blob(self, uri: str) -> bytes:
        await self._uploads.check(uri)
        return await self._blobs.get(uri)

    async def stat_blob(self, uri: str, *, job_id: str | None = None) -> BlobStat:
        await self._uploads.check(uri)
        if job_id is not None:
            request = (await self.get(job_id)).request
            if not self._services.keys.is_of_all_tenants(request.principal):
                await Uploads(self._store, self._clock, request.tenant).check(uri)
        return await self._blobs.stat(uri)

    async def read_blob(self, uri: str, start: int, length: int) -> bytes:
        await self._uploads.check(uri)
        return await self._blobs.read(uri, start, length)


def _jobs_of(committed: Committed) -> list[Job]:
    """What `Gateway.begin` began, when it is done."""
    answers, _ = committed.result()
    return [answer.job for answer in answers if answer.job is not None]


async def load_paused_pools(store: Ledger, roster: Roster) -> None:
    """A paused pool stays paused across restarts."""
    for name in await store.home.recall_all(PAUSED_POOLS):
        roster.pause(name.removeprefix(PAUSED_POOLS))


class EngineAuthenticator:
    """See `penstock.ports.engine_api.Authenticator`."""

    def __init__(self, keys: KeyRegistry, api: LocalEngineApi) -> None:
        self._keys, self._api = keys, api
        self._sessions: dict[str, Session] = {}

    def authenticate(self, token: str) -> Session:
        return self._session(self._keys.authenticate(token))

    def resume(self, token: str) -> Session:
        # Without `is_current`: a session may end before its key does.
        return replace(self._session(self._keys.sessions.authenticate(token)), is_current=None)

    async def sign_in(self, *, key: str = "", link: str = "") -> SignedIn:
        sessions = self._keys.sessions
        caller = sessions.use_link(link) if link else self._keys.authenticate(key)
        guard = self._api.serving(caller).guard
        detail = "by a one-time link" if link else "by key"
        with guard.doing(Authenticator.sign_in, detail=detail):
            return await sessions.open(caller)

    async def sign_out(self, token: str) -> None:
        guard = self._api.serving(self._keys.sessions.authenticate(token)).guard
        with guard.doing(Authenticator.sign_out):
            await self._keys.sessions.close(token)

    def _session(self, caller: Caller) -> Session:
        session = self._sessions.get(caller.key_id)
        if session is None or session.caller != caller:
            if len(self._sessions) >= _SESSIONS:
                self._sessions.clear()
            api = self._api.serving(caller)
            is_current = partial(self._keys.is_current, caller)
            session = Session(caller, api, api.guard.admit, is_current)
            self._sessions[caller.key_id] = session
        return session


def _said(query: JobQuery) -> str:
    """The conditions of a query, for the audit log."""
    stated = {
        name: value
        for name in JobQuery.__struct_fields__
        if (value := getattr(query, name)) not in (None, (), {}, False)
        and name not in ("limit", "before", "since")
    }
    return ", ".join(f"{name}={_plain(value)}" for name, value in stated.items()) or "all"


def _plain(value: object) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _in_order(ended: Mapping[str, Job]) -> list[Ended]:
    """As they ended, and as many as an answer can hold; the same whenever they are asked for."""
    answer = [Ended(asked, job) for asked, job in ended.items()]
    answer.sort(key=attrgetter("job.seq"))
    answer.sort(key=attrgetter("job.finished_at"))
    size = 0
    for n, one in enumerate(answer):
        job = one.job
        size += len(job.request.context_ptr)
        if job.result is not None:
            size += len(job.result.result_ptr or "") + _ARTIFACT * len(job.result.artifacts)
        if n and size > _ANSWER:
            return answer[:n]
    return answer


def how_it_ended(job: Job) -> str:
    said = f"it ended {job.state}"
    if job.result is not None and job.result.error_message:
        said += f": {job.result.error_message}"
    return said
