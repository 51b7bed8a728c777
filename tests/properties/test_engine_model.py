"""The engine, step by step, against a small model of what a user is promised.

Gateway, scheduler, reconciler and store are the real ones; time, workers and users are this
test's. After each step the engine is given the time to settle, and every job must be where
the model says. The model does not predict which worker takes a job, only that somebody with
room does, that nobody is passed over, and what follows from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from tests.support.ledgers import MemoryLedger
from tests.support.simulation.history import History, check

from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.control.gateway import Gateway
from penstock.control.open_jobs import OpenJobs
from penstock.control.reconciler import Reconciler
from penstock.control.safety import SafetyKernel
from penstock.control.scheduler import Scheduler
from penstock.control.workers import Roster
from penstock.core.errors import Conflict
from penstock.core.job import Job, JobResult, RetryPolicy, Timeouts
from penstock.lifecycles.canonical import HELD, TERMINAL, WAITING, JobState
from penstock.ports.bus import (
    AnyMessage,
    Finished,
    Handshake,
    Heartbeat,
    JobCancel,
    Returned,
    Started,
)
from penstock.ports.store import JobQuery
from penstock.testing.clock import VirtualClock
from penstock.testing.samples import T0, a_request

_S = JobState
LIMITS = Timeouts(lease=15.0, lost_grace=3.0, max_attempts=3, timeout=1e6, dispatch_timeout=1e6)
STEP = 0.5


# -- the model --------------------------------------------------------------------


@dataclass
class ModelJob:
    seq: int
    idempotent: bool
    retries: int
    parent: str | None = None
    state: JobState = _S.PENDING
    attempt: int = 0
    worker: str | None = None
    asked_to_end: bool = False
    orphaned: bool = False
    successor: bool = False

    @property
    def waits(self) -> bool:
        return self.state in WAITING or (self.orphaned and not self.asked_to_end)


@dataclass
class Model:
    jobs: dict[str, ModelJob] = field(default_factory=dict)
    workers: dict[str, int] = field(default_factory=dict)
    """Slots of each worker that is there."""

    def room(self) -> int:
        return sum(slots - len(self.held_by(name)) for name, slots in self.workers.items())

    def held_by(self, worker: str) -> list[str]:
        return [i for i, j in self.jobs.items() if j.worker == worker and self.is_held(j)]

    @staticmethod
    def is_held(job: ModelJob) -> bool:
        return job.state in HELD and not job.orphaned

    def end(self, job_id: str, state: JobState) -> None:
        job = self.jobs[job_id]
        job.state, job.orphaned = state, False
        job.successor = (
            state in (_S.FAILED, _S.TIMEOUT) and job.retries > 0 and not job.asked_to_end
        )

    def cancel(self, job_id: str) -> None:
        job = self.jobs[job_id]
        if job.state in WAITING:
            self.end(job_id, _S.CANCELLED)
        elif job.state in HELD:
            job.asked_to_end = True

    def lose(self, worker: str) -> None:
        for job_id in self.held_by(worker):
            job = self.jobs[job_id]
            again = job.idempotent and job.attempt < LIMITS.max_attempts
            if job.asked_to_end:
                self.end(job_id, _S.CANCELLED)
            elif job.state is _S.DISPATCHED or again:
                job.orphaned = True
            else:
                self.end(job_id, _S.TIMEOUT)
        self.workers.pop(worker, None)

    def settle(self, found: dict[str, Job]) -> None:
        """Take in what the engine chose, after seeing that it was free to choose it."""
        for job in self.jobs.values():
            if job.orphaned and job.asked_to_end:
                job.state, job.orphaned = _S.CANCELLED, False
        for parent_id, parent in list(self.jobs.items()):
            child_id = found[parent_id].successor
            assert (child_id is not None) is parent.successor
            if child_id is not None and child_id not in self.jobs:
                child = ModelJob(
                    found[child_id].seq, parent.idempotent, parent.retries - 1, parent_id
                )
                self.jobs[child_id] = child
        given = [i for i, j in self.jobs.items() if j.waits and found[i].attempt == j.attempt + 1]
        waiting = sum(job.waits for job in self.jobs.values())
        assert len(given) == min(waiting, self.room()), "nobody waits while there is room"
        left = [j.seq for i, j in self.jobs.items() if j.waits and i not in given]
        assert all(self.jobs[i].seq < seq for i in given for seq in left), "in their order"
        for job_id in given:
            self._give(self.jobs[job_id], found[job_id].worker_id or "")
        for job in self.jobs.values():
            if job.state is _S.PENDING:
                job.state = _S.SCHEDULED

    def _give(self, job: ModelJob, worker: str) -> None:
        assert worker in self.workers
        job.attempt += 1
        job.worker, job.orphaned = worker, False
        if job.state in WAITING:
            job.state = _S.DISPATCHED
        assert len(self.held_by(worker)) <= self.workers[worker]


# -- the engine -------------------------------------------------------------------


class SilentBus:
    """Keeps the orders to end something; workers here need no others."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, int]] = []

    def publish(self, subject: str, messages: Sequence[AnyMessage]) -> None:
        self.ends.extend((m.job_id, m.attempt) for m in messages if isinstance(m, JobCancel))

    def subscribe(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


class Engine:
    def __init__(self, store: MemoryLedger, clock: VirtualClock) -> None:
        self.store, self.clock, self.bus = store, clock, SilentBus()
        self.open_jobs = OpenJobs(Roster({}), clock.now)
        store.listen(self.open_jobs.observe)
        kernel = SafetyKernel()
        self.scheduler = Scheduler(
            store, self.bus, self.open_jobs, kernel, clock, LIMITS, chance=lambda: 0.0
        )
        store.listen(self.scheduler.hear)
        self.reconciler = Reconciler(
            store, self.bus, self.open_jobs, clock, LIMITS, chance=lambda: 0.0
        )
        self.gateway = Gateway(store, MemoryBlobs(), self.open_jobs, clock, refuse_unknown=False)

    async def restore(self) -> None:
        self.open_jobs.restore(await self.store.unfinished())
        for record in self.open_jobs.roster.workers.values():
            self.open_jobs.roster.set_missing(record, self.clock.monotonic())

    async def hear(self, *messages: AnyMessage) -> None:
        await self.scheduler.receive(list(messages))
        await self.scheduler.turn()

    async def let_pass(self, steps: int, beating: Sequence[str]) -> None:
        for _ in range(steps):
            self.clock.advance(STEP)
            await self.scheduler.beat([Heartbeat(name) for name in beating])
            await self.reconciler.sweep()
            await self.scheduler.turn()
            await self.scheduler.turn()


class EngineMachine(RuleBasedStateMachine):
    jobs = Bundle("jobs")
    workers = Bundle("workers")

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.model = Model()
        self.names = 0

    def teardown(self) -> None:
        records, store = self.records(), self.engine.store
        logs = {job_id: tuple(self.run(store.history(job_id))) for job_id in records}
        history = History(records=records, logs=logs, quiescent=False)
        assert check(history) == []
        self.loop.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def records(self) -> dict[str, Job]:
        """Every job as it is now."""
        jobs = self.run(self.engine.store.find(JobQuery(tries=True, limit=1_000_000)))
        return {job.job_id: job for job in jobs}

    @initialize(target=workers, slots=st.integers(1, 3))
    def begin(self, slots: int) -> str:
        self.engine = Engine(MemoryLedger(), VirtualClock(T0))
        return self.join(slots)

    def settle(self, steps: int = 1) -> None:
        self.run(self.engine.let_pass(steps, list(self.model.workers)))
        self.model.settle(self.records())

    def tell(self, *messages: AnyMessage) -> None:
        self.run(self.engine.hear(*messages))
        self.settle()

    def result(self, job_id: str, state: JobState, attempt: int, worker: str | None) -> Finished:
        code = None if state is _S.SUCCEEDED else state.value
        return Finished(
            JobResult(
                job_id=job_id, status=state, attempt=attempt, worker_id=worker, error_code=code
            )
        )

    # -- users --------------------------------------------------------------------

    @rule(target=jobs, idempotent=st.booleans(), retries=st.integers(0, 2))
    def submit(self, idempotent: bool, retries: int) -> str:
        self.names += 1
        name = f"j{self.names}"
        policy = RetryPolicy(retries=retries, delay=0.0)
        request = a_request(name, idempotent=idempotent, retry=policy)
        (job,) = self.run(self.engine.gateway.submit([request]))
        self.model.jobs[name] = ModelJob(job.seq, idempotent, retries)
        (again,) = self.run(self.engine.gateway.submit([request]))
        assert again.job_id == name
        self.settle()
        return name

    @rule(job_id=jobs)
    def cancel(self, job_id: str) -> None:
        newest = self.newest(job_id)
        self.model.cancel(newest)
        job = self.run(self.engine.gateway.cancel(job_id, reason="", children=False))
        assert job.job_id == newest
        self.settle()

    def newest(self, job_id: str) -> str:
        while (successor := self.records()[job_id].successor) is not None:
            job_id = successor
        return job_id

    @rule(target=jobs, job_id=jobs)
    def retry(self, job_id: str) -> Any:
        newest = self.newest(job_id)
        old = self.model.jobs[newest]
        allowed = old.state in TERMINAL - {_S.SUCCEEDED}
        try:
            job = self.run(self.engine.gateway.retry(job_id))
        except Conflict:
            assert not allowed
            return multiple()
        assert allowed
        old.successor = True
        retries = job.request.retry.retries
        self.model.jobs[job.job_id] = ModelJob(job.seq, old.idempotent, retries, newest)
        self.settle()
        return job.job_id

    @rule(target=jobs, job_id=jobs)
    def look_at_the_retry(self, job_id: str) -> Any:
        successor = self.records()[job_id].successor
        return multiple() if successor is None else successor

    # -- workers ------------------------------------------------------------------

    @rule(target=workers, slots=st.integers(1, 3))
    def hire(self, slots: int) -> str:
        return self.join(slots)

    def join(self, slots: int) -> str:
        self.names += 1
        name = f"w{self.names}"
        self.model.workers[name] = slots
        self.tell(Handshake(name, "default", ("job.*",), slots, {}, session=name, link=1))
        return name

    def held(self, job_id: str) -> ModelJob | None:
        job = self.model.jobs[job_id]
        return job if self.model.is_held(job) and job.worker in self.model.workers else None

    @rule(job_id=jobs)
    def start(self, job_id: str) -> None:
        if (job := self.held(job_id)) is not None:
            job.state = _S.RUNNING
            self.tell(Started(job_id, job.attempt, job.worker or "", confirm=True))

    @rule(
        job_id=jobs,
        state=st.sampled_from([_S.SUCCEEDED, _S.FAILED, _S.TIMEOUT]),
        twice=st.booleans(),
    )
    def finish(self, job_id: str, state: JobState, twice: bool) -> None:
        if (job := self.held(job_id)) is not None:
            self.model.end(job_id, state)
            message = self.result(job_id, state, job.attempt, job.worker)
            self.tell(*[message] * (2 if twice else 1))

    @rule(job_id=jobs)
    def obey(self, job_id: str) -> None:
        job = self.held(job_id)
        if job is not None and job.asked_to_end:
            assert (job_id, job.attempt) in self.engine.bus.ends
            self.model.end(job_id, _S.CANCELLED)
            self.tell(self.result(job_id, _S.CANCELLED, job.attempt, job.worker))

    @rule(job_id=jobs)
    def hand_back(self, job_id: str) -> None:
        job = self.held(job_id)
        if job is not None and job.state is _S.DISPATCHED:
            job.orphaned = True
            self.tell(Returned(job_id, job.attempt, job.worker or "", "busy"))

    @rule(job_id=jobs, state=st.sampled_from([_S.SUCCEEDED, _S.FAILED]), late=st.integers(1, 2))
    def speak_too_late(self, job_id: str, state: JobState, late: int) -> None:
        job = self.model.jobs[job_id]
        attempt = job.attempt - late
        if attempt >= 1 or job.state in TERMINAL:
            self.tell(self.result(job_id, state, max(attempt, 0), "somebody"))

    @rule(worker=consumes(workers))
    def fall_silent(self, worker: str) -> None:
        if worker in self.model.workers:
            slots = self.model.workers.pop(worker)
            steps = int(LIMITS.lease / STEP)
            self.run(self.engine.let_pass(steps - 1, list(self.model.workers)))
            self.model.workers[worker] = slots
            self.model.settle(self.records())
            self.model.workers.pop(worker)
            self.run(self.engine.let_pass(2, list(self.model.workers)))
            self.model.lose(worker)
            self.settle()

    # -- engines ------------------------------------------------------------------

    @precondition(lambda self: self.names > 2)
    @rule(back=st.sets(st.integers(1, 30)))
    def restart(self, back: set[int]) -> None:
        """The engine dies and is started anew; some workers come back, others don't."""
        store = self.engine.store
        store.listeners.clear()
        self.engine = Engine(store, self.engine.clock)
        self.run(self.engine.restore())
        here = {name: slots for name, slots in self.model.workers.items() if int(name[1:]) in back}
        gone = self.model.workers.keys() - here.keys()
        for name, slots in here.items():
            held = tuple((i, self.model.jobs[i].attempt) for i in self.model.held_by(name))
            hello = Handshake(name, "default", ("job.*",), slots, {}, held, session=name, link=2)
            self.run(self.engine.scheduler.receive([hello]))
        for name in gone:
            self.model.lose(name)
        self.settle(int(LIMITS.lost_grace / STEP) + 2)

    # -- always -------------------------------------------------------------------

    @invariant()
    def every_job_is_where_the_model_says(self) -> None:
        for job_id, job in self.model.jobs.items():
            record = self.records()[job_id]
            assert (record.state, record.attempt) == (job.state, job.attempt), job_id
            assert record.cancel_requested is job.asked_to_end
            assert (record.successor is not None) is job.successor
            if job.parent is not None:
                assert record.request.parent_job_id == job.parent
        assert len(self.records()) == len(self.model.jobs)


EngineMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestEngine = EngineMachine.TestCase
