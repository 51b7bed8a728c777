"""Turns of the scheduler, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.ledgers import MemoryLedger

from penstock.control.ledger import Ledger
from penstock.control.open_jobs import OpenJobs
from penstock.control.reconciler import Reconciler
from penstock.control.safety import Rule, RuleSet, SafetyKernel
from penstock.control.scheduler import Scheduler
from penstock.control.workers import Roster
from penstock.core.errors import StoreFailed, Unstorable
from penstock.core.job import Job, JobRequest, Priority, Timeouts
from penstock.core.ledger import Answer, Change, Move
from penstock.core.verdict import Decision, SafetyVerdict
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports.bus import (
    HANDSHAKE,
    AnyMessage,
    Confirmed,
    Dispatch,
    Farewell,
    Finished,
    Handshake,
    Heartbeat,
    JobCancel,
    MemoryBus,
    Reintroduce,
    Returned,
    Settled,
    Started,
)
from penstock.ports.executor import PAUSED
from penstock.testing.aio import run_async
from penstock.testing.clock import LoopClock, VirtualClock, VirtualLoop
from penstock.testing.samples import T0, accept, failed, move, succeeded

_E, _S = JobEvent, JobState


class TellingBus:
    """Keeps what is published, by worker."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, AnyMessage]] = []

    def publish(self, subject: str, messages: Sequence[AnyMessage]) -> None:
        worker_id = subject.removeprefix("worker.").removesuffix(".jobs")
        self.sent.extend((worker_id, message) for message in messages)

    def subscribe(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


class StubbornStore(MemoryLedger):
    failures = 0
    read_failures = 0

    async def commit(self, *args: Any, **kwargs: Any) -> Any:
        self._maybe_fail()
        return await super().commit(*args, **kwargs)

    async def get(self, job_id: str) -> Job | None:
        self._maybe_fail_to_read()
        return await super().get(job_id)

    async def fetch(self, seqs: Sequence[int]) -> list[Job]:
        self._maybe_fail_to_read()
        return await super().fetch(seqs)

    def _maybe_fail(self) -> None:
        if self.failures:
            self.failures -= 1
            raise StoreFailed("no space")

    def _maybe_fail_to_read(self) -> None:
        if self.read_failures:
            self.read_failures -= 1
            raise StoreFailed("the disk refused to read")


class EagerClock(VirtualClock):
    """Nobody waits: a sleep is over at once, and took its time."""

    async def sleep(self, seconds: float) -> None:
        self.advance(seconds)


class SchedulerBench:
    def __init__(
        self, kernel: SafetyKernel | None = None, store: StubbornStore | None = None
    ) -> None:
        self.clock, self.bus = EagerClock(T0), TellingBus()
        self.store = store or StubbornStore()
        self.open_jobs = OpenJobs(Roster({}), self.clock.now)
        self.store.listen(self.open_jobs.observe)
        limits = Timeouts(lease=15, lost_grace=3)
        kernel = kernel or SafetyKernel()
        self.scheduler = Scheduler(self.store, self.bus, self.open_jobs, kernel, self.clock, limits)
        self.store.listen(self.scheduler.hear)
        self.reconciler = Reconciler(self.store, self.bus, self.open_jobs, self.clock, limits)

    async def turn(self, *messages: AnyMessage) -> list[AnyMessage]:
        """One turn with these messages; returns what it sent."""
        before = len(self.bus.sent)
        await self.scheduler.receive(list(messages))
        await self.scheduler.turn()
        return [message for _, message in self.bus.sent[before:]]

    async def greet(self, worker_id: str = "w1", **fields: Any) -> None:
        await self.turn(hello(worker_id, **fields))

    async def pass_time(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.5)):
            self.clock.advance(0.5)
            await self.reconciler.sweep()

    async def apply(self, *changes: Change) -> None:
        assert all(answer.moved for answer in await self.store.apply(changes))

    async def job(self, job_id: str = "a") -> Job:
        job = await self.store.get(job_id)
        assert job is not None
        return job


def hello(worker_id: str = "w1", **fields: Any) -> Handshake:
    return Handshake(worker_id, "default", ("job.*",), fields.pop("slots", 1), {}, **fields)


def kinds(messages: Sequence[AnyMessage]) -> list[type]:
    return [type(message) for message in messages]


# -- dispatch ---------------------------------------------------------------------


