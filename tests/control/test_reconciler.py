"""What the reconciler finds wrong, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.ledgers import MemoryLedger

from penstock.control.open_jobs import OpenJobs
from penstock.control.reconciler import (
    Finding,
    Lost,
    Overdue,
    Reconciler,
    TooLate,
    findings,
    held_until,
)
from penstock.control.workers import Roster
from penstock.core.errors import StoreFailed
from penstock.core.job import Job, RetryPolicy, Timeouts
from penstock.core.ledger import Change
from penstock.core.verdict import Constraints, Decision, SafetyVerdict
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports.bus import Handshake, MemoryBus
from penstock.testing.aio import run_async
from penstock.testing.clock import VirtualClock
from penstock.testing.samples import T0, a_job, accept, move

LIMITS = Timeouts(
    timeout=100, dispatch_timeout=30, lease=15, lost_grace=3, kill_grace=5, max_attempts=2
)
SLACK = 2.0
_E, _S = JobEvent, JobState


def board_of(*jobs: Job) -> OpenJobs:
    open_jobs = OpenJobs(Roster({}), lambda: T0)
    open_jobs.restore(jobs)
    while open_jobs.unjudged:
        open_jobs.queue(open_jobs.unjudged.popitem()[1])
    return open_jobs


def found(open_jobs: OpenJobs, *, after: float, monotonic: float | None = None) -> list[Finding]:
    """What is wrong a while after everything was first seen."""
    held = held_until(open_jobs, LIMITS, T0, 0.0, {})
    passed = after if monotonic is None else monotonic
    return list(findings(open_jobs, LIMITS, T0 + after, passed, held))


def codes(open_jobs: OpenJobs, *, after: float) -> list[str]:
    return [
        finding.code for finding in found(open_jobs, after=after) if isinstance(finding, Overdue)
    ]


# -- limits of held jobs ----------------------------------------------------------


@pytest.mark.parametrize(("fields", "limit"), [({}, 30.0), ({"dispatch_timeout": 7.0}, 7.0)])
def test_what_was_not_started_in_time_is_overdue(fields: dict[str, Any], limit: float) -> None:
    open_jobs = board_of(a_job(state=_S.DISPATCHED, **fields))
    assert codes(open_jobs, after=limit) == []
    assert codes(open_jobs, after=limit + 0.001) == ["NOT_STARTED"]


@pytest.mark.parametrize(("fields", "limit"), [({}, 100.0), ({"timeout": 9.0}, 9.0)])
def test_a_worker_gets_grace_to_end_what_ran_too_long_itself(
    fields: dict[str, Any], limit: float
) -> None:
    open_jobs = board_of(a_job(state=_S.RUNNING, **fields))
    patience = limit + LIMITS.kill_grace + SLACK
    assert codes(open_jobs, after=patience) == []
    assert codes(open_jobs, after=patience + 0.001) == ["TIMEOUT"]


def test_a_job_runs_no_longer_than_the_safety_rules_let_it() -> None:
    constraints = Constraints(max_runtime=4.0)
    verdict = SafetyVerdict(Decision.ALLOW_WITH_CONSTRAINTS, "r", "s", constraints=constraints)
    open_jobs = board_of(replace(a_job(state=_S.RUNNING, timeout=50.0), verdict=verdict))
    patience = 4 + LIMITS.kill_grace + SLACK
    assert codes(open_jobs, after=patience) == []
    (overdue,) = found(open_jobs, after=patience + 0.001)
    assert isinstance(overdue, Overdue)
    assert (overdue.code, overdue.why) == ("TIMEOUT", "it ran for more than 4 s")


@pytest.mark.parametrize("state", [_S.DISPATCHED, _S.RUNNING])
def test_a_deadline_holds_for_whatever_a_worker_holds(state: JobState) -> None:
    open_jobs = board_of(a_job(state=state, deadline=T0 + 4))
    patience = 4 + LIMITS.kill_grace + SLACK
    assert codes(open_jobs, after=patience) == []
    assert codes(open_jobs, after=patience + 0.001) == ["DEADLINE_EXCEEDED"]


def test_a_started_job_is_not_held_to_the_time_of_its_dispatch() -> None:
    assert codes(board_of(a_job(state=_S.RUNNING)), after=31) == []


def test_a_job_between_workers_is_not_overdue() -> None:
    open_jobs = board_of(job := a_job(state=_S.DISPATCHED))
    open_jobs.orphan(job, "lost")
    assert codes(open_jobs, after=1000) == []


# -- deadlines of waiting jobs ----------------------------------------------------


@pytest.mark.seed("001", "6.3")
@pytest.mark.parametrize("state", [_S.PENDING, _S.SCHEDULED])
def test_a_waiting_job_is_too_late_when_its_deadline_passes(state: JobState) -> None:
    open_jobs = board_of(a_job(state=state, deadline=T0 + 4, seq=7))
    assert found(open_jobs, after=3.9) == []
    assert found(open_jobs, after=4) == [TooLate(7)]


def test_a_job_that_safety_cannot_judge_is_too_late_as_well() -> None:
    open_jobs = OpenJobs(Roster({}), lambda: T0)
    open_jobs.restore([a_job(deadline=T0 + 4, seq=7)])
    open_jobs.doubtful[7] = "the kernel failed"
    assert found(open_jobs, after=5) == [TooLate(7)]


@pytest.mark.seed("001", "6.3")
def test_a_job_between_workers_is_too_late_when_its_deadline_passes() -> None:
    open_jobs = board_of(job := a_job(state=_S.RUNNING, deadline=T0 + 4, seq=7))
    open_jobs.orphan(job, "lost")
    assert found(open_jobs, after=5) == [TooLate(7)]


# -- workers ----------------------------------------------------------------------


def worker_on(open_jobs: OpenJobs, **fields: Any) -> None:
    record = open_jobs.roster.worker("w")
    for name, value in fields.items():
        setattr(record, name, value)


def lost(open_jobs: OpenJobs, monotonic: float) -> bool:
    return any(
        isinstance(finding, Lost) for finding in found(open_jobs, after=0, monotonic=monotonic)
    )


@pytest.mark.seed("001", "6.10")
def test_a_worker_is_lost_when_its_lease_ran_out_in_silence() -> None:
    worker_on(open_jobs := board_of(), heard_at=100.0)
    assert not lost(open_jobs, 115.0)
    assert lost(open_jobs, 115.001)


def test_a_worker_that_lost_its_connection_has_time_to_come_back() -> None:
    worker_on(open_jobs := board_of(), heard_at=100.0, missing_since=100.0)
    assert not lost(open_jobs, 102.9)
    assert lost(open_jobs, 103.0)


def test_a_worker_in_our_own_process_is_not_lost_by_silence() -> None:
    worker_on(open_jobs := board_of(), local=True)
    assert not lost(open_jobs, 1e9)
    worker_on(open_jobs, missing_since=float("-inf"))
    assert lost(open_jobs, 0.0)


# -- mending ----------------------------------------------------------------------


class FailingStore(MemoryLedger):
    failing = False

    async def apply(self, changes: Any) -> Any:
        if self.failing:
            raise StoreFailed("no space")
        return await super().apply(changes)


class ReconcilerBench:
    """A reconciler with everything that it needs, and one worker that holds one job."""

    def __init__(self) -> None:
        self.clock, self.store, self.bus = VirtualClock(T0), FailingStore(), MemoryBus()
        self.open_jobs = OpenJobs(Roster({}), self.clock.now)
        self.store.listen(self.open_jobs.observe)
        self.reconciler = Reconciler(self.store, self.bus, self.open_jobs, self.clock, LIMITS)

    def greet(self, worker_id: str = "w1") -> None:
        hello = Handshake(worker_id, "default", ("job.*",), 1, {})
        self.open_jobs.roster.greet(hello, self.clock.monotonic())

    async def hold(self, *events: JobEvent, **fields: Any) -> None:
        self.greet()
        await self.apply(accept("a", **fields), move("a", _E.SCHEDULE, _E.DISPATCH))
        self.open_jobs.unjudged.clear()
        await self.apply(*(move("a", event) for event in events))

    async def apply(self, *changes: Change) -> None:
        assert all(answer.moved for answer in await self.store.apply(changes))

    async def pass_time(self, seconds: float) -> None:
        """As its own loop would: a look every interval."""
        for _ in range(int(seconds / 0.5)):
            self.clock.advance(0.5)
            await self.reconciler.sweep()

    async def job(self) -> Job:
        job = await self.store.get("a")
        assert job is not None
        return job


@run_async
async def test_a_lost_workers_unstarted_job_waits_for_another_worker() -> None:
    site = ReconcilerBench()
    await site.hold()
    await site.pass_time(16)
    assert (await site.job()).state is _S.DISPATCHED
    assert "a" in site.open_jobs.orphaned
    assert "w1" not in site.open_jobs.roster.workers


@run_async
async def test_a_lost_workers_running_job_ends_unless_it_may_run_again() -> None:
    site = ReconcilerBench()
    await site.hold(_E.START, retry=RetryPolicy(retries=1))
    await site.pass_time(16)
    job = await site.job()
    assert job.state is _S.TIMEOUT
    assert job.result is not None
    assert job.result.error_code == "WORKER_LOST"
    assert job.successor is not None


@pytest.mark.seed("001", "6.2")
@run_async
async def test_an_idempotent_job_is_repeated_so_often_and_no_more() -> None:
    site = ReconcilerBench()
    await site.hold(_E.START, idempotent=True)
    await site.pass_time(16)
    assert "a" in site.open_jobs.orphaned
    site.greet("w1")
    await site.apply(move("a", _E.REDISPATCH))
    await site.pass_time(16)
    assert (await site.job()).state is _S.TIMEOUT


@run_async
async def test_a_lost_workers_job_that_was_asked_to_end_is_cancelled() -> None:
    site = ReconcilerBench()
    await site.hold(_E.START, _E.REQUEST_CANCEL)
    await site.pass_time(16)
    assert (await site.job()).state is _S.CANCELLED


@run_async
async def test_a_job_between_workers_that_is_asked_to_end_is_cancelled() -> None:
    site = ReconcilerBench()
    await site.hold()
    await site.pass_time(16)
    await site.apply(move("a", _E.REQUEST_CANCEL))
    await site.pass_time(1)
    assert (await site.job()).state is _S.CANCELLED


@run_async
async def test_a_lost_worker_is_not_forgotten_before_its_jobs_are_mended() -> None:
    site = ReconcilerBench()
    await site.hold(_E.START)
    site.clock.advance(0.5)
    site.store.failing = True
    for _ in range(40):
        site.clock.advance(0.5)
        try:
            await site.reconciler.sweep()
        except StoreFailed:
            break
    site.store.failing = False
    await site.pass_time(1)
    assert (await site.job()).state is _S.TIMEOUT


@run_async
async def test_workers_are_not_blamed_for_a_reconciler_that_overslept() -> None:
    site = ReconcilerBench()
    await site.hold(_E.START, timeout=10_000)
    await site.pass_time(1)
    site.clock.advance(3600)
    await site.reconciler.sweep()
    await site.pass_time(10)
    assert (await site.job()).state is _S.RUNNING
    await site.pass_time(5)
    assert (await site.job()).state is _S.TIMEOUT


@run_async
async def test_a_wall_clock_that_jumps_loses_no_worker() -> None:
    site = ReconcilerBench()
    await site.hold(_E.START, timeout=10_000)
    site.clock.jump(3600)
    await site.pass_time(10)
    site.clock.jump(-7200)
    await site.pass_time(4)
    assert (await site.job()).state is _S.RUNNING
    assert "w1" in site.open_jobs.roster.workers


@pytest.mark.parametrize("jump", [7200.0, -7200.0])
@pytest.mark.parametrize(
    ("events", "fields", "limit", "code"),
    [
        ((), {"dispatch_timeout": 40}, 40.0, "NOT_STARTED"),
        ((_E.START,), {"timeout": 40}, 47.0, "TIMEOUT"),
        ((_E.START,), {"deadline": T0 + 40}, 47.0, "DEADLINE_EXCEEDED"),
    ],
)
@run_async
async def test_a_held_job_ends_at_its_limit_however_the_wall_clock_is_set(
    events: tuple[JobEvent, ...], fields: dict[str, Any], limit: float, code: str, jump: float
) -> None:
    site = ReconcilerBench()
    await site.hold(*events, **fields)
    site.open_jobs.roster.worker("w1").local = True
    await site.pass_time(1)
    site.clock.jump(jump)
    await site.pass_time(limit - 1)
    assert not (await site.job()).is_final
    await site.pass_time(1)
    job = await site.job()
    assert job.state is _S.TIMEOUT
    assert job.result is not None
    assert job.result.error_code == code


@run_async
async def test_a_job_that_runs_is_not_ended_because_the_clock_was_set_before_a_restart() -> None:
    site = ReconcilerBench()
    await site.hold(_E.START, timeout=40)
    site.clock.jump(7200)
    again = OpenJobs(Roster({}), site.clock.now)
    again.restore(await site.store.unfinished())
    again.roster.worker("w1").local = True
    site.reconciler = Reconciler(site.store, site.bus, again, site.clock, LIMITS)
    await site.pass_time(40)
    assert (await site.job()).state is _S.RUNNING


@pytest.mark.seed("001", "4.8")
@run_async
async def test_a_waiting_job_that_is_too_late_is_cancelled() -> None:
    site = ReconcilerBench()
    await site.apply(accept("a", deadline=T0 + 2))
    site.open_jobs.queue(site.open_jobs.unjudged.popitem()[1])
    await site.pass_time(3)
    job = await site.job()
    assert job.state is _S.CANCELLED
    assert job.result is not None
    assert job.result.error_code == "DEADLINE_EXCEEDED"
    assert len(site.open_jobs.backlog) == 0
