"""The gate, turn by turn: verdicts, approvals, limits, parents and paused pools."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.ledgers import MemoryLedger

from penstock.control.approvals import hold_of
from penstock.control.backlog import QueueKey
from penstock.control.open_jobs import OpenJobs
from penstock.control.reconciler import Reconciler
from penstock.control.safety import ALLOW_ALL, Rule, RuleSet, SafetyKernel
from penstock.control.scheduler import Scheduler
from penstock.control.workers import Roster, why_waiting
from penstock.core.job import Job, JobRequest, ParentPolicy, RetryPolicy, Timeouts
from penstock.core.ledger import BulkMove, Change, Move
from penstock.core.verdict import ApprovalTerms, Constraints, Decision, Rate, SafetyVerdict, Vote
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports.bus import AnyMessage, Dispatch, Finished, Handshake, MemoryBus, Returned
from penstock.ports.engine_api import Limit
from penstock.ports.store import JobQuery
from penstock.testing.aio import run_async
from penstock.testing.clock import VirtualClock
from penstock.testing.samples import T0, accept, failed, move, succeeded

_E, _S = JobEvent, JobState


class GateBench:
    """A control plane without its loops: turns are taken by hand."""

    def __init__(
        self,
        *rules: Rule,
        store: MemoryLedger | None = None,
        clock: VirtualClock | None = None,
        kernel: SafetyKernel | None = None,
    ) -> None:
        self.clock = clock or VirtualClock(T0)
        self.store = store or MemoryLedger()
        self.bus = MemoryBus()
        self.sent: list[Dispatch] = []
        self.bus.publish = self._publish  # type: ignore[method-assign]
        self.open_jobs = OpenJobs(Roster({}), self.clock.now)
        self.store.listen(self.open_jobs.observe)
        self.kernel = kernel or SafetyKernel(rule_set(*rules) if rules else ALLOW_ALL)
        limits = Timeouts(lease=1e6, lost_grace=3)
        self.scheduler = Scheduler(
            self.store,
            self.bus,
            self.open_jobs,
            self.kernel,
            self.clock,
            limits,
            chance=lambda: 0.0,
        )
        self.store.listen(self.scheduler.hear)
        self.reconciler = Reconciler(self.store, self.bus, self.open_jobs, self.clock, limits)

    def _publish(self, subject: str, messages: Sequence[AnyMessage]) -> None:
        self.sent.extend(message for message in messages if isinstance(message, Dispatch))

    async def turn(self, *messages: AnyMessage, turns: int = 1) -> list[str]:
        """Take turns; returns the ids of the jobs that went out."""
        before = len(self.sent)
        await self.scheduler.receive(list(messages))
        for _ in range(turns):
            await self.scheduler.turn()
        return [order.request.job_id for order in self.sent[before:]]

    async def settle(self, *messages: AnyMessage) -> list[str]:
        """Take turns until there is nothing to do at once."""
        out = await self.turn(*messages)
        for _ in range(1000):
            if not self.scheduler._wake.is_set():
                return out
            out += await self.turn()
        raise AssertionError("it never comes to rest")

    async def greet(self, slots: int = 10, worker_id: str = "w1", pool: str = "default") -> None:
        await self.settle(Handshake(worker_id, pool, ("job.*",), slots, {}))

    async def submit(self, *changes: Change) -> None:
        assert all(answer.moved for answer in await self.store.apply(changes))

    async def job(self, job_id: str = "a") -> Job:
        job = await self.store.get(job_id)
        assert job is not None
        return job

    async def vote(self, by: str, job_id: str = "a") -> None:
        job = await self.job(job_id)
        assert job.hold is not None
        voted = replace(job.hold, votes=(*job.hold.votes, Vote(by, self.clock.now())))
        actor = f"gateway:{by}"
        await self.submit(Move(job_id, (_E.APPROVE,), actor, self.clock.now(), hold=voted))

    async def use(self, *rules: Rule, snapshot: str) -> None:
        self.kernel.use(rule_set(*rules, snapshot=snapshot))
        self.scheduler.rejudge()

    async def end(self, job_id: str, *, well: bool = True, **fields: Any) -> list[str]:
        job = await self.job(job_id)
        result = succeeded if well else failed
        said = result(job_id, worker_id=job.worker_id, attempt=job.attempt, **fields)
        return await self.settle(Finished(said))

    async def restarted(self) -> GateBench:
        """Another engine on the same store."""
        self.store.listeners.clear()
        site = GateBench(store=self.store, clock=self.clock, kernel=self.kernel)
        site.open_jobs.restore(await self.store.unfinished())
        for record in site.open_jobs.roster.workers.values():
            site.open_jobs.roster.set_missing(record, self.clock.monotonic())
        return site


def rule_set(*rules: Rule, snapshot: str = "s1") -> RuleSet:
    return RuleSet(Decision.ALLOW, rules, snapshot)


ASK = Rule(
    "ask",
    Decision.REQUIRE_APPROVAL,
    reason="it is big",
    approval=ApprovalTerms(needed=2, expires=100.0),
)
DENY = Rule("no", Decision.DENY, reason="never")


# -- verdicts ---------------------------------------------------------------------


@run_async
async def test_without_rules_no_verdict_is_kept() -> None:
    site = GateBench()
    await site.greet(slots=1)
    await site.submit(accept("a"), accept("b"))
    await site.settle()
    assert (await site.job("a")).verdict is None
    assert (await site.job("b")).verdict is None
    assert (await site.job("a")).version == 3


@run_async
async def test_a_verdict_rides_with_the_move_that_follows_from_it() -> None:
    site = GateBench(Rule("fine", Decision.ALLOW, topics=("job.test",)))
    await site.greet(slots=1)
    await site.submit(accept("a"), accept("b"))
    await site.settle()
    for job_id, version in (("a", 3), ("b", 2)):
        job = await site.job(job_id)
        assert job.verdict == SafetyVerdict(Decision.ALLOW, "fine", "s1")
        assert job.version == version


@run_async
async def test_a_denied_job_keeps_the_verdict_that_denied_it() -> None:
    site = GateBench(DENY)
    await site.submit(accept("a"))
    await site.settle()
    job = await site.job()
    assert job.state is _S.DENIED
    assert job.verdict == SafetyVerdict(Decision.DENY, "no", "s1", "never")
    assert (await site.store.history("a"))[-1].reason == "rule no: never"


@run_async
async def test_a_restart_with_the_same_rules_writes_nothing() -> None:
    site = GateBench(replace(ASK, topics=("job.big",)), Rule("fine", Decision.ALLOW))
    await site.submit(
        accept("a"), accept("b", topic="job.big"), accept("c", after=("a",)), accept("d")
    )
    await site.settle()
    before = {job.job_id: job.version for job in await site.store.unfinished()}
    again = await site.restarted()
    await again.settle()
    assert {job.job_id: job.version for job in await again.store.unfinished()} == before
    assert len(again.open_jobs.awaiting_approval) == 1
    assert again.open_jobs.waiting() == 4


@run_async
async def test_a_waiting_job_is_judged_again_and_the_new_verdict_is_kept() -> None:
    site = GateBench(Rule("fine", Decision.ALLOW))
    await site.submit(accept("a"), accept("b"))
    await site.settle()
    quick = Rule(
        "quick",
        Decision.ALLOW_WITH_CONSTRAINTS,
        constraints=Constraints(max_runtime=5.0),
        topics=("job.test",),
    )
    await site.use(quick, snapshot="s2")
    await site.settle()
    job = await site.job()
    assert job.verdict is not None
    assert (job.verdict.rule_id, job.verdict.snapshot) == ("quick", "s2")
    assert (await site.store.history("a"))[-1].event is _E.NOTE
    await site.greet(slots=1)
    assert site.sent[-1].constraints == Constraints(max_runtime=5.0)
    assert site.sent[-1].timeout == 5.0


@run_async
async def test_a_job_whose_rules_are_gone_is_free_of_them() -> None:
    site = GateBench(
        Rule("quick", Decision.ALLOW_WITH_CONSTRAINTS, constraints=Constraints(max_runtime=5.0))
    )
    await site.submit(accept("a"))
    await site.settle()
    site.kernel.use(ALLOW_ALL)
    site.scheduler.rejudge()
    await site.settle()
    await site.greet()
    assert site.sent[-1].constraints is None


@run_async
async def test_what_waits_is_denied_when_the_rules_say_so_now() -> None:
    site = GateBench(Rule("fine", Decision.ALLOW))
    await site.submit(
        accept("a"), accept("b", run_at=T0 + 50), accept("c", after=("a",)), accept("d")
    )
    await site.settle()
    await site.use(DENY, snapshot="s2")
    await site.greet()
    for job_id in "abcd":
        job = await site.job(job_id)
        assert (job.state, job.attempt) == (_S.DENIED, 0)


@run_async
async def test_nothing_goes_out_between_new_rules_and_judging_again() -> None:
    site = GateBench(Rule("fine", Decision.ALLOW))
    await site.submit(*(accept(f"j{n}") for n in range(5000)))
    await site.settle()
    await site.use(DENY, snapshot="s2")
    await site.greet(slots=5000)
    assert site.sent == []
    assert site.open_jobs.waiting() == 0


@run_async
async def test_what_a_worker_has_is_not_judged_again() -> None:
    site = GateBench(Rule("fine", Decision.ALLOW))
    await site.greet(slots=1)
    await site.submit(accept("a"))
    await site.settle()
    await site.use(DENY, snapshot="s2")
    assert await site.settle(Returned("a", 1, "w1", "busy")) == ["a"]
    assert (await site.job()).state is _S.DISPATCHED


class FailingKernel(SafetyKernel):
    broken = True

    def decide(self, request: JobRequest) -> SafetyVerdict:
        if self.broken:
            raise RuntimeError("no answer")
        return super().decide(request)


@pytest.mark.seed("001", "6.11")
@pytest.mark.parametrize("rule", [Rule("fine", Decision.ALLOW), DENY, ASK])
@run_async
async def test_a_kernel_error_is_no_verdict_and_passes(rule: Rule) -> None:
    kernel = FailingKernel(rule_set(rule))
    site = GateBench(kernel=kernel)
    await site.greet()
    await site.submit(*(accept(f"j{n}") for n in range(3000)))
    for _ in range(3):
        await site.turn(turns=3)
        site.clock.advance(1)
    jobs = await site.store.unfinished()
    assert {job.state for job in jobs} == {_S.PENDING}
    assert len(site.open_jobs.doubtful) == len(jobs) == 3000
    kernel.broken = False
    await site.settle()
    job = await site.job("j0")
    assert job.verdict is not None
    assert job.verdict.decision is rule.decision
    assert site.open_jobs.doubtful == {}


@pytest.mark.seed("001", "6.11")
@run_async
async def test_a_kernel_that_fails_over_parked_jobs_neither_frees_nor_ends_them() -> None:
    kernel = FailingKernel(rule_set(ASK))
    kernel.broken = False
    site = GateBench(kernel=kernel)
    await site.greet()
    await site.submit(accept("a"))
    await site.settle()
    kernel.broken = True
    site.scheduler.rejudge()
    await site.settle()
    await site.vote("ann")
    await site.vote("bob")
    await site.settle()
    assert (await site.job()).state is _S.SCHEDULED
    kernel.broken = False
    assert await site.settle() == ["a"]


# -- approvals --------------------------------------------------------------------


@run_async
async def test_a_job_that_needs_approval_is_parked_and_goes_when_it_has_it() -> None:
    site = GateBench(ASK)
    await site.greet()
    await site.submit(accept("a"))
    assert await site.settle() == []
    job = await site.job()
    assert job.state is _S.SCHEDULED
    assert job.hold == hold_of(job.verdict, job.request, T0)  # type: ignore[arg-type]
    assert list(site.open_jobs.awaiting_approval) == [job.seq]
    why = site.open_jobs.why(job, T0)
    assert why is not None
    assert why.startswith("awaiting 2 approvals")
    await site.vote("ann")
    assert await site.settle() == []
    await site.vote("bob")
    assert await site.settle() == ["a"]
    assert not site.open_jobs.awaiting_approval


@run_async
async def test_an_approval_under_other_rules_counts_for_nothing() -> None:
    site = GateBench(ASK)
    await site.greet()
    await site.submit(accept("a"))
    await site.settle()
    await site.vote("ann")
    await site.use(ASK, snapshot="s2")
    await site.settle()
    hold = (await site.job()).hold
    assert hold is not None
    assert (hold.snapshot, hold.votes) == ("s2", ())
    await site.vote("bob")
    assert await site.settle() == []


@run_async
async def test_rules_that_change_after_the_last_vote_ask_again() -> None:
    """An approved job that waits for a worker is not past the gate yet."""
    site = GateBench(ASK)
    await site.submit(accept("a"))
    await site.settle()
    await site.vote("ann")
    await site.vote("bob")
    await site.settle()
    await site.use(ASK, snapshot="s2")
    await site.greet()
    assert site.sent == []
    assert len(site.open_jobs.awaiting_approval) == 1


@run_async
async def test_an_approved_job_is_still_approved_after_a_restart() -> None:
    site = GateBench(ASK)
    await site.submit(accept("a"), accept("b"))
    await site.settle()
    await site.vote("ann", "a")
    await site.vote("bob", "a")
    await site.vote("ann", "b")
    await site.settle()
    version = (await site.job()).version
    again = await site.restarted()
    site.clock.advance(50)
    await again.settle()
    assert (await again.job()).version == version
    await again.vote("bob", "b")
    await again.greet()
    assert sorted(order.request.job_id for order in again.sent) == ["a", "b"]


@run_async
async def test_rules_that_ask_nobody_any_more_let_a_parked_job_go() -> None:
    site = GateBench(ASK)
    await site.submit(accept("a"))
    await site.settle()
    await site.use(Rule("fine", Decision.ALLOW), snapshot="s2")
    await site.settle()
    job = await site.job()
    assert job.hold is not None
    assert job.hold.approved, "nobody is to be asked about it any more"
    await site.use(ASK, snapshot="s1")
    await site.greet()
    assert site.sent == []
    hold = (await site.job()).hold
    assert hold is not None
    assert not hold.approved


@run_async
async def test_a_job_that_nobody_approved_in_time_is_denied() -> None:
    site = GateBench(ASK)
    await site.greet()
    await site.submit(accept("a"), accept("b"))
    await site.settle()
    await site.vote("ann", "a")
    site.clock.advance(99.9)
    await site.settle()
    assert (await site.job()).state is _S.SCHEDULED
    site.clock.advance(0.2)
    await site.settle()
    for job_id, votes in (("a", 1), ("b", 0)):
        job = await site.job(job_id)
        assert job.state is _S.DENIED
        assert job.result is not None
        assert job.result.error_code == "APPROVAL_EXPIRED"
        assert f"{votes} of 2 approvals" in (job.result.error_message or "")
        log = await site.store.history(job_id)
        assert (log[-1].actor, log[-1].event) == ("scheduler", _E.DENY)
    assert site.open_jobs.waiting() == 0


@run_async
async def test_a_hold_that_ended_while_the_engine_was_away_is_over() -> None:
    site = GateBench(ASK)
    await site.submit(accept("a"))
    await site.settle()
    site.clock.advance(1000)
    again = await site.restarted()
    await again.settle()
    assert (await again.job()).state is _S.DENIED


@run_async
async def test_the_last_vote_that_comes_while_the_expiry_is_committed_wins() -> None:
    site = GateBench(ASK)
    await site.greet()
    await site.submit(accept("a"))
    await site.settle()
    await site.vote("ann")
    site.clock.advance(101)
    commit = site.store.commit

    async def racing(changes: Sequence[Change], *rest: Any, **facts: Any) -> Any:
        site.store.commit = commit  # type: ignore[method-assign]
        await site.vote("bob")
        return await commit(changes, *rest, **facts)

    site.store.commit = racing  # type: ignore[method-assign]
    assert await site.settle() == ["a"]


@run_async
async def test_the_scheduler_wakes_by_itself_when_a_hold_ends() -> None:
    site = GateBench(ASK)
    service = asyncio.ensure_future(site.scheduler.run())
    await site.submit(accept("a"))
    for _ in range(20):
        await asyncio.sleep(0)
    while (wakes_in := site.clock.next_wake()) is not None:
        assert (await site.job()).state is _S.SCHEDULED
        site.clock.advance(wakes_in)
        for _ in range(20):
            await asyncio.sleep(0)
    assert site.clock.monotonic() == 100.0
    assert (await site.job()).state is _S.DENIED
    service.cancel()


@run_async
async def test_a_parked_job_can_be_cancelled_and_can_be_too_late() -> None:
    site = GateBench(ASK)
    await site.submit(accept("a"), accept("b", deadline=T0 + 10), accept("c"))
    await site.settle()
    await site.submit(move("a", _E.CANCEL))
    site.clock.advance(11)
    await site.reconciler.sweep()
    await site.settle()
    assert (await site.job("a")).state is _S.CANCELLED
    late = await site.job("b")
    assert late.result is not None
    assert (late.state, late.result.error_code) == (_S.CANCELLED, "DEADLINE_EXCEEDED")
    assert [job.job_id for job in site.open_jobs.awaiting_approval.values()] == ["c"]


# -- limits -----------------------------------------------------------------------


def limited(**fields: Any) -> Limit:
    return Limit(name=fields.pop("name", "l"), **fields)


@run_async
async def test_no_more_are_with_workers_than_a_limit_says() -> None:
    site = GateBench()
    site.open_jobs.limiter.use([limited(key=("tenant",), concurrency=2)])
    await site.greet()
    await site.submit(*(accept(f"j{n}", tenant="t") for n in range(5)), accept("u", tenant="u"))
    assert sorted(await site.settle()) == ["j0", "j1", "u"]
    said = site.open_jobs.why(await site.job("j2"), T0)
    assert said == "limit l for t is reached: 2 of 2 running"
    assert await site.end("j0") == ["j2"]
    assert await site.end("j1", well=False) == ["j3"]


@run_async
async def test_a_job_between_two_workers_is_still_counted() -> None:
    site = GateBench()
    site.open_jobs.limiter.use([limited(concurrency=1)])
    await site.greet(slots=5)
    await site.submit(accept("a"), accept("b"))
    assert await site.settle() == ["a"]
    assert await site.settle(Returned("a", 1, "w1", "busy")) == ["a"]
    site.open_jobs.roster.pause("default")
    await site.settle(Returned("a", 2, "w1", "busy"))
    site.open_jobs.roster.resume("default")
    site.scheduler.nudge()
    assert await site.settle() == ["a"]
    assert (await site.job("b")).state is _S.SCHEDULED
    assert await site.end("a") == ["b"]


@run_async
async def test_a_restarted_engine_counts_what_workers_hold() -> None:
    site = GateBench()
    site.open_jobs.limiter.use([limited(concurrency=2)])
    await site.greet()
    await site.submit(*(accept(f"j{n}") for n in range(4)))
    await site.settle()
    again = await site.restarted()
    again.open_jobs.limiter.use([limited(concurrency=2)])
    await again.greet(worker_id="w2")
    assert again.sent == []
    assert await again.end("j0") == ["j2"]


@run_async
async def test_a_rate_holds_jobs_back_and_the_scheduler_wakes_when_it_opens() -> None:
    site = GateBench()
    site.open_jobs.limiter.use([limited(rate=Rate(2, 10.0))])
    await site.greet()
    await site.submit(*(accept(f"j{n}") for n in range(5)))
    assert await site.settle() == ["j0", "j1"]
    assert site.open_jobs.why(await site.job("j2"), T0) == (
        "limit l is reached: 2/10s, next in 10.0 s"
    )
    assert site.open_jobs.limiter.opens_in() == 10.0
    assert await site.end("j0") == []
    site.clock.advance(10)
    assert await site.settle() == ["j2", "j3"]


@run_async
async def test_a_throttling_rule_holds_its_tenants_jobs_to_its_rate() -> None:
    slow = Rule("slow", Decision.THROTTLE, rate=Rate(1, 60.0), topics=("job.slow",))
    site = GateBench(slow)
    await site.greet()
    await site.submit(
        accept("a", topic="job.slow"),
        accept("b", topic="job.slow"),
        accept("c", topic="job.slow", tenant="other"),
        accept("d"),
    )
    assert sorted(await site.settle()) == ["a", "c", "d"]
    site.clock.advance(60)
    assert await site.settle() == ["b"]


@run_async
async def test_a_rules_number_of_running_jobs_is_kept_over_a_restart() -> None:
    few = Rule("few", Decision.ALLOW_WITH_CONSTRAINTS, constraints=Constraints(max_concurrent=1))
    site = GateBench(few)
    await site.greet()
    await site.submit(accept("a"), accept("b"), accept("c"))
    assert await site.settle() == ["a"]
    again = await site.restarted()
    await again.greet(worker_id="w2")
    assert again.sent == []
    assert await again.end("a") == ["b"]


@run_async
async def test_limits_that_change_hold_from_the_next_dispatch_on() -> None:
    site = GateBench()
    limiter = site.open_jobs.limiter
    limiter.use([limited(concurrency=3)])
    await site.greet()
    await site.submit(*(accept(f"j{n}") for n in range(8)))
    assert len(await site.settle()) == 3
    limiter.use([limited(concurrency=1)])
    assert await site.settle() == []
    assert await site.end("j0") == []
    assert await site.end("j1") == []
    assert await site.end("j2") == ["j3"]
    limiter.use([limited(concurrency=2), limited(name="k", key=("label:k",), concurrency=1)])
    assert await site.settle() == []
    limiter.use([])
    assert len(await site.settle()) == 4


@run_async
async def test_a_dispatch_that_was_overtaken_leaves_its_room_to_the_next() -> None:
    site = GateBench()
    site.open_jobs.limiter.use([limited(concurrency=1)])
    await site.submit(accept("a"), accept("b"))
    await site.settle()
    commit = site.store.commit

    async def racing(
        changes: Sequence[Change],
        bulk: Sequence[BulkMove] = (),
        facts: Any = None,
        *,
        patient: bool = False,
    ) -> Any:
        if any(_E.DISPATCH in one.events for one in bulk):
            site.store.commit = commit  # type: ignore[method-assign]
            await commit([move("a", _E.CANCEL)])
        return await commit(changes, bulk, facts, patient=patient)

    site.store.commit = racing  # type: ignore[method-assign]
    await site.greet()
    assert [order.request.job_id for order in site.sent] == ["b"]


@run_async
async def test_waiting_jobs_are_counted_whatever_they_wait_for() -> None:
    site = GateBench(replace(ASK, topics=("job.big",)))
    site.open_jobs.limiter.use([limited(max_waiting=100)])
    await site.greet(slots=1)
    await site.submit(accept("a"), accept("b"), accept("c", topic="job.big"))
    await site.submit(accept("d", after=("b",)), accept("e", run_at=T0 + 50))
    await site.settle()

    def waiting() -> int:
        (view,) = site.open_jobs.limiter.views(T0)
        return sum(use.waiting for use in view.uses)

    assert (waiting(), site.open_jobs.waiting()) == (4, 4)
    site.scheduler.rejudge()
    await site.settle()
    assert (waiting(), site.open_jobs.waiting()) == (4, 4)
    site.open_jobs.limiter.use([limited(max_waiting=50)])
    await site.settle()
    assert (waiting(), site.open_jobs.waiting()) == (4, 4)
    await site.end("a")
    assert (waiting(), site.open_jobs.waiting()) == (3, 3)
    await site.submit(move("c", _E.CANCEL), move("e", _E.CANCEL))
    assert (waiting(), site.open_jobs.waiting()) == (1, 1)


# -- after ------------------------------------------------------------------------


@run_async
async def test_a_job_waits_for_its_parents_and_then_goes() -> None:
    site = GateBench()
    await site.greet()
    await site.submit(accept("p"), accept("q"), accept("a", after=("p", "q")))
    assert await site.settle() == ["p", "q"]
    job = await site.job()
    assert job.state is _S.SCHEDULED
    assert site.open_jobs.why(job, T0) == "it waits for p (DISPATCHED), q (DISPATCHED)"
    assert await site.end("p") == []
    assert await site.end("q") == ["a"]


@run_async
async def test_a_job_whose_parents_have_ended_already_goes_at_once() -> None:
    site = GateBench()
    await site.greet()
    await site.submit(accept("p"))
    await site.settle()
    await site.end("p")
    await site.submit(accept("a", after=("p",)))
    assert await site.turn() == ["a"]


@pytest.mark.seed("001", "4.8", "6.14")
@run_async
async def test_a_parent_that_fails_cancels_its_children_and_theirs() -> None:
    site = GateBench()
    await site.greet()
    await site.submit(
        accept("p"),
        accept("a", after=("p",)),
        accept("b", after=("a",)),
        accept("c", after=("b",), if_parent_fails=ParentPolicy.RUN),
    )
    await site.settle()
    assert await site.end("p", well=False) == ["c"]
    job = await site.job()
    assert job.result is not None
    assert (job.state, job.result.error_code) == (_S.CANCELLED, "PARENT_FAILED")
    assert job.result.error_message == "job p, which it waits for, ended FAILED"
    log = await site.store.history("a")
    assert log[-1].actor == "reconciler"
    assert (await site.job("b")).state is _S.CANCELLED


@run_async
async def test_a_retried_parent_is_waited_for() -> None:
    site = GateBench()
    await site.greet()
    policy = RetryPolicy(retries=1, delay=0.0)
    await site.submit(accept("p", retry=policy), accept("a", after=("p",)))
    await site.settle()
    (again,) = await site.end("p", well=False)
    assert (await site.job()).state is _S.SCHEDULED
    assert site.open_jobs.why(await site.job(), T0) == f"it waits for {again} (DISPATCHED)"
    assert await site.end(again) == ["a"]


@run_async
async def test_the_retry_of_a_child_does_not_wait_again() -> None:
    site = GateBench()
    await site.greet()
    policy = RetryPolicy(retries=1, delay=0.0)
    await site.submit(accept("p"))
    await site.settle()
    await site.end("p")
    await site.submit(accept("a", after=("p",), retry=policy))
    await site.settle()
    await site.store.prune(T0 + 1e6, 10)
    (again,) = await site.end("a", well=False)
    assert (await site.job(again)).state is _S.DISPATCHED


@run_async
async def test_a_parent_that_is_gone_counts_as_one_that_failed() -> None:
    site = GateBench()
    await site.greet()
    await site.submit(accept("a", after=("gone",)))
    await site.settle()
    job = await site.job()
    assert job.result is not None
    assert job.state is _S.CANCELLED
    assert job.result.error_message == "job gone, which it waits for, is not in the store any more"


@run_async
async def test_a_restarted_engine_looks_parents_up() -> None:
    site = GateBench()
    await site.greet()
    await site.submit(
        accept("p"),
        accept("q"),
        accept("r"),
        accept("a", after=("p",)),
        accept("b", after=("q",)),
        accept("c", after=("r",)),
    )
    await site.settle()
    site.store.listeners.clear()
    await site.submit(move("p", _E.START, _E.SUCCEED, result=succeeded("p")))
    await site.submit(move("q", _E.START, _E.FAIL, result=failed("q")))
    again = await site.restarted()
    await again.greet(worker_id="w2")
    assert [order.request.job_id for order in again.sent] == ["a"]
    assert (await again.job("b")).state is _S.CANCELLED
    assert (await again.job("c")).state is _S.SCHEDULED
    assert await again.end("r") == ["c"]


@run_async
async def test_thousands_of_children_are_ended_in_bounded_commits() -> None:
    site = GateBench()
    await site.greet()
    await site.submit(accept("p"), *(accept(f"c{n}", after=("p",)) for n in range(3000)))
    await site.settle()
    sizes: list[int] = []
    commit = site.store.commit

    async def counting(changes: Sequence[Change], *args: Any, **kwargs: Any) -> Any:
        sizes.append(len(changes))
        return await commit(changes, *args, **kwargs)

    site.store.commit = counting  # type: ignore[method-assign]
    await site.end("p", well=False)
    assert site.open_jobs.waiting() == 0
    assert max(sizes) <= 501
    assert {job.state for job in await site.store.find(JobQuery(limit=10_000))} == {
        _S.FAILED,
        _S.CANCELLED,
    }


@run_async
async def test_thousands_of_children_go_when_their_parent_has_ended() -> None:
    site = GateBench()
    await site.greet(slots=4000)
    await site.submit(accept("p"), *(accept(f"c{n}", after=("p",)) for n in range(3000)))
    await site.settle()
    assert len(await site.end("p")) == 3000


@run_async
async def test_a_parked_child_is_cancelled_with_its_parent_and_goes_after_both() -> None:
    site = GateBench(replace(ASK, topics=("job.big",)))
    await site.greet()
    await site.submit(accept("p"), accept("q"))
    await site.submit(
        accept("a", topic="job.big", after=("p",)), accept("b", topic="job.big", after=("q",))
    )
    await site.settle()
    assert len(site.open_jobs.awaiting_approval) == 2
    await site.end("p", well=False)
    assert (await site.job("a")).state is _S.CANCELLED
    assert await site.end("q") == []
    await site.vote("ann", "b")
    await site.vote("bob", "b")
    assert await site.settle() == ["b"]


@run_async
async def test_an_approved_child_still_waits_for_its_parent() -> None:
    site = GateBench(replace(ASK, topics=("job.big",)))
    await site.greet()
    await site.submit(accept("p"), accept("a", topic="job.big", after=("p",)))
    await site.settle()
    await site.vote("ann")
    await site.vote("bob")
    assert await site.settle() == []
    await site.use(replace(ASK, topics=("job.other",)), snapshot="s2")
    assert await site.settle() == []
    assert await site.end("p") == ["a"]


@run_async
async def test_a_child_that_is_too_late_or_cancelled_waits_no_more() -> None:
    site = GateBench()
    await site.greet()
    await site.submit(
        accept("p"), accept("a", after=("p",), deadline=T0 + 5), accept("b", after=("p",))
    )
    await site.settle()
    await site.submit(move("b", _E.CANCEL))
    site.clock.advance(6)
    await site.reconciler.sweep()
    assert (await site.job("a")).state is _S.CANCELLED
    assert await site.end("p") == []
    assert not site.open_jobs.dependencies.members


# -- pools ------------------------------------------------------------------------


@run_async
async def test_a_paused_pool_is_given_nothing_new() -> None:
    site = GateBench()
    await site.greet(worker_id="w1", pool="one")
    await site.greet(worker_id="w2", pool="two", slots=1)
    site.open_jobs.roster.pause("one")
    await site.submit(accept("a"), accept("b"))
    assert await site.settle() == ["a"]
    assert (await site.job("a")).pool == "two"
    roster = site.open_jobs.roster
    roster.pause("two")
    said = why_waiting(
        QueueKey.of(await site.job("b")), roster.workers.values(), roster.pools, roster.paused
    )
    assert said == "the pools one, two are paused"
    roster.resume("one")
    roster.resume("two")
    site.scheduler.nudge()
    assert await site.settle() == ["b"]