@pytest.mark.seed("001", "6.8")
@run_async
async def test_a_job_goes_to_a_worker_with_room_after_its_commit() -> None:
    site = SchedulerBench()
    await site.greet()
    await site.apply(accept("a"), accept("b"))
    (order,) = await site.turn()
    assert isinstance(order, Dispatch)
    assert (order.request.job_id, order.attempt) == ("a", 1)
    assert (await site.job("a")).state is _S.DISPATCHED
    assert (await site.job("b")).state is _S.SCHEDULED


def site_that_gives_at_once(kernel: SafetyKernel | None = None) -> SchedulerBench:
    site = SchedulerBench(kernel)
    site.store.dispatcher = site.scheduler
    return site


@run_async
async def test_a_job_goes_out_with_the_commit_that_accepts_it_if_a_worker_has_room() -> None:
    site = site_that_gives_at_once()
    await site.greet(slots=2)
    await site.apply(accept("a"))
    await site.apply(accept("b"))
    sent = [(who, m.request.job_id) for who, m in site.bus.sent if isinstance(m, Dispatch)]
    assert sent == [("w1", "a"), ("w1", "b")]
    assert [entry.event for entry in await site.store.history("a")] == [
        _E.ACCEPT,
        _E.SCHEDULE,
        _E.DISPATCH,
    ]
    assert len((await site.job("a")).pages) == 1
    assert site.open_jobs.waiting() == 0
    assert await site.turn() == []


@run_async
@pytest.mark.parametrize("waited", [False, True])
async def test_a_worker_that_reports_no_starts_has_begun_what_it_is_sent(waited: bool) -> None:
    bench = SchedulerBench()
    if not waited:  # else a turn gives it out, and not the commit that accepts it
        bench.store.dispatcher = bench.scheduler
        await bench.greet(reports_starts=False, slots=2)
    jobs = (accept(job_id="once"), accept(job_id="often", idempotent=True))
    await bench.apply(*jobs)
    if waited:
        await bench.greet(reports_starts=False, slots=2)
    sent = [message for _, message in bench.bus.sent if isinstance(message, Dispatch)]
    assert [(one.request.job_id, one.started) for one in sent] == [("once", True), ("often", False)]
    once, often = await bench.job("once"), await bench.job("often")
    assert (once.state, often.state) == (_S.RUNNING, _S.DISPATCHED)
    assert once.started_at == once.dispatched_at
    assert len(once.pages) == (2 if waited else 1)
    start = (await bench.store.history("once"))[-1]
    assert (start.event, start.actor, start.attempt) == (_E.START, "worker:w1", 1)
    assert not (await bench.store.verify()).mismatches


@run_async
async def test_jobs_for_which_there_is_not_room_enough_go_out_in_their_order() -> None:
    site = site_that_gives_at_once()
    await site.greet()
    await site.apply(accept("a"), accept("b", priority=Priority.CRITICAL))
    (order,) = await site.turn()
    assert isinstance(order, Dispatch)
    assert order.request.job_id == "b"


@pytest.mark.parametrize(
    "fields",
    [{"run_at": T0 + 60}, {"after": ("b",)}, {"deadline": T0 + 60}, {"topic": "other"}],
    ids=lambda fields: next(iter(fields)),
)
@run_async
async def test_what_must_wait_does_not_go_out_with_the_commit_that_accepts_it(
    fields: dict[str, Any],
) -> None:
    site = site_that_gives_at_once()
    await site.greet()
    await site.apply(accept("a", **fields))
    assert (await site.job("a")).state in (_S.PENDING, _S.SCHEDULED)


@run_async
async def test_a_job_that_finds_no_worker_is_scheduled_in_the_commit_that_accepts_it() -> None:
    site = site_that_gives_at_once()
    await site.apply(accept("a"), accept("b"))
    for job_id in "ab":
        job = await site.job(job_id)
        assert (job.state, job.version, len(job.pages)) == (_S.SCHEDULED, 2, 1)
    assert await site.turn() == []
    assert (await site.job("a")).version == 2, "the turn has nothing to add"
    await site.greet(slots=2)
    assert (await site.job("a")).state is (await site.job("b")).state is _S.DISPATCHED


@run_async
async def test_a_job_that_waits_for_another_is_not_scheduled_as_it_is_accepted() -> None:
    site = site_that_gives_at_once()
    await site.apply(accept("b"), accept("a", after=("b",)))
    assert (await site.job("a")).state is _S.PENDING


