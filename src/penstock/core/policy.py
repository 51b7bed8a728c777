"""Retries, backoff, deadlines and order, as functions of plain values."""

from __future__ import annotations

import hashlib

import msgspec
from msgspec.structs import replace

from penstock.core.job import (
    NO_RETRY,
    Job,
    JobRequest,
    JobResult,
    Offer,
    Priority,
    RetryPolicy,
    UniqueScope,
)
from penstock.core.verdict import Constraints
from penstock.lifecycles.canonical import WAITING, JobState

HEAD_START: dict[Priority, float] = {
    Priority.CRITICAL: 3600.0,
    Priority.INTERACTIVE: 300.0,
    Priority.BATCH: 0.0,
}
"""Seconds by which a priority is treated as if it had waited longer."""

RETRY_REQUESTED = "RETRY"
"""The error code of a job that raised `penstock.Retry`."""

IN_VAIN = frozenset(
    {
        "BAD_INPUT",
        "UNKNOWN_TOPIC",
        "NOT_IMPORTABLE",
        "RESULT_NOT_STORABLE",
        "RESULT_TOO_LARGE",
        "UNREADABLE_POINTER",
        "TOO_LARGE",
        "OUTPUT_LIMIT",
        "CONSTRAINT_NOT_ENFORCED",
    }
)
"""Errors that would only happen again: not retried unless a policy names them."""


def completed(request: JobRequest, offer: Offer | None) -> JobRequest:
    """Fill in what the caller left open from what the topic's server offers."""
    if request.complete or offer is None:
        return request
    return replace(
        request,
        timeout=offer.timeout if request.timeout is None else request.timeout,
        retry=offer.retry if request.retry == NO_RETRY else request.retry,
        priority=offer.priority if request.priority is Priority.BATCH else request.priority,
        idempotent=request.idempotent or offer.idempotent,
        unique=request.unique or offer.unique,
        complete=True,
    )


def ready_at(request: JobRequest, accepted_at: float) -> float:
    """The time from which a job may start."""
    return accepted_at if request.run_at is None else max(accepted_at, request.run_at)


def rank(request: JobRequest, accepted_at: float) -> float:
    """The order within a tenant: the lowest goes first.

    All waiting jobs age alike, so comparing "waited so long plus head start" at any
    moment is comparing this fixed number. A batch job is therefore overtaken only by
    interactive jobs that came less than five minutes after it, and never starves.
    """
    return ready_at(request, accepted_at) - HEAD_START[request.priority]


def backoff(retry: RetryPolicy, number: int, chance: float) -> float:
    """Seconds to wait before retry `number` (1 is the first); `chance` is in [0, 1)."""
    steps = min(number - 1, 64)
    delay = min(retry.delay * retry.factor**steps, retry.max_delay)
    return delay * (1 - retry.jitter * chance)


def may_retry(job: Job, result: JobResult) -> bool:
    """Whether the policy wants this ending tried again, and the safety rules let it."""
    request = job.request
    retry = request.retry
    most = constraints_of(job).max_retries
    if request.retry_number >= (retry.retries if most is None else min(retry.retries, most)):
        return False
    if result.status not in (JobState.FAILED, JobState.TIMEOUT):
        return False
    if result.error_code == RETRY_REQUESTED:
        return True
    kinds = {result.error_code or "", *result.error_kinds}
    if kinds & set(retry.never):
        return False
    if retry.on:
        return bool(kinds & set(retry.on))
    return result.error_code not in IN_VAIN


def retry_of(job: Job, result: JobResult, job_id: str, now: float, chance: float) -> JobRequest:
    """The new job that tries `job` again: everything is kept but id, link and time."""
    request = job.request
    number = request.retry_number + 1
    after = result.retry_after
    delay = backoff(request.retry, number, chance) if after is None else after
    return replace(
        request,
        job_id=job_id,
        parent_job_id=request.job_id,
        idempotency_key=None,
        run_at=now + delay,
        retry_number=number,
    )


def constraints_of(job: Job) -> Constraints:
    """The limits within which the safety rules let this job run."""
    verdict = job.verdict
    return _FREE if verdict is None or verdict.constraints is None else verdict.constraints


_FREE = Constraints()


def run_limit(job: Job, default_timeout: float) -> float:
    """Seconds that one attempt may run: as the job says, and no longer than it may."""
    limit = default_timeout if job.request.timeout is None else job.request.timeout
    most = constraints_of(job).max_runtime
    return limit if most is None else min(limit, most)


def keeps_out(held: Job, now: float) -> bool:
    """Whether a job, by its unique key, keeps out one that comes now with the same key."""
    unique = held.request.unique
    if unique is None:
        return False
    if unique.period is not None:
        return now < held.accepted_at + unique.period
    if unique.scope is UniqueScope.WAITING:
        return held.state in WAITING
    return not held.is_final


_MAY_DIFFER = frozenset({"job_id", "run_at", "deadline", "retry_number", "complete", "principal"})
"""Fields that may differ in a repeated request: ids we gave, times counted from now."""


def difference(request: JobRequest, held: JobRequest) -> str | None:
    """The field in which a request differs from the one that has its id or key, if any."""
    if request.tenant != held.tenant:
        return "tenant"
    for field in JobRequest.__struct_fields__:
        if field not in _MAY_DIFFER and getattr(request, field) != getattr(held, field):
            return field
    return None


def request_hash(request: JobRequest) -> str:
    """Names exactly what was asked; an approval is bound to it."""
    encoded = msgspec.json.encode(request, order="deterministic")
    return hashlib.sha256(encoded).hexdigest()
