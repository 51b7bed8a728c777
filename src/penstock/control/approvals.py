"""Approvals: the hold that a safety rule puts on a job, and people's votes on it.

An approval is bound to what was looked at: the request, by its hash, and the rules, by their
snapshot. If either changed since, it is refused, the votes so far are void, and the job asks
again.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from penstock.control.guard import Guard
from penstock.control.ledger import Ledger
from penstock.core.errors import Conflict, NotPermitted, StaleApproval
from penstock.core.job import Job, JobRequest, JobResult, request_hash
from penstock.core.ledger import ChangeOutcome, Move
from penstock.core.verdict import ApprovalTerms, Decision, Hold, SafetyVerdict, Vote
from penstock.lifecycles.canonical import JobEvent, JobState, Role
from penstock.ports.clock import Clock
from penstock.ports.engine_api import Approvals
from penstock.ports.operations import Method

if TYPE_CHECKING:
    from penstock.control.safety import SafetyKernel

_DEFAULT = ApprovalTerms()

# -- holds (pure) -----------------------------------------------------------------------------


def hold_of(verdict: SafetyVerdict, request: JobRequest, now: float) -> Hold:
    """The hold that a verdict asks for, without votes."""
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
    """The hold of a job that other rules allow: it needs no approval any more."""
    return replace(hold, terms=replace(hold.terms, needed=0))


def await_approval(job: Job, verdict: SafetyVerdict, now: float) -> Move:
    """The move that puts a job on hold."""
    hold = hold_of(verdict, job.request, now)
    said = f"rule {verdict.rule_id} requires {_approvals(hold.terms.needed)}"
    said = f"{said}: {verdict.reason}" if verdict.reason else said
    return _judged(job, JobEvent.PARK, said, now, verdict=verdict, hold=hold)


def expiry(job: Job, now: float) -> Move:
    """The move that ends a job that was not approved in time."""
    hold = job.hold
    assert hold is not None
    needed = _approvals(hold.terms.needed)
    said = f"{len(hold.votes)} of {needed} given by {_time(hold.until)}"
    return denial(job, "APPROVAL_EXPIRED", said, now)


def denial(
    job: Job, code: str, said: str, now: float, verdict: SafetyVerdict | None = None, by: str = ""
) -> Move:
    """The move that ends a job DENIED; `by` whom, if a person decided it."""
    result = JobResult(
        job_id=job.job_id, status=JobState.DENIED, error_code=code, error_message=said
    )
    return _judged(job, JobEvent.DENY, said, now, by, verdict=verdict, result=result)


def _judged(job: Job, event: JobEvent, said: str, now: float, by: str = "", **fields: Any) -> Move:
    """A move of the scheduler, from SCHEDULED or, with that move first, from PENDING."""
    events = (JobEvent.SCHEDULE, event) if job.state is JobState.PENDING else (event,)
    actor = f"{Role.SCHEDULER}:{by}" if by else Role.SCHEDULER.value
    return Move(job.job_id, events, actor, now, said, version=job.version, **fields)


def refusal(job: Job, verdict: SafetyVerdict, now: float) -> Move:
    """The move that follows from a rule's no."""
    assert verdict.decision is Decision.DENY
    said = f"rule {verdict.rule_id}" + (f": {verdict.reason}" if verdict.reason else "")
    return denial(job, "DENIED", said, now, verdict)


def why_held(hold: Hold) -> str:
    """Whose approval a job needs, until when, and who has approved it."""
    terms = hold.terms
    who = ", ".join(terms.approvers) or "anybody with the role approve"
    said = f"awaiting {_approvals(terms.needed)} by {who} until {_time(hold.until)}"
    if hold.votes:
        said += f"; approved by {', '.join(vote.by for vote in hold.votes)}"
    return f"{said} (rule {hold.rule_id})"


def _approvals(needed: int) -> str:
    return "1 approval" if needed == 1 else f"{needed} approvals"


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# -- votes ------------------------------------------------------------------------------------