@run_async
async def test_nothing_passes_what_waits_already() -> None:
    site = site_that_gives_at_once()
    await site.greet()
    await site.apply(accept("a", topic="other"))
    await site.turn()
    await site.apply(accept("b"))
    assert (await site.job("b")).state is _S.SCHEDULED


@run_async
async def test_nothing_passes_what_waits_to_be_read_and_judged_again() -> None:
    site = site_that_gives_at_once()
    await site.greet()
    await site.apply(accept("a", topic="other"))
    await site.turn()
    site.open_jobs.judge_all_again()
    await site.apply(accept("b"))
    assert (await site.job("b")).state is _S.SCHEDULED


@pytest.mark.parametrize("how", ["lost", "forgotten", "pool paused", "topic paused"])
@run_async
async def test_a_worker_that_goes_or_pauses_during_a_turn_is_given_nothing(how: str) -> None:
    site = site_that_gives_at_once()
    await site.greet()
    roster = site.open_jobs.roster
    worker = roster.workers["w1"]

    async def meanwhile(seqs: Sequence[int]) -> list[Job]:
        match how:
            case "lost":
                roster.drain(worker)
            case "forgotten":
                roster.forget(worker)
            case "pool paused":
                roster.pause("default")
            case "topic paused":
                roster.set_facts("w1", "", {PAUSED: {"job.test": "no memory"}})
        await site.apply(accept("a"))
        return []

    site.open_jobs.unread[99] = None
    site.scheduler._waiting_jobs._store.fetch = meanwhile  # type: ignore[method-assign]
    await site.turn()
    assert (await site.job("a")).state in (_S.PENDING, _S.SCHEDULED)


@run_async
async def test_where_there_are_rules_a_job_is_judged_first() -> None:
    rules = RuleSet(Decision.ALLOW, (Rule("no", Decision.DENY, topics=("job.no",)),), "s1")
    site = site_that_gives_at_once(SafetyKernel(rules))
    await site.greet()
    await site.apply(accept("a", topic="job.no"), accept("b"))
    assert (await site.job("b")).state is _S.PENDING
    await site.turn()
    assert (await site.job("a")).state is _S.DENIED


@run_async
async def test_a_job_whose_commit_fails_is_not_sent_and_its_slot_is_free_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site = site_that_gives_at_once()
    await site.greet()
    with monkeypatch.context() as full_disk:
        full_disk.setattr(site.store.backend, "write", no_space)
        with pytest.raises(StoreFailed):
            await site.store.apply([accept("a")])
    assert kinds([message for _, message in site.bus.sent]).count(Dispatch) == 0
    await site.apply(accept("b"))
    assert (await site.job("b")).state is _S.DISPATCHED


async def no_space(*_: Any) -> None:
    raise StoreFailed("no space")


@run_async
async def test_a_finished_jobs_slot_is_filled_in_the_same_turn() -> None:
    site = SchedulerBench()
    await site.greet()
    await site.apply(accept("a"), accept("b"))
    await site.turn()
    sent = await site.turn(Finished(succeeded("a", worker_id="w1", attempt=1)))
    assert (await site.job("a")).state is _S.SUCCEEDED
    assert [m.request.job_id for m in sent if isinstance(m, Dispatch)] == ["b"]


@run_async
async def test_a_job_cancelled_before_it_was_judged_waits_no_more() -> None:
    site = SchedulerBench()
    await site.apply(accept("a"))
    await site.apply(move("a", _E.CANCEL))
    await site.turn()
    assert len(site.open_jobs.backlog) == 0
    assert not site.open_jobs.unjudged


@run_async
async def test_notes_on_ended_jobs_are_not_counted_as_ends() -> None:
    site = SchedulerBench()
    await site.apply(accept("a"), move("a", _E.CANCEL))
    await site.apply(move("a", _E.NOTE), move("a", _E.NOTE))
    assert site.open_jobs.finished == 1


@run_async
async def test_a_late_result_is_noted_and_changes_nothing() -> None:
    site = SchedulerBench()
    await site.greet()
    await site.apply(accept("a"))
    await site.turn()
    await site.turn(Finished(succeeded("a", worker_id="w1", attempt=1)))
    await site.turn(Finished(failed("a", worker_id="w1", attempt=1)))
    log = await site.store.history("a")
    assert (await site.job()).state is _S.SUCCEEDED
    assert log[-1].event is _E.NOTE
    assert "FAILED of attempt 1 ignored" in log[-1].reason


