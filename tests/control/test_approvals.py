"""Who may approve a job, and what an approval is bound to."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.ledgers import MemoryLedger

from penstock.control.approvals import ApprovalService
from penstock.control.guard import Guard
from penstock.control.safety import RuleSet, SafetyKernel
from penstock.core.errors import Conflict, NotFound, NotPermitted, StaleApproval
from penstock.core.job import request_hash
from penstock.core.verdict import ApprovalTerms, Decision, Hold
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports.engine_api import Caller, KeyRole
from penstock.testing.aio import run_async
from penstock.testing.clock import VirtualClock
from penstock.testing.samples import T0, a_request, accept, move

_E, _S = JobEvent, JobState


class Bench:
    """A store with one job, `a`, that alice submitted and that awaits approval."""

    def __init__(self) -> None:
        self.store, self.clock = MemoryLedger(), VirtualClock(T0)
        self.kernel = SafetyKernel(RuleSet(Decision.ALLOW, snapshot="s1"))

    def by(self, name: str) -> ApprovalService:
        """What somebody with the role can do."""
        guard = Guard(Caller(name, frozenset({KeyRole.APPROVE})), self.store, self.clock)
        return ApprovalService(self.store, self.kernel, self.clock, guard)

    async def park(self, **terms: Any) -> Hold:
        request = a_request("a", principal="alice")
        hold = Hold("ask", "s1", request_hash(request), T0, T0 + 3600, ApprovalTerms(**terms))
        await self.store.apply(
            [
                accept("a", principal="alice"),
                move("a", _E.SCHEDULE, _E.PARK, hold=hold),
            ]
        )
        return hold

    async def votes(self) -> list[str]:
        job = await self.store.get("a")
        assert job is not None
        assert job.hold is not None
        return [vote.by for vote in job.hold.votes]


@run_async
async def test_a_yes_is_kept_with_who_when_and_why() -> None:
    bench = Bench()
    await bench.park()
    bench.clock.advance(5)
    job = await bench.by("bob").approve("a", reason="looked at it")
    assert job.hold is not None
    assert [(v.by, v.at, v.reason) for v in job.hold.votes] == [("bob", T0 + 5, "looked at it")]
    assert job.hold.approved
    last = (await bench.store.history("a"))[-1]
    assert (last.event, last.actor) == (_E.APPROVE, "gateway:bob")
    assert "looked at it" in last.reason


@run_async
async def test_two_of_three_need_two_different_people() -> None:
    bench = Bench()
    await bench.park(needed=2)
    assert not (await bench.by("bob").approve("a")).hold.approved  # type: ignore[union-attr]
    with pytest.raises(Conflict, match="bob has approved job a already"):
        await bench.by("bob").approve("a")
    assert (await bench.by("carol").approve("a")).hold.approved  # type: ignore[union-attr]
    assert await bench.votes() == ["bob", "carol"]


@run_async
async def test_who_submitted_it_may_not_approve_it() -> None:
    bench = Bench()
    await bench.park()
    with pytest.raises(NotPermitted, match="alice submitted job a and may not approve it"):
        await bench.by("alice").approve("a")
    assert await bench.votes() == []


@run_async
async def test_a_rule_may_let_who_submitted_it_approve_it() -> None:
    bench = Bench()
    await bench.park(self_approval=True)
    await bench.by("alice").approve("a")
    assert await bench.votes() == ["alice"]


@run_async
async def test_only_who_is_asked_may_answer() -> None:
    bench = Bench()
    await bench.park(approvers=("ops-*", "carol"))
    for say in (bench.by("bob").approve, bench.by("bob").reject):
        with pytest.raises(NotPermitted, match="bob is not an approver") as refused:
            await say("a")
        assert refused.value.hint == "approvers: ops-*, carol"
    await bench.by("ops-7").approve("a")
    assert await bench.votes() == ["ops-7"]


@run_async
async def test_a_yes_to_what_other_rules_parked_is_stale() -> None:
    bench = Bench()
    await bench.park()
    with pytest.raises(StaleApproval, match="is held by the rules s1, not s0"):
        await bench.by("bob").approve("a", snapshot="s0")
    bench.kernel.use(RuleSet(Decision.ALLOW, snapshot="s2"))
    with pytest.raises(StaleApproval, match="the rules changed"):
        await bench.by("bob").approve("a", snapshot="s1")
    assert await bench.votes() == []


@run_async
async def test_a_yes_to_another_request_is_stale() -> None:
    bench = Bench()
    hold = await bench.park()
    other = replace(hold, request_hash=request_hash(a_request("a", principal="mallory")))
    await bench.store.apply([move("a", _E.PARK, hold=other)])
    with pytest.raises(StaleApproval, match="changed since it was held"):
        await bench.by("bob").approve("a")


@run_async
async def test_a_yes_that_comes_too_late_is_refused() -> None:
    bench = Bench()
    await bench.park()
    bench.clock.advance(3600)
    with pytest.raises(StaleApproval, match="the time to approve job a has expired"):
        await bench.by("bob").approve("a")


@run_async
async def test_a_yes_to_what_is_not_parked_is_a_conflict() -> None:
    bench = Bench()
    with pytest.raises(NotFound):
        await bench.by("bob").approve("a")
    await bench.park()
    await bench.by("bob").approve("a")
    with pytest.raises(Conflict, match="has all the approvals"):
        await bench.by("carol").approve("a")
    await bench.store.apply([move("a", _E.DISPATCH)])
    with pytest.raises(Conflict, match="a is DISPATCHED and not awaiting approval"):
        await bench.by("carol").approve("a")


@run_async
async def test_a_no_ends_the_job_denied_by_the_scheduler_at_somebodys_word() -> None:
    bench = Bench()
    await bench.park()
    job = await bench.by("bob").reject("a", reason="too risky")
    assert job.state is _S.DENIED
    assert job.result is not None
    assert job.result.error_code == "APPROVAL_REJECTED"
    assert job.result.error_message == "rejected by bob: too risky"
    assert (await bench.store.history("a"))[-1].actor == "scheduler:bob"
