"""Who may let a parked job pass, and what a yes is bound to."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from penstock.adapters.memory.store import MemoryStore
from penstock.control.approvals import ApprovalBox
from penstock.control.safety import RuleSet, SafetyKernel
from penstock.core.errors import Conflict, NotFound, NotPermitted, StaleApproval
from penstock.core.policy import request_hash
from penstock.core.verdict import ApprovalTerms, Decision, Hold
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.testing.aio import run_async
from penstock.testing.clock import VirtualClock
from penstock.testing.samples import T0, a_request, accept, move

_E, _S = JobEvent, JobState


class Box:
    """A box for approvals, and one parked job, `a`, that alice submitted."""

    def __init__(self) -> None:
        self.store, self.clock = MemoryStore(), VirtualClock(T0)
        self.kernel = SafetyKernel(RuleSet(Decision.ALLOW, snapshot="s1"))
        self.box = ApprovalBox(self.store, self.kernel, self.clock)

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
    desk = Box()
    await desk.park()
    desk.clock.advance(5)
    job = await desk.box.approve("a", by="bob", reason="looked at it")
    assert job.hold is not None
    assert [(v.by, v.at, v.reason) for v in job.hold.votes] == [("bob", T0 + 5, "looked at it")]
    assert job.hold.approved
    last = (await desk.store.history("a"))[-1]
    assert (last.event, last.actor) == (_E.APPROVE, "gateway:bob")
    assert "looked at it" in last.reason


@run_async
async def test_two_of_three_need_two_different_people() -> None:
    desk = Box()
    await desk.park(needed=2)
    assert not (await desk.box.approve("a", by="bob")).hold.approved  # type: ignore[union-attr]
    with pytest.raises(Conflict, match="bob has approved job a already"):
        await desk.box.approve("a", by="bob")
    assert (await desk.box.approve("a", by="carol")).hold.approved  # type: ignore[union-attr]
    assert await desk.votes() == ["bob", "carol"]


@run_async
async def test_who_submitted_it_may_not_approve_it() -> None:
    desk = Box()
    await desk.park()
    with pytest.raises(NotPermitted, match="alice submitted job a and may not approve it"):
        await desk.box.approve("a", by="alice")
    assert await desk.votes() == []


@run_async
async def test_a_rule_may_let_who_submitted_it_approve_it() -> None:
    desk = Box()
    await desk.park(self_approval=True)
    await desk.box.approve("a", by="alice")
    assert await desk.votes() == ["alice"]


@run_async
async def test_only_who_is_asked_may_answer() -> None:
    desk = Box()
    await desk.park(approvers=("ops-*", "carol"))
    for say in (desk.box.approve, desk.box.reject):
        with pytest.raises(NotPermitted, match="bob is not asked") as refused:
            await say("a", by="bob")
        assert refused.value.hint == "it waits for ops-*, carol"
    await desk.box.approve("a", by="ops-7")
    assert await desk.votes() == ["ops-7"]


@run_async
async def test_a_yes_to_what_other_rules_parked_is_stale() -> None:
    desk = Box()
    await desk.park()
    with pytest.raises(StaleApproval, match="waits under the rules s1, not s0"):
        await desk.box.approve("a", by="bob", snapshot="s0")
    desk.kernel.use(RuleSet(Decision.ALLOW, snapshot="s2"))
    with pytest.raises(StaleApproval, match="the rules changed"):
        await desk.box.approve("a", by="bob", snapshot="s1")
    assert await desk.votes() == []


@run_async
async def test_a_yes_to_another_request_is_stale() -> None:
    desk = Box()
    hold = await desk.park()
    other = replace(hold, request_hash=request_hash(a_request("a", principal="mallory")))
    await desk.store.apply([move("a", _E.PARK, hold=other)])
    with pytest.raises(StaleApproval, match="not what it was"):
        await desk.box.approve("a", by="bob")


@run_async
async def test_a_yes_that_comes_too_late_is_refused() -> None:
    desk = Box()
    await desk.park()
    desk.clock.advance(3600)
    with pytest.raises(StaleApproval, match="the time to approve job a is over"):
        await desk.box.approve("a", by="bob")


@run_async
async def test_a_yes_to_what_is_not_parked_is_a_conflict() -> None:
    desk = Box()
    with pytest.raises(NotFound):
        await desk.box.approve("a", by="bob")
    await desk.park()
    await desk.box.approve("a", by="bob")
    with pytest.raises(Conflict, match="has all the approvals"):
        await desk.box.approve("a", by="carol")
    await desk.store.apply([move("a", _E.DISPATCH)])
    with pytest.raises(Conflict, match="a is DISPATCHED and waits for nobody's approval"):
        await desk.box.approve("a", by="carol")


@run_async
async def test_a_no_ends_the_job_denied_by_the_scheduler_at_somebodys_word() -> None:
    desk = Box()
    await desk.park()
    job = await desk.box.reject("a", by="bob", reason="too risky")
    assert job.state is _S.DENIED
    assert job.result is not None
    assert job.result.error_code == "APPROVAL_REJECTED"
    assert job.result.error_message == "rejected by bob: too risky"
    assert (await desk.store.history("a"))[-1].actor == "scheduler:bob"