@run_async
async def test_a_result_of_an_old_attempt_is_noted_and_changes_nothing() -> None:
    site = SchedulerBench()
    await site.greet("w1")
    await site.apply(accept("a"))
    await site.turn()
    await site.greet("w2")
    await site.turn(Returned("a", 1, "w1", "busy"))
    assert (await site.job()).attempt == 2
    await site.turn(Finished(succeeded("a", worker_id="w1", attempt=1)))
    job = await site.job()
    assert (job.state, job.attempt) == (_S.DISPATCHED, 2)


# -- starts -----------------------------------------------------------------------


@run_async
async def test_a_start_is_confirmed_after_its_commit() -> None:
    site = SchedulerBench()
    await site.greet()
    await site.apply(accept("a"))
    await site.turn()
    sent = await site.turn(Started("a", 1, "w1", confirm=True))
    assert sent == [Confirmed((("a", 1),))]
    assert (await site.job()).state is _S.RUNNING


async def lost_before_its_start(site: SchedulerBench, **fields: Any) -> None:
    """w1 is given a job and falls silent until it is given up; the job waits again."""
    await site.greet("w1")
    await site.apply(accept("a", **fields))
    await site.turn()
    await site.pass_time(16)
    assert "a" in site.open_jobs.orphaned


@run_async
async def test_who_comes_back_and_starts_a_job_that_nobody_took_keeps_it() -> None:
    site = SchedulerBench()
    await lost_before_its_start(site)
    sent = await site.turn(Started("a", 1, "w1", confirm=True))
    assert Confirmed((("a", 1),)) in sent
    await site.greet("w2")
    await site.turn()
    job = await site.job()
    assert (job.state, job.attempt, job.worker_id) == (_S.RUNNING, 1, "w1")


@run_async
async def test_who_came_back_and_kept_its_job_can_be_lost_again() -> None:
    site = SchedulerBench()
    await lost_before_its_start(site)
    await site.turn(Started("a", 1, "w1", confirm=True))
    await site.pass_time(20)
    assert (await site.job()).state is _S.TIMEOUT


@run_async
async def test_who_comes_back_too_late_must_drop_the_job() -> None:
    site = SchedulerBench()
    await lost_before_its_start(site)
    await site.greet("w2")
    assert (await site.job()).attempt == 2
    sent = await site.turn(Started("a", 1, "w1", confirm=True))
    assert Confirmed((("a", 1),)) not in sent
    assert any(isinstance(m, JobCancel) and m.attempt == 1 for m in sent)


@run_async
async def test_a_running_job_that_may_not_run_twice_is_never_given_out_again() -> None:
    site = SchedulerBench()
    await site.greet("w1")
    await site.apply(accept("a"))
    await site.turn()
    await site.turn(Started("a", 1, "w1", confirm=True))
    await site.greet("w2")
    await site.pass_time(30)
    await site.turn()
    job = await site.job()
    assert (job.state, job.attempt) == (_S.TIMEOUT, 1)


# -- cancels ----------------------------------------------------------------------


@run_async
async def test_a_worker_is_told_to_end_what_a_user_cancels() -> None:
    site = SchedulerBench()
    await site.greet()
    await site.apply(accept("a"))
    await site.turn()
    await site.apply(move("a", _E.REQUEST_CANCEL, reason="enough"))
    _, order = site.bus.sent[-1]
    assert isinstance(order, JobCancel)
    assert (order.job_id, order.attempt, order.reason) == ("a", 1, "enough")


@run_async
async def test_a_job_that_was_asked_to_end_is_not_given_to_another_worker() -> None:
    site = SchedulerBench()
    await site.greet("w1")
    await site.apply(accept("a"))
    await site.turn()
    await site.apply(move("a", _E.REQUEST_CANCEL))
    await site.greet("w2")
    sent = await site.turn(Returned("a", 1, "w1", "busy"))
    assert Dispatch not in kinds(sent)
    await site.pass_time(1)
    assert (await site.job()).state is _S.CANCELLED


# -- workers ----------------------------------------------------------------------


@run_async
async def test_a_worker_that_was_given_up_is_asked_who_it_is() -> None:
    site = SchedulerBench()
    await lost_before_its_start(site)
    assert await site.turn(Heartbeat("w1")) == [Reintroduce()]


