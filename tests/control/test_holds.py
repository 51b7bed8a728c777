"""When an approval counts, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from penstock.control.approvals import await_approval, expiry, hold_of, is_current, lifted, why_held
from penstock.core.ledger import advance
from penstock.core.verdict import ApprovalTerms, Decision, SafetyVerdict, Vote
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.testing.samples import T0, a_job, a_request

TERMS = ApprovalTerms(needed=2, approvers=("ann", "ops-*"), expires=3600.0)
VERDICT = SafetyVerdict(Decision.REQUIRE_APPROVAL, "big", "s1", "it is big", approval=TERMS)


def test_a_hold_is_bound_to_rule_rules_and_request_and_ends() -> None:
    hold = hold_of(VERDICT, a_request(), T0)
    assert (hold.rule_id, hold.snapshot, hold.since, hold.until) == ("big", "s1", T0, T0 + 3600)
    assert hold.terms == TERMS
    assert not hold.approved
    assert is_current(hold, VERDICT, a_request())


@pytest.mark.parametrize(
    ("verdict", "request_fields"),
    [
        ({"rule_id": "other"}, {}),
        ({"snapshot": "s2"}, {}),
        ({"approval": ApprovalTerms(needed=3)}, {}),
        ({}, {"env": {"a": "1"}}),
        ({}, {"priority": "critical"}),
    ],
)
def test_a_hold_counts_for_nothing_if_anything_is_another(
    verdict: dict[str, Any], request_fields: dict[str, Any]
) -> None:
    hold = hold_of(VERDICT, a_request(), T0)
    assert not is_current(hold, replace(VERDICT, **verdict), a_request(**request_fields))


def test_a_hold_that_was_lifted_is_no_approval_when_the_old_rules_come_back() -> None:
    hold = lifted(hold_of(VERDICT, a_request(), T0))
    assert hold.approved
    assert not is_current(hold, VERDICT, a_request())


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.SCHEDULED])
def test_a_parked_job_is_scheduled_with_its_hold_and_verdict(state: JobState) -> None:
    answer = advance(a_job(state=state), await_approval(a_job(state=state), VERDICT, T0))
    assert answer.job is not None
    assert answer.moved
    assert answer.job.state is JobState.SCHEDULED
    assert answer.job.verdict == VERDICT
    assert answer.job.hold == hold_of(VERDICT, a_request(), T0)
    assert answer.transitions[-1].event is JobEvent.PARK
    assert answer.transitions[-1].reason == "rule big requires 2 approvals: it is big"


def test_an_expired_hold_ends_the_job_denied_and_says_how_many_came() -> None:
    hold = replace(hold_of(VERDICT, a_request(), T0), votes=(Vote("ann", T0),))
    job = replace(a_job(state=JobState.SCHEDULED), hold=hold)
    ended = advance(job, expiry(job, T0 + 3600)).job
    assert ended is not None
    assert ended.result is not None
    assert (ended.state, ended.result.error_code) == (JobState.DENIED, "APPROVAL_EXPIRED")
    assert ended.result.error_message == "1 of 2 approvals given by 2023-11-14 23:13:20 UTC"


def test_a_parked_job_says_who_may_approve_until_when_and_who_has() -> None:
    hold = hold_of(VERDICT, a_request(), T0)
    assert why_held(hold) == (
        "awaiting 2 approvals by ann, ops-* until 2023-11-14 23:13:20 UTC (rule big)"
    )
    voted = replace(hold, votes=(Vote("ops-1", T0),))
    assert "; approved by ops-1 (rule big)" in why_held(voted)
    anybody = replace(hold, terms=ApprovalTerms())
    assert "1 approval by anybody with the role approve" in why_held(anybody)
