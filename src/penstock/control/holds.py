"""Holds: what a job waits for that people must approve. Pure.

A hold is good for one request under one rule of one set of rules. Whatever of these is
another, the yeses that were given count for nothing.
"""

from __future__ import annotations

from datetime import UTC, datetime

from msgspec.structs import replace

from penstock.core.job import Job, JobRequest, JobResult
from penstock.core.policy import request_hash
from penstock.core.transition import Move
from penstock.core.verdict import ApprovalTerms, Decision, Hold, SafetyVerdict
from penstock.lifecycles.canonical import JobEvent, JobState, Role

_DEFAULT = ApprovalTerms()


def hold_of(verdict: SafetyVerdict, request: JobRequest, now: float) -> Hold:
    """The hold that a verdict asks for, with nobody's word yet."""
    terms = verdict.approval or _DEFAULT
    return Hold(
        rule_id=verdict.rule_id,
        snapshot=verdict.snapshot,
        request_hash=request_hash(request),
        since=now,
        until=now + terms.expires,
        terms=terms,
    )


def is_current(hold: Hold, verdict: SafetyVerdict, request: JobRequest) -> bool:
    """Whether a hold is the one that this verdict asks for, so that its votes count."""
    return (
        (hold.rule_id, hold.snapshot) == (verdict.rule_id, verdict.snapshot)
        and hold.terms == (verdict.approval or _DEFAULT)
        and hold.request_hash == request_hash(request)
    )


def lifted(hold: Hold) -> Hold:
    """The hold of a job that other rules let pass: it waits for nobody any more."""
    return replace(hold, terms=replace(hold.terms, needed=0))


def parking(job: Job, verdict: SafetyVerdict, now: float) -> Move:
    """The move that lets a job wait for people."""
    hold = hold_of(verdict, job.request, now)
    events = (JobEvent.SCHEDULE, JobEvent.PARK)
    said = f"rule {verdict.rule_id} asks for {_people(hold.terms.needed)}"
    return Move(
        job.job_id,
        events if job.state is JobState.PENDING else events[1:],
        Role.SCHEDULER.value,
        now,
        f"{said}: {verdict.reason}" if verdict.reason else said,
        version=job.version,
        verdict=verdict,
        hold=hold,
    )


def expiry(job: Job, now: float) -> Move:
    """The move that ends a job for which too few people spoke in time."""
    hold = job.hold
    assert hold is not None
    said = f"{len(hold.votes)} of {_people(hold.terms.needed)} came before {_time(hold.until)}"
    return denial(job, "APPROVAL_EXPIRED", said, now)


def denial(
    job: Job, code: str, said: str, now: float, verdict: SafetyVerdict | None = None
) -> Move:
    """The move that ends a job DENIED."""
    events = (JobEvent.SCHEDULE, JobEvent.DENY)
    result = JobResult(
        job_id=job.job_id, status=JobState.DENIED, error_code=code, error_message=said
    )
    return Move(
        job.job_id,
        events if job.state is JobState.PENDING else events[1:],
        Role.SCHEDULER.value,
        now,
        said,
        version=job.version,
        result=result,
        verdict=verdict,
    )


def refusal(job: Job, verdict: SafetyVerdict, now: float) -> Move:
    """The move that follows from a rule's no."""
    assert verdict.decision is Decision.DENY
    said = f"rule {verdict.rule_id}" + (f": {verdict.reason}" if verdict.reason else "")
    return denial(job, "DENIED", said, now, verdict)


def why_parked(hold: Hold) -> str:
    """Whose word a job waits for, until when, and who has spoken."""
    terms = hold.terms
    who = ", ".join(terms.approvers) or "anybody with the role approve"
    said = f"it waits for {_people(terms.needed)} by {who} until {_time(hold.until)}"
    if hold.votes:
        voters = ", ".join(vote.by for vote in hold.votes)
        said += f"; {len(hold.votes)} came: {voters}"
    return f"{said} (rule {hold.rule_id})"


def _people(needed: int) -> str:
    return "1 approval" if needed == 1 else f"{needed} approvals"


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