@run_async
async def test_a_worker_that_was_given_up_while_it_was_given_a_job_is_asked_as_well() -> None:
    site = SchedulerBench()
    await site.greet("w1")
    await site.pass_time(16)
    assert "w1" not in site.open_jobs.roster.workers
    # The commit of a dispatch that was under way:
    await site.apply(accept("a"), move("a", _E.SCHEDULE, _E.DISPATCH))
    assert Reintroduce() in await site.turn(Heartbeat("w1"))


@run_async
async def test_heartbeats_count_while_the_scheduler_waits_for_the_disk() -> None:
    """A worker is not dead because we were busy."""
    site = SchedulerBench()
    await site.greet()
    await site.apply(accept("a"))
    await site.turn()
    for _ in range(40):  # no turn is taken
        await site.pass_time(0.5)
        await site.scheduler.beat([Heartbeat("w1")])
    assert "w1" in site.open_jobs.roster.workers
    assert site.open_jobs.orphaned == {}


# -- trouble ----------------------------------------------------------------------


@pytest.mark.seed("001", "6.15")
@run_async
async def test_what_workers_said_is_not_lost_while_the_disk_refuses() -> None:
    site = SchedulerBench()
    await site.greet()
    await site.apply(accept("a"))
    await site.turn()
    site.store.failures = 3
    await site.turn(Finished(succeeded("a", worker_id="w1", attempt=1)))
    assert (await site.job()).state is _S.SUCCEEDED


@run_async
async def test_what_workers_said_is_not_lost_while_the_store_cannot_be_read() -> None:
    site = SchedulerBench()
    await site.greet()
    await site.apply(accept("a"))
    await site.turn()
    await site.apply(accept("b"), accept("c", after=("a",)))
    site.store.read_failures = 5
    await site.turn(Finished(succeeded("a", worker_id="w1", attempt=1)))
    assert site.store.read_failures == 0
    assert (await site.job("a")).state is _S.SUCCEEDED
    assert (await site.job("b")).state is _S.DISPATCHED
    assert (await site.job("c")).state is _S.SCHEDULED


class LosingStore(StubbornStore):
    """The reconciler gives the workers up while records are read."""

    site: SchedulerBench | None = None

    async def fetch(self, seqs: Sequence[int]) -> list[Job]:
        if (site := self.site) is not None:
            self.site = None
            await site.pass_time(16)
        return await super().fetch(seqs)


@run_async
async def test_a_job_whose_worker_is_lost_while_its_record_is_read_goes_to_another() -> None:
    site = SchedulerBench(store=(store := LosingStore()))
    await site.greet("w1")
    await site.apply(accept("a"))
    store.site = site
    assert Dispatch not in kinds(await site.turn())
    assert site.open_jobs.roster.workers == {}
    sent = await site.turn(hello("w2"))
    assert Dispatch in kinds(sent)
    assert (await site.job()).worker_id == "w2"


class StrictStore(StubbornStore):
    """Can't hold half a character, as no database can."""

    async def apply(self, changes: Sequence[Change]) -> list[Answer]:
        for change in changes:
            said = change.result.error_message if isinstance(change, Move) and change.result else ""
            if "\ud800" in (said or ""):
                raise Unstorable("job", "holds half a character")
        return await super().apply(changes)


@run_async
async def test_a_result_that_cannot_be_stored_costs_only_its_own_job() -> None:
    site = SchedulerBench(store=StrictStore())
    names = "abcde"
    await site.greet(slots=5)
    await site.apply(*map(accept, names))
    await site.turn()
    bad = replace(failed("c", worker_id="w1", attempt=1), error_message="\ud800")
    results = [succeeded(name, worker_id="w1", attempt=1) for name in names if name != "c"]
    await site.apply(accept("f"))
    await site.turn(*map(Finished, [*results[:2], bad, *results[2:]]))
    ends = {name: (await site.job(name)).state for name in names}
    assert ends == {name: _S.FAILED if name == "c" else _S.SUCCEEDED for name in names}
    failure = (await site.job("c")).result
    assert failure is not None
    assert failure.error_code == "RESULT_NOT_STORABLE"
    assert (await site.job("f")).state is _S.DISPATCHED


@run_async
async def test_a_message_that_makes_no_sense_is_dropped() -> None:
    site = SchedulerBench()
    await site.greet(slots=2)
    await site.apply(accept("a"), accept("b"))
    await site.turn()
    senseless = replace(succeeded("a", worker_id="w1", attempt=1), status=_S.PENDING)
    await site.turn(Finished(senseless), Finished(succeeded("b", worker_id="w1", attempt=1)))
    assert (await site.job("a")).state is _S.DISPATCHED
    assert (await site.job("b")).state is _S.SUCCEEDED


