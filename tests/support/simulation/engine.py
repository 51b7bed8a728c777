"""The real control plane, put together on simulated parts, and thrown away at a crash."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from tests.support.simulation.history import (
    Dispatched,
    History,
    LimitsSet,
    Noticed,
    RulesSet,
    StartConfirmed,
    TookBack,
)
from tests.support.simulation.link import SimStartLogs
from tests.support.simulation.store import FaultyStore

from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.control.approvals import ApprovalService
from penstock.control.checkpoints import CheckpointService
from penstock.control.feed import Feed
from penstock.control.gateway import Gateway
from penstock.control.guard import Guard
from penstock.control.open_jobs import OpenJobs
from penstock.control.reconciler import Reconciler
from penstock.control.safety import RuleSet, SafetyKernel
from penstock.control.scheduler import Scheduler
from penstock.control.workers import Pool, Roster
from penstock.core.job import IdSource, Timeouts
from penstock.ports.bus import AnyMessage, Confirmed, Dispatch, MemoryBus, Resumed
from penstock.ports.clock import Clock
from penstock.ports.engine_api import Caller, KeyRole, Limit

T = TypeVar("T")

LIMITS = Timeouts(
    timeout=6.0, dispatch_timeout=4.0, lease=2.0, lost_grace=0.6, kill_grace=0.5, max_attempts=3
)


class WatchedBus(MemoryBus):
    """Tells the history what workers are given."""

    def __init__(self, history: History) -> None:
        super().__init__()
        self._history = history

    def publish(self, subject: str, messages: Sequence[AnyMessage]) -> None:
        if subject.startswith("worker."):
            worker_id = subject.removeprefix("worker.").removesuffix(".jobs")
            for message in messages:
                self._watch(worker_id, message)
        super().publish(subject, messages)

    def _watch(self, worker_id: str, message: AnyMessage) -> None:
        events = self._history.events
        match message:
            case Dispatch(request, attempt):
                events.append(Dispatched(request.job_id, attempt, worker_id))
            case Confirmed(jobs):
                events.extend(StartConfirmed(job_id, attempt) for job_id, attempt in jobs)
            case Resumed(job_id, attempt):
                events.append(TookBack(job_id, attempt))


class WatchedScheduler(Scheduler):
    """Tells the history when it takes notice of other rules or limits."""

    history: History
    has_news = True

    async def turn(self) -> None:
        if self.has_news and not self._dispatch_pending:
            self.has_news = False
            self.history.events.append(Noticed())
        await super().turn()


class SimEngine:
    """One life of an engine; its store outlives it."""

    def __init__(
        self,
        storage: FaultyStore,
        clock: Clock,
        chance: random.Random,
        history: History,
        starts: SimStartLogs,
        rules: RuleSet,
        limits: Sequence[Limit],
    ) -> None:
        self.storage, self.history = storage, history
        store = self.ledger = storage.ledger
        self.kernel = SafetyKernel(rules)
        self.bus = WatchedBus(history)
        self.open_jobs = OpenJobs(Roster({"small": Pool("small", capacity=2)}), clock.now)
        store.listen(self.open_jobs.observe)
        self.feed = Feed(store)
        store.listen(self.feed.hear)
        ids = IdSource(lambda: chance.getrandbits(79))
        self.scheduler = WatchedScheduler(
            store,
            self.bus,
            self.open_jobs,
            self.kernel,
            clock,
            LIMITS,
            starts=starts,
            ids=ids,
            chance=chance.random,
        )
        self.scheduler.history = history
        self.use_rules(rules)
        self.use_limits(limits)
        self.reconciler = Reconciler(
            store,
            self.bus,
            self.open_jobs,
            clock,
            LIMITS,
            nudge=self.scheduler.nudge,
            has_word_from=self.scheduler.has_word_from,
            has_word_of=self.scheduler.has_word_of,
            starts=starts,
            ids=ids,
            chance=chance.random,
        )
        self.checkpoints = CheckpointService(store, self.bus, clock)
        self.gateway = Gateway(
            store, MemoryBlobs(), self.open_jobs, clock, refuse_unknown=False, ids=ids
        )
        self._clock = clock
        self._tasks: set[asyncio.Task[Any]] = set()
        self.is_dead = False
        self.failures: list[BaseException] = []

    def approvals(self, by: str) -> ApprovalService:
        """The API as one approver sees it."""
        guard = Guard(Caller(by, frozenset({KeyRole.APPROVE})), self.ledger, self._clock)
        return ApprovalService(self.ledger, self.kernel, self._clock, guard)

    def use_rules(self, rules: RuleSet) -> None:
        self.history.events.append(RulesSet(rules.snapshot))
        self.kernel.use(rules)
        self.scheduler.has_news = True
        self.scheduler.rejudge()

    def use_limits(self, limits: Sequence[Limit]) -> None:
        self.history.events.append(LimitsSet(tuple(limits)))
        self.scheduler.has_news = True
        self.open_jobs.limiter.use(limits)

    async def start(self) -> None:
        self.open_jobs.restore(await self.ledger.unfinished())
        for record in self.open_jobs.roster.workers.values():
            self.open_jobs.roster.set_missing(record, self._clock.monotonic())
        self.feed.subscribe(self.bus)
        self.own(self.scheduler.run())
        self.own(self.reconciler.run())
        self.own(self.checkpoints.run())

    def own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run something that dies with this engine."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append(error)

    async def crash(self) -> None:
        """Everything in memory is gone at once."""
        self.is_dead = True
        self.storage.crash()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.bus.close()
