"""Did the gate keep its promises? The other half of `history`.

Rules and limits may change while the engine is at work. What it decided before it noticed is
not held against it: until its next turn, what was in force before counts as well.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import takewhile

from msgspec.structs import replace
from tests.support.simulation.history import (
    Absent,
    Committed,
    CutOff,
    History,
    Lent,
    LimitsSet,
    Noticed,
    Promise,
    RulesSet,
    TookBack,
    Violation,
)

from penstock.control.limits import Bucket, Sorter
from penstock.control.safety import ALLOW_ALL
from penstock.core.job import Job, ParentPolicy, request_hash
from penstock.core.verdict import Decision
from penstock.lifecycles.canonical import TERMINAL, JobEvent, JobState


def check_gate(history: History) -> list[Violation]:
    """Every promise of the gate that this history breaks."""
    history = _without_lost(history)
    return [
        *_check_approvals(history),
        *_check_rules(history),
        *_check_limits(history),
        *_check_parents(history),
    ]


def _without_lost(history: History) -> History:
    """What is not in the store any more is somebody else's concern."""
    kept = [
        event
        for event in history.events
        if not isinstance(event, Committed) or event.entry.job_id in history.records
    ]
    return replace(history, events=kept)


def _check_approvals(history: History) -> Iterator[Violation]:
    for job_id, record in history.records.items():
        verdict, hold = record.verdict, record.hold
        if not record.attempt or verdict is None:
            continue
        if verdict.decision is Decision.DENY:
            yield Violation(Promise.JUDGED, job_id, f"went out against rule {verdict.rule_id}")
        if verdict.decision is not Decision.REQUIRE_APPROVAL:
            continue
        if hold is None or not hold.approved:
            yield Violation(Promise.APPROVED, job_id, "went out without its approvals")
        elif (hold.rule_id, hold.snapshot) != (verdict.rule_id, verdict.snapshot):
            said = f"was approved under {hold.snapshot} and went out under {verdict.snapshot}"
            yield Violation(Promise.APPROVED, job_id, said)
        elif hold.request_hash != request_hash(record.request):
            yield Violation(Promise.APPROVED, job_id, "another request was approved")
        elif len({vote.by for vote in hold.votes}) < hold.terms.needed:
            yield Violation(Promise.APPROVED, job_id, "somebody approved it twice")


def _check_rules(history: History) -> Iterator[Violation]:
    in_force: list[str] = []
    for event in history.events:
        match event:
            case RulesSet(snapshot):
                in_force.append(snapshot)
            case Noticed():
                in_force = in_force[-1:]
            case Committed(entry) if in_force and entry.event is JobEvent.DISPATCH:
                verdict = history.records[entry.job_id].verdict
                # Of those that were never judged by rules of anybody, no verdict is kept.
                by = ALLOW_ALL.snapshot if verdict is None else verdict.snapshot
                if by not in in_force:
                    said = f"went out by {by} while {', '.join(in_force)} held"
                    yield Violation(Promise.JUDGED, entry.job_id, said)


def _check_limits(history: History) -> Iterator[Violation]:
    """At each first dispatch, and when one goes on that has waited, nobody is one too many.

    Who waits for other jobs does not count, from when its worker says so. What an engine counts
    whose connection to that worker was lost is not known until the worker says so again.
    """
    in_force: list[Sorter] = []
    held: dict[str, Job] = {}
    lent: dict[str, Job] = {}
    unsure: set[str] = set()
    holders: dict[str, tuple[int, str | None]] = {}

    def broken(job_id: str) -> Iterator[Violation]:
        found = [_broken(sorter, job_id, held) for sorter in in_force]
        if found and all(found):
            yield Violation(Promise.WITHIN, job_id, found[-1])
        if by_rule := _broken_rule(held[job_id], held):
            yield Violation(Promise.WITHIN, job_id, by_rule)

    for event in history.events:
        match event:
            case LimitsSet(limits):
                in_force.append(Sorter(limits))
            case Noticed():
                in_force = in_force[-1:]
            case Committed(entry) if entry.event in (JobEvent.DISPATCH, JobEvent.REDISPATCH):
                job_id = entry.job_id
                held[job_id] = history.records[job_id]
                holders[job_id] = (entry.attempt, entry.worker_id)
                lent.pop(job_id, None)
                if entry.event is JobEvent.DISPATCH:
                    yield from broken(job_id)
            case Committed(entry) if entry.after in TERMINAL:
                held.pop(entry.job_id, None)
                lent.pop(entry.job_id, None)
            case Absent(worker_id) | CutOff(worker_id):
                unsure.update(job_id for job_id in lent if holders[job_id][1] == worker_id)
            case Lent(job_id, attempt) if job_id in holders and holders[job_id][0] == attempt:
                unsure.discard(job_id)
                if job_id in held:
                    lent[job_id] = held.pop(job_id)
            case TookBack(job_id, attempt) if job_id in lent and holders[job_id][0] == attempt:
                held[job_id] = lent.pop(job_id)
                if job_id not in unsure:
                    yield from broken(job_id)


def _broken(sorter: Sorter, job_id: str, held: dict[str, Job]) -> str:
    running: dict[Bucket, int] = defaultdict(int)
    for job in held.values():
        for bucket in sorter.sort(job.request):
            running[bucket] += 1
    for bucket in sorter.sort(held[job_id].request):
        most = sorter.limits[bucket.limit].concurrency
        if most is not None and running[bucket] > most:
            return f"{running[bucket]} run within {bucket}, where {most} may"
    return ""


def _broken_rule(job: Job, held: dict[str, Job]) -> str:
    most = _most_by_rule(job)
    if most is None or job.verdict is None:
        return ""
    rule_id, tenant = job.verdict.rule_id, job.request.tenant
    running = sum(
        _most_by_rule(other) is not None
        and other.verdict is not None
        and (other.verdict.rule_id, other.request.tenant) == (rule_id, tenant)
        for other in held.values()
    )
    return f"{running} run by rule {rule_id}, where {most} may" if running > most else ""


def _most_by_rule(job: Job) -> int | None:
    constraints = None if job.verdict is None else job.verdict.constraints
    return None if constraints is None else constraints.max_concurrent


def _check_parents(history: History) -> Iterator[Violation]:
    ends: dict[str, JobState] = {}
    for event in history.events:
        if not isinstance(event, Committed):
            continue
        entry = event.entry
        if entry.event is JobEvent.DISPATCH:
            request = history.records[entry.job_id].request
            if request.retry_number:
                continue
            for parent_id in request.after:
                if problem := _too_early(history, ends, parent_id, request.if_parent_fails):
                    yield Violation(Promise.AFTER, entry.job_id, problem)
        elif entry.after in TERMINAL:
            ends.setdefault(entry.job_id, entry.after)


def _too_early(
    history: History, ends: dict[str, JobState], parent_id: str, policy: ParentPolicy
) -> str:
    """What a job should have waited for. A user's own retry of a parent need not be."""
    chain: list[Job] = []
    next_id: str | None = parent_id
    while next_id is not None and (job := history.records.get(next_id)) is not None:
        chain.append(job)
        next_id = job.successor
    if any(ends.get(job.job_id) is JobState.SUCCEEDED for job in chain):
        return ""
    if policy is ParentPolicy.CANCEL:
        return f"went out although {parent_id} did not succeed"
    owed = [*chain[:1], *takewhile(lambda job: job.request.retry_number, chain[1:])]
    late = [job.job_id for job in owed if job.job_id not in ends]
    return f"went out before {late[0]} ended" if late else ""