@run_async
async def test_new_topics_that_the_disk_refuses_are_remembered_later() -> None:
    site = SchedulerBench()
    site.store.failures = 1
    await site.greet()
    await site.turn()
    assert b"job.*" in (await site.store.recall("served") or b"")


class BrokenKernel(SafetyKernel):
    broken = True

    def decide(self, request: JobRequest) -> SafetyVerdict:
        if self.broken and request.job_id == "a":
            raise RuntimeError("no answer")
        return super().decide(request)


@run_async
async def test_a_kernel_that_cannot_answer_holds_only_the_job_it_was_asked_about() -> None:
    kernel = BrokenKernel()
    site = SchedulerBench(kernel)
    await site.greet(slots=2)
    await site.apply(accept("a"), accept("b"))
    sent = await site.turn()
    assert [m.request.job_id for m in sent if isinstance(m, Dispatch)] == ["b"]
    assert (await site.job()).state is _S.PENDING
    assert "no answer" in site.open_jobs.doubtful[1]
    kernel.broken = False
    sent = await site.turn()
    assert [m.request.job_id for m in sent if isinstance(m, Dispatch)] == ["a"]
    assert site.open_jobs.doubtful == {}


@run_async
async def test_a_job_in_doubt_that_is_too_late_is_asked_about_no_more() -> None:
    site = SchedulerBench(BrokenKernel())
    await site.apply(accept("a", deadline=T0 + 2))
    await site.turn()
    await site.pass_time(3)
    await site.turn()
    assert (await site.job()).state is _S.CANCELLED
    assert site.open_jobs.doubtful == {}
    assert not site.open_jobs.unjudged


@pytest.mark.parametrize("state", [_S.PENDING, _S.SCHEDULED])
@run_async
async def test_a_denied_job_never_reaches_a_worker(state: JobState) -> None:
    kernel = SafetyKernel(RuleSet(Decision.ALLOW, (Rule("no", Decision.DENY, reason="bad"),)))
    site = SchedulerBench(kernel)
    await site.greet()
    await site.apply(accept("a"))
    if state is _S.SCHEDULED:
        await site.apply(move("a", _E.SCHEDULE))
        site.open_jobs.unjudged.clear()
        site.open_jobs.restore([await site.job()])
    assert Dispatch not in kinds(await site.turn())
    job = await site.job()
    assert job.state is _S.DENIED
    assert job.result is not None
    assert job.result.error_message == "rule no: bad"


@pytest.mark.seed("001", "6.15")
@run_async
async def test_a_dispatch_that_lost_a_race_is_tried_again() -> None:
    site = SchedulerBench()
    await site.greet()
    await site.apply(accept("a"))
    commit = site.store.commit
    raced: list[Any] = []

    async def racing(changes: Sequence[Change], *rest: Any, **facts: Any) -> Any:
        if not raced:
            raced.append(True)
            await commit([move("a", _E.NOTE)])
        return await commit(changes, *rest, **facts)

    site.store.commit = racing  # type: ignore[method-assign]
    assert Dispatch not in kinds(await site.turn())
    assert Dispatch in kinds(await site.turn())


@run_async
async def test_a_worker_that_introduces_itself_once_more_keeps_what_is_on_its_way() -> None:
    site = SchedulerBench()
    await site.greet("w1", session="s", link=1)
    await site.apply(accept("a"))
    await site.turn()
    await site.turn(hello("w1", session="s", link=1))
    job = await site.job()
    assert (job.attempt, site.open_jobs.orphaned) == (1, {})
    assert site.open_jobs.roster.workers["w1"].held == {"a": 1}


@pytest.mark.parametrize("other", [{"session": "t", "link": 1}, {"session": "s", "link": 2}])
@run_async
async def test_a_worker_that_comes_back_without_a_job_lost_it(other: dict[str, Any]) -> None:
    site = SchedulerBench()
    await site.greet("w1", session="s", link=1)
    await site.apply(accept("a"))
    await site.turn()
    site.open_jobs.roster.set_missing(site.open_jobs.roster.workers["w1"], 0.0)
    await site.turn(hello("w1", **other))
    assert (await site.job()).attempt == 2


