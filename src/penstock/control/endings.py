"""How jobs end: a result becomes a move, a failed job gets its retry, and a lost one
goes to another worker or ends. Pure but for chance, ids and the start log.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.control.open_jobs import OpenJobs
from penstock.core.job import IdSource, Job, JobResult, Timeouts, may_retry, retry_of
from penstock.core.ledger import Accept, Move
from penstock.lifecycles.canonical import JobEvent, JobState, Role
from penstock.ports.start_log import StartLogs

_EVENTS: dict[JobState, tuple[JobEvent, Role]] = {
    JobState.SUCCEEDED: (JobEvent.SUCCEED, Role.WORKER),
    JobState.FAILED: (JobEvent.FAIL, Role.WORKER),
    # The seed lets only the control plane say these; the worker's word is the evidence.
    JobState.TIMEOUT: (JobEvent.EXPIRE, Role.RECONCILER),
    JobState.CANCELLED: (JobEvent.CANCEL, Role.RECONCILER),
}


def ending(job: Job | None, result: JobResult, now: float, ids: IdSource, chance: float) -> Move:
    """The move that ends a job as `result` says, with its retry in the same commit."""
    event, role = _EVENTS[result.status]
    then: tuple[Accept, ...] = ()
    if job is not None and not job.cancel_requested and may_retry(job, result):
        again = retry_of(job, result, ids.next(now), now, chance)
        reason = f"retry {again.retry_number} of {job.request.retry.retries} of {job.job_id}"
        by = Role.SCHEDULER.value
        then = (Accept(again, now, by, reason, fresh=True, unless_cancelled=True),)
    actor = f"{role}:{result.worker_id}" if role is Role.WORKER else role.value
    return Move(
        result.job_id,
        (event,),
        actor,
        now,
        _reason(result),
        attempt=result.attempt,
        result=result,
        then=then,
    )


def cancellation(job: Job, code: str, why: str, now: float) -> Move:
    """The move by which the control plane itself ends a job."""
    result = JobResult(
        job_id=job.job_id,
        status=JobState.CANCELLED,
        attempt=job.attempt,
        error_code=code,
        error_message=why,
    )
    return Move(
        job.job_id,
        (JobEvent.CANCEL,),
        Role.RECONCILER.value,
        now,
        why,
        version=job.version,
        result=result,
    )


def _reason(result: JobResult) -> str:
    if result.error_code is None:
        return ""
    said = result.error_code
    if result.error_message:
        said += f": {result.error_message[:200]}"
    return said


class Losses:
    """Gives a job to another worker where that is safe, and ends it where it is not."""

    def __init__(
        self,
        open_jobs: OpenJobs,
        starts: StartLogs,
        limits: Timeouts,
        ids: IdSource,
        chance: Callable[[], float],
    ) -> None:
        self._open_jobs, self._starts, self._limits = open_jobs, starts, limits
        self._ids, self._chance = ids, chance

    def lose(self, job: Job, why: str, now: float) -> list[Move]:
        """Let it wait for another worker, or return the move that ends it."""
        if self._may_go_on(job):
            self._open_jobs.orphan(job, why)
            return []
        return [self.expire(job, "WORKER_LOST", why, now)]

    def _may_go_on(self, job: Job) -> bool:
        if job.request.idempotent:
            defaults = self._open_jobs.topic_defaults.get(job.request.topic)
            most = defaults.max_attempts if defaults is not None else None
            uncharged = job.uncharged + (job.job_id in self._open_jobs.uncharged)
            charged = job.attempt - uncharged
            begun_too_often = charged >= (most or self._limits.max_attempts)
            return job.state is JobState.DISPATCHED or not begun_too_often
        return job.state is JobState.DISPATCHED and self._starts.revoke(job.job_id, job.attempt)

    def expire(self, job: Job, code: str, why: str, now: float) -> Move:
        """End it TIMEOUT, with its retry if its policy wants one."""
        result = JobResult(
            job_id=job.job_id,
            status=JobState.TIMEOUT,
            worker_id=job.worker_id,
            attempt=job.attempt,
            error_code=code,
            error_message=why,
        )
        return ending(job, result, now, self._ids, self._chance())
