"""Whether a job, or an audit entry, is what a query asks for."""

from __future__ import annotations

from fnmatch import fnmatchcase

from penstock.core.job import Job
from penstock.lifecycles.canonical import JobState
from penstock.ports.store import AuditEntry, AuditQuery, JobQuery

_DEAD = frozenset({JobState.FAILED, JobState.TIMEOUT})


def matches(query: JobQuery, job: Job) -> bool:
    request = job.request
    return (
        (query.job_id is None or fnmatchcase(request.job_id, query.job_id))
        and (not query.states or job.state in query.states)
        and (query.topic is None or fnmatchcase(request.topic, query.topic))
        and query.tenant in (None, request.tenant)
        and query.parent_job_id in (None, request.parent_job_id)
        and query.workflow_id in (None, request.workflow_id)
        and query.idempotency_key in (None, request.idempotency_key)
        and query.principal in (None, request.principal)
        and query.schedule in (None, request.schedule)
        and query.parked in (None, _is_parked(job))
        and (not query.dead or (job.state in _DEAD and job.successor is None))
        and (query.accepted_from is None or job.accepted_at >= query.accepted_from)
        and (query.accepted_to is None or job.accepted_at < query.accepted_to)
        and (query.before is None or job.seq < query.before)
        and (query.since is None or job.seq > query.since)
        and query.labels.items() <= request.labels.items()
    )


def _is_parked(job: Job) -> bool:
    """Whether it waits for people's approval."""
    return job.hold is not None and job.state is JobState.SCHEDULED and not job.hold.approved


def matches_audit(query: AuditQuery, entry: AuditEntry) -> bool:
    return (
        query.principal in (None, entry.principal)
        and (query.action is None or fnmatchcase(entry.action, query.action))
        and query.subject in (None, entry.subject)
        and query.tenant in (None, entry.tenant)
        and (query.before is None or entry.n < query.before)
    )