class SlowStore(StubbornStore):
    """Something else is committed before the caller hears of its own commit."""

    meanwhile: tuple[Change, ...] = ()

    async def commit(self, *args: Any, **kwargs: Any) -> Any:
        told = await super().commit(*args, **kwargs)
        if self.meanwhile:
            other, self.meanwhile = self.meanwhile, ()
            answers, _ = await super().commit(other)
            assert all(answer.moved for answer in answers)
        return told


def slow_site() -> SchedulerBench:
    site = SchedulerBench()
    site.store.__class__ = SlowStore
    return site


@run_async
async def test_a_job_that_ended_while_its_dispatch_was_committed_is_not_sent() -> None:
    site = slow_site()
    await site.greet()
    await site.apply(accept("a"))
    site.store.meanwhile = (move("a", _E.EXPIRE),)  # type: ignore[attr-defined]
    assert Dispatch not in kinds(await site.turn())


@run_async
async def test_a_job_cancelled_while_its_dispatch_was_committed_is_sent_to_be_ended() -> None:
    site = slow_site()
    await site.greet()
    await site.apply(accept("a"))
    site.store.meanwhile = (move("a", _E.REQUEST_CANCEL),)  # type: ignore[attr-defined]
    assert kinds(await site.turn())[-2:] == [Dispatch, JobCancel]


@run_async
async def test_a_start_that_was_overtaken_by_the_jobs_end_is_not_confirmed() -> None:
    site = slow_site()
    await site.greet()
    await site.apply(accept("a"))
    await site.turn()
    site.store.meanwhile = (move("a", _E.EXPIRE),)  # type: ignore[attr-defined]
    sent = await site.turn(Started("a", 1, "w1", confirm=True))
    assert kinds(sent) == [JobCancel]


@run_async
async def test_a_job_sent_after_a_worker_introduced_itself_is_not_missed_by_it() -> None:
    """It reconnects while a commit is stuck; the dispatch goes over the new connection."""
    site = SchedulerBench()
    await site.greet("w1", session="s", link=1)
    await site.apply(accept("a"))
    commit = site.store.commit

    async def stuck(changes: Sequence[Change], *rest: Any, **facts: Any) -> Any:
        await site.scheduler.meet([hello("w1", session="s", link=2)])
        site.store.commit = commit  # type: ignore[method-assign]
        return await commit(changes, *rest, **facts)

    site.store.commit = stuck  # type: ignore[method-assign]
    assert Dispatch in kinds(await site.turn())
    await site.turn()
    job = await site.job()
    assert (job.attempt, site.open_jobs.orphaned) == (1, {})
    assert site.open_jobs.roster.workers["w1"].held == {"a": 1}


@run_async
async def test_a_worker_that_we_do_not_know_may_forget_its_results_all_the_same() -> None:
    site = SchedulerBench()
    await site.apply(accept("a"), move("a", _E.CANCEL))
    sent = await site.turn(Finished(succeeded("a", worker_id="w9", attempt=1)))
    assert sent == [Settled((("a", 1),))]


@run_async
async def test_a_start_that_is_in_the_book_is_not_given_to_another() -> None:
    site = SchedulerBench()
    site.scheduler.intake._losses._starts = Starts({("a", 1)})
    await site.greet("w1", session="s")
    await site.apply(accept("a"))
    await site.turn()
    site.open_jobs.roster.set_missing(site.open_jobs.roster.workers["w1"], 0.0)
    await site.turn(hello("w1", session="another"))
    assert (await site.job()).state is _S.TIMEOUT


class Starts:
    folder = "starts"

    def __init__(self, begun: set[tuple[str, int]]) -> None:
        self._begun = begun

    def revoke(self, job_id: str, attempt: int) -> bool:
        return (job_id, attempt) not in self._begun


@run_async
async def test_a_farewell_that_comes_twice_takes_nothing_from_who_still_works() -> None:
    site = SchedulerBench()
    await site.greet()
    await site.apply(accept("a"))
    await site.turn()
    await site.turn(Farewell("w1"), Farewell("w1"))
    await site.pass_time(1)
    assert site.open_jobs.orphaned == {}
    assert site.open_jobs.roster.workers["w1"].status == "draining"


@pytest.mark.seed("001", "6.9")
@run_async
async def test_what_never_reached_a_worker_that_is_gone_goes_to_another() -> None:
    site = SchedulerBench()
    await site.greet()
    await site.apply(accept("a"))
    await site.turn()
    await site.turn(Farewell("w1"), Farewell("w1", gone=True))
    await site.pass_time(1)
    assert "a" in site.open_jobs.orphaned