class ApprovalService:
    """See `penstock.ports.engine_api.Approvals`. The scheduler dispatches what has enough votes."""

    def __init__(self, store: Ledger, kernel: SafetyKernel, clock: Clock, guard: Guard) -> None:
        self._store, self._kernel, self._clock, self._guard = store, kernel, clock, guard

    async def approve(self, job_id: str, *, reason: str = "", snapshot: str = "") -> Job:
        by = self._guard.by

        def vote(job: Job, hold: Hold, now: float) -> Move:
            self._check_current(job, hold, snapshot)
            _check_approver(job, hold, by)
            if by == job.request.principal and not hold.terms.self_approval:
                raise NotPermitted(
                    f"{by} submitted job {job_id} and may not approve it",
                    hint="another approver must",
                )
            if any(vote.by == by for vote in hold.votes):
                raise Conflict(f"{by} has approved job {job_id} already")
            if now >= hold.until:
                raise StaleApproval(
                    f"the time to approve job {job_id} has expired",
                    hint="retry the job to ask again",
                )
            voted = replace(hold, votes=(*hold.votes, Vote(by, now, reason)))
            said = f"approved by {by} ({len(voted.votes)} of {hold.terms.needed})"
            said = f"{said}: {reason}" if reason else said
            actor, version = f"{Role.GATEWAY}:{by}", job.version
            return Move(job_id, (JobEvent.APPROVE,), actor, now, said, version=version, hold=voted)

        return await self._decide(Approvals.approve, job_id, reason, vote)

    async def reject(self, job_id: str, *, reason: str = "") -> Job:
        by = self._guard.by

        def veto(job: Job, hold: Hold, now: float) -> Move:
            _check_approver(job, hold, by)
            said = f"rejected by {by}: {reason}" if reason else f"rejected by {by}"
            # The scheduler denies; the decision is the approver's.
            return denial(job, "APPROVAL_REJECTED", said, now, by=by)

        return await self._decide(Approvals.reject, job_id, reason, veto)

    async def _decide(
        self,
        operation: Method,
        job_id: str,
        reason: str,
        move: Callable[[Job, Hold, float], Move],
    ) -> Job:
        """Commit the move of a person; again, if something else happened to the job meanwhile."""
        self._guard.shown(await self._store.get(job_id), job_id)
        with self._guard.doing(operation, job_id, detail=reason):
            while True:
                job, hold = await self._held(job_id)
                (answer,) = await self._store.apply([move(job, hold, self._clock.now())])
                if answer.verdict is not ChangeOutcome.REFUSED and answer.job is not None:
                    return answer.job

    async def _held(self, job_id: str) -> tuple[Job, Hold]:
        job = self._guard.shown(await self._store.get(job_id), job_id)
        hold = job.hold
        if job.state is not JobState.SCHEDULED or hold is None:
            raise Conflict(f"job {job_id} is {job.state} and not awaiting approval")
        if hold.approved:
            raise Conflict(f"job {job_id} has all the approvals that it needs")
        return job, hold

    def _check_current(self, job: Job, hold: Hold, seen: str) -> None:
        """What is approved must be what was looked at, by the rules that are in force."""
        if seen and seen != hold.snapshot:
            raise StaleApproval(
                f"job {job.job_id} is held by the rules {hold.snapshot}, not {seen}",
                hint="look at it again, then approve",
            )
        if self._kernel.rules.snapshot != hold.snapshot:
            raise StaleApproval(
                f"the rules changed since job {job.job_id} was held; it is being judged again",
                hint="look at it again in a moment",
            )
        if request_hash(job.request) != hold.request_hash:
            raise StaleApproval(f"job {job.job_id} changed since it was held")


def _check_approver(job: Job, hold: Hold, by: str) -> None:
    if not hold.terms.may_approve(by):
        raise NotPermitted(
            f"{by} is not an approver of job {job.job_id}",
            hint=f"approvers: {', '.join(hold.terms.approvers)}",
        )
