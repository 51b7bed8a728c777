"""People's yes and no to what the safety rules parked.

A yes is bound to what was looked at: the request, by its hash, and the rules, by their
snapshot. If either is another one by now, it is refused, and the job asks again.
"""

from __future__ import annotations

from msgspec.structs import replace

from penstock.control.safety import SafetyKernel
from penstock.core.errors import Conflict, NotFound, NotPermitted, StaleApproval
from penstock.core.job import Job, JobResult
from penstock.core.policy import request_hash
from penstock.core.transition import Move, Verdict
from penstock.core.verdict import Hold, Vote
from penstock.lifecycles.canonical import JobEvent, JobState, Role
from penstock.ports.clock import Clock
from penstock.ports.store import Store


class ApprovalBox:
    """Takes votes; the scheduler lets go what has enough of them."""

    def __init__(self, store: Store, kernel: SafetyKernel, clock: Clock) -> None:
        self._store, self._kernel, self._clock = store, kernel, clock

    async def approve(self, job_id: str, *, by: str, reason: str = "", snapshot: str = "") -> Job:
        while True:
            job, hold = await self._parked(job_id)
            now = self._clock.now()
            self._check_current(job, hold, snapshot)
            _check_voter(job, hold, by)
            if any(vote.by == by for vote in hold.votes):
                raise Conflict(f"{by} has approved job {job_id} already")
            if now >= hold.until:
                raise StaleApproval(
                    f"the time to approve job {job_id} is over", hint="retry the job to ask again"
                )
            voted = replace(hold, votes=(*hold.votes, Vote(by, now, reason)))
            said = f"approved by {by} ({len(voted.votes)} of {hold.terms.needed})"
            move = Move(
                job_id,
                (JobEvent.APPROVE,),
                f"{Role.GATEWAY}:{by}",
                now,
                f"{said}: {reason}" if reason else said,
                version=job.version,
                hold=voted,
            )
            if (moved := await self._try(move)) is not None:
                return moved

    async def reject(self, job_id: str, *, by: str, reason: str = "") -> Job:
        while True:
            job, hold = await self._parked(job_id)
            if not hold.terms.may_approve(by):
                raise NotPermitted(f"{by} is not asked about job {job_id}", hint=_asked(hold))
            said = f"rejected by {by}"
            said = f"{said}: {reason}" if reason else said
            result = JobResult(
                job_id=job_id,
                status=JobState.DENIED,
                error_code="APPROVAL_REJECTED",
                error_message=said,
            )
            # The scheduler is who denies; the word is the approver's.
            move = Move(
                job_id,
                (JobEvent.DENY,),
                f"{Role.SCHEDULER}:{by}",
                self._clock.now(),
                said,
                version=job.version,
                result=result,
            )
            if (moved := await self._try(move)) is not None:
                return moved

    async def _parked(self, job_id: str) -> tuple[Job, Hold]:
        job = await self._store.get(job_id)
        if job is None:
            raise NotFound(f"no job {job_id!r}", hint="'penstock ps' lists the jobs there are")
        hold = job.hold
        if job.state is not JobState.SCHEDULED or hold is None:
            raise Conflict(f"job {job_id} is {job.state} and waits for nobody's approval")
        if hold.approved:
            raise Conflict(f"job {job_id} has all the approvals that it needs")
        return job, hold

    def _check_current(self, job: Job, hold: Hold, seen: str) -> None:
        """What is approved must be what was looked at, by the rules that are in force."""
        if seen and seen != hold.snapshot:
            raise StaleApproval(
                f"job {job.job_id} waits under the rules {hold.snapshot}, not {seen}",
                hint="look at it again, then approve",
            )
        if self._kernel.rules.snapshot != hold.snapshot:
            raise StaleApproval(
                f"the rules changed after job {job.job_id} was parked; it is being judged anew",
                hint="look at it again in a moment",
            )
        if request_hash(job.request) != hold.request_hash:
            raise StaleApproval(f"job {job.job_id} is not what it was when it was parked")

    async def _try(self, move: Move) -> Job | None:
        (answer,) = await self._store.apply([move])
        return None if answer.verdict is Verdict.REFUSED else answer.job


def _check_voter(job: Job, hold: Hold, by: str) -> None:
    terms = hold.terms
    if not terms.may_approve(by):
        raise NotPermitted(f"{by} is not asked about job {job.job_id}", hint=_asked(hold))
    if by == job.request.principal and not terms.self_approval:
        raise NotPermitted(
            f"{by} submitted job {job.job_id} and may not approve it",
            hint="somebody else must",
        )


def _asked(hold: Hold) -> str:
    return "it waits for " + ", ".join(hold.terms.approvers)