@run_async
async def test_a_result_that_waits_for_the_disk_is_not_overtaken_by_the_loss_of_its_worker() -> (
    None
):
    site = SchedulerBench()
    site.reconciler._has_word_from = site.scheduler.has_word_from
    await site.greet()
    await site.apply(accept("a"))
    await site.turn()
    await site.turn(Started("a", 1, "w1", confirm=True))
    commit = site.store.commit
    done = Finished(succeeded("a", worker_id="w1", attempt=1))

    async def stuck(changes: Sequence[Change], *rest: Any, **facts: Any) -> Any:
        site.store.commit = commit  # type: ignore[method-assign]
        await site.pass_time(20)  # its lease runs out while the commit is stuck
        return await commit(changes, *rest, **facts)

    site.store.commit = stuck  # type: ignore[method-assign]
    await site.turn(done)
    assert (await site.job()).state is _S.SUCCEEDED


@run_async
async def test_a_worker_that_has_come_back_is_not_lost_before_that_is_read() -> None:
    site = SchedulerBench()
    site.reconciler._has_word_from = site.scheduler.has_word_from
    await site.greet(session="s", link=1)
    await site.apply(accept("a"))
    await site.turn()
    site.open_jobs.roster.set_missing(site.open_jobs.roster.workers["w1"], site.clock.monotonic())
    await site.scheduler.meet([hello("w1", session="s", link=2, held=(("a", 1),))])
    await site.pass_time(10)
    assert site.open_jobs.orphaned == {}
    await site.turn()
    assert site.open_jobs.roster.workers["w1"].ready


def test_a_delayed_job_starts_at_its_time_though_the_clock_was_set() -> None:
    """As after a computer has slept: its wall clock went on, and its timers did not."""
    loop = VirtualLoop()

    async def scenario() -> None:
        clock, store, bus = LoopClock(loop, T0), MemoryLedger(), MemoryBus()
        open_jobs = OpenJobs(Roster({}), clock.now)
        store.listen(open_jobs.observe)
        scheduler = Scheduler(store, bus, open_jobs, SafetyKernel(), clock, Timeouts())
        running = asyncio.ensure_future(scheduler.run())
        await asyncio.sleep(1)
        bus.publish(HANDSHAKE, [Handshake("w1", "default", ("job.*",), 1, {})])
        await store.apply([accept("a", run_at=T0 + 3600)])
        await asyncio.sleep(10)
        clock.jump(3600)
        await asyncio.sleep(2)
        job = await store.get("a")
        assert job is not None
        assert job.state is _S.DISPATCHED
        running.cancel()
        await asyncio.wait([running])
        await bus.close()

    loop.run_until_complete(scenario())
    loop.close()


# -- commits that are shared ------------------------------------------------------


def count_commits(store: Ledger) -> list[int]:
    """How many commits there were, as they come."""
    commits: list[int] = []
    store.listen(lambda strides: commits.append(len(strides)))
    return commits


@run_async
async def test_jobs_that_no_worker_has_room_for_are_scheduled_together() -> None:
    site = SchedulerBench()
    site.scheduler.bus = MemoryBus()
    running = asyncio.create_task(site.scheduler.run())
    await asyncio.sleep(0)
    commits = count_commits(site.store)
    for n in range(50):
        await site.apply(accept(f"j{n}"))
    async with asyncio.timeout(10):
        while (await site.job("j49")).state is not JobState.SCHEDULED:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert len(commits) < 75
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@run_async
async def test_the_scheduler_shares_the_flush_of_who_submits_in_a_loop() -> None:
    site = SchedulerBench()
    await site.apply(accept("a"))
    await site.apply(accept("b"))  # at once after the answer
    commits = count_commits(site.store)
    turn = asyncio.create_task(site.scheduler.turn())
    while not site.scheduler._gather_until:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await site.apply(accept("c"))
    await turn
    assert len(commits) == 1
    assert (await site.job("a")).state is JobState.SCHEDULED
    turn = asyncio.create_task(site.scheduler.turn())
    async with asyncio.timeout(10):
        await turn  # nobody comes, and it does not wait for long
    assert (await site.job("c")).state is JobState.SCHEDULED


@run_async
async def test_a_ledger_that_closes_commits_what_waits_for_company() -> None:
    site = SchedulerBench()
    await site.apply(accept("a"))
    await site.apply(accept("b"))
    turn = asyncio.create_task(site.scheduler.turn())
    while not site.scheduler._gather_until:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await site.store.close()
    await turn
