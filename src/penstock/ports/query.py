"""What every backend answers alike: which jobs and audit entries match, and events in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import islice

from penstock.core.job import Job, chain_of
from penstock.core.journal import LoggedStride, moves_of
from penstock.core.ledger import Counts
from penstock.lifecycles.canonical import TERMINAL, JobState
from penstock.ports.store import AuditEntry, AuditQuery, JobQuery, JournalEvent, Mismatch

_DEAD = frozenset({JobState.FAILED, JobState.TIMEOUT})
TROUBLE = TERMINAL - {JobState.SUCCEEDED}
"""The states of jobs that ended without success."""


def matches(query: JobQuery, job: Job) -> bool:
    request = job.request
    return (
        (query.job_id is None or fnmatchcase(request.job_id, query.job_id))
        and (not query.states or job.state in query.states)
        and (query.topic is None or fnmatchcase(request.topic, query.topic))
        and query.tenant in (None, request.tenant)
        and query.parent_job_id in (None, request.parent_job_id)
        and query.child_of in (None, request.child_of)
        and query.first_try in (None, chain_of(request))
        and query.workflow_id in (None, request.workflow_id)
        and query.idempotency_key in (None, request.idempotency_key)
        and query.principal in (None, request.principal)
        and query.schedule in (None, request.schedule)
        and query.awaiting_approval in (None, is_awaiting_approval(job))
        and (not query.dead or (job.state in _DEAD and job.successor is None))
        and (job.successor is None or not query.folded)
        and (query.accepted_from is None or job.accepted_at >= query.accepted_from)
        and (query.accepted_to is None or job.accepted_at < query.accepted_to)
        and (query.before is None or job.seq < query.before)
        and (query.since is None or job.seq > query.since)
        and query.labels.items() <= request.labels.items()
        and (query.error is None or _has_error(job, query.error))
    )


def _has_error(job: Job, text: str) -> bool:
    if job.state not in TROUBLE or job.result is None:
        return False
    wanted, end = _lower(text), job.result
    return any(wanted in _lower(said) for said in (end.error_code, end.error_message) if said)


def _lower(text: str) -> bytes:
    """With ASCII letters in lower case: databases change no others either."""
    return text.encode("utf-8", "surrogatepass").lower()


def is_awaiting_approval(job: Job) -> bool:
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


def order(query: JobQuery) -> Callable[[Job], tuple[int, int]]:
    """The key by which jobs are sorted as a query wants them."""
    if query.by_step:
        return lambda job: (_step(job), job.seq)
    if query.oldest_first:
        return lambda job: (0, job.seq)
    return lambda job: (0, -job.seq)


def _step(job: Job) -> int:
    return -1 if job.request.step_index is None else job.request.step_index


Name = tuple[str, str, str]
"""A job's id, tenant and topic."""


def read_events(
    pages: Iterable[tuple[int, Sequence[LoggedStride]]],
    names_of: Callable[[Sequence[int]], Mapping[int, Name]],
    after: int,
    limit: int,
) -> list[JournalEvent]:
    """Events after a cursor; more than `limit` only to finish a move.

    `names_of` returns the names of the jobs with these `seq`s; those it does not know are pruned.
    """
    events: list[JournalEvent] = []
    for number, strides in pages:
        moves = moves_of(number, strides, after)
        while some := list(islice(moves, max(0, limit - len(events)))):
            names = names_of([stride.seqs[index] for _, stride, index in some])
            for first, stride, index in some:
                name = names.get(stride.seqs[index])
                if name is None:
                    continue
                if len(events) >= limit:
                    return events
                job_id, tenant, topic = name
                for cursor, transition in enumerate(stride.transitions(index, job_id), first):
                    if cursor > after:
                        events.append(JournalEvent(cursor, tenant, topic, transition))
        if len(events) >= limit:
            break
    return events


def compare_counts(stored: Counts, counted: Counts) -> list[Mismatch]:
    """Where stored counts differ from the jobs there are."""
    mismatches = []
    for tenant, state in sorted(stored.keys() | counted.keys(), key=str):
        have, say = counted.get((tenant, state), 0), stored.get((tenant, state), 0)
        if have != say:
            kind = "tries that were retried" if state is None else f"jobs that are {state}"
            problem = f"tenant {tenant} has {have} {kind}, the count says {say}"
            mismatches.append(Mismatch("the counts", problem))
    return mismatches
