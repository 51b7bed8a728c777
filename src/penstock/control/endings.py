"""How a result becomes a move, and a failed job its retry. Pure but for chance and ids."""

from __future__ import annotations

from penstock.core.ids import IdSource
from penstock.core.job import Job, JobResult
from penstock.core.policy import may_retry, retry_of
from penstock.core.transition import Accept, Move
from penstock.lifecycles.canonical import JobEvent, JobState, Role

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
