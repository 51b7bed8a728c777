"""Were promises about parents and children kept? Another part of `history`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from tests.support.simulation.history import (
    Began,
    ChildGiven,
    Committed,
    Dispatched,
    Finished,
    Hired,
    History,
    Promise,
    Violation,
    WaitBegan,
    WaitEnded,
)

from penstock.core.job import Job, chain_of
from penstock.lifecycles.canonical import TERMINAL, JobEvent, JobState

_GRACE = 25.0
"""Seconds after the end of its parent in which a child must end, whatever else fails."""
_PATIENCE = 5.0
"""Seconds after which a parent that finds no slot may go on without, and the next one after it."""


def check_families(history: History) -> list[Violation]:
    """Every promise about parents and children that this history breaks."""
    return [
        *_check_ends(history),
        *_check_same(history),
        *_check_slots(history),
        *_check_counts(history),
    ]


def _last_try(history: History, job_id: str) -> Job | None:
    job = history.records.get(job_id)
    while job is not None and job.successor is not None:
        job = history.records.get(job.successor)
    return job


class _Moments:
    """When jobs were accepted and ended, by the order of commits and by the monotonic clock."""

    def __init__(self, history: History) -> None:
        self.accepted: dict[str, tuple[int, float]] = {}
        self.ended: dict[str, tuple[int, float]] = {}
        for n, event in enumerate(history.events):
            if isinstance(event, Committed):
                entry = event.entry
                if entry.event is JobEvent.ACCEPT:
                    self.accepted.setdefault(entry.job_id, (n, event.at))
                elif entry.after in TERMINAL:
                    self.ended.setdefault(entry.job_id, (n, event.at))

    def end_before(self, history: History, job_id: str, other_id: str) -> JobState | None:
        """How a job and its retries ended, if that was before another job was accepted."""
        last = _last_try(history, job_id)
        if last is None or last.job_id not in self.ended or other_id not in self.accepted:
            return None
        return last.state if self.ended[last.job_id][0] < self.accepted[other_id][0] else None


# -- ends ---------------------------------------------------------------------------------


def _check_ends(history: History) -> Iterator[Violation]:
    moments: _Moments | None = None
    for job_id, child in history.records.items():
        if child.request.child_of is None or child.request.detached:
            continue
        parent = _last_try(history, child.request.child_of)
        if parent is None or not parent.is_final or parent.state is JobState.SUCCEEDED:
            continue
        moments = moments or _Moments(history)
        if job_id not in moments.accepted or parent.job_id not in moments.ended:
            continue
        since = max(moments.ended[parent.job_id][1], moments.accepted[job_id][1])
        until = moments.ended.get(job_id, (0, float("inf")))[1]
        if until > since + _GRACE and (history.quiescent or until < float("inf")):
            said = f"its parent ended {parent.state} {until - since:.0f} s before it"
            yield Violation(Promise.FAMILY, job_id, said)


# -- the same children --------------------------------------------------------------------


def _check_same(history: History) -> Iterator[Violation]:
    given: dict[tuple[str, str], list[ChildGiven]] = defaultdict(list)
    """By chain of the parent and what was asked for: who was given what, in order."""
    for event in history.events:
        if isinstance(event, ChildGiven) and event.job_id in history.records:
            chain = chain_of(history.records[event.job_id].request)
            given[chain, event.asked].append(event)
    if not any(len(answers) > 1 for answers in given.values()):
        return
    moments = _Moments(history)
    for answers in given.values():
        first: dict[str, ChildGiven] = {}
        for event in answers:
            before = first.setdefault(event.job_id, event)
            if before.child_id != event.child_id:
                yield from _check_again(history, before, event)
            for earlier in [one for try_, one in first.items() if try_ != event.job_id]:
                yield from _check_retry(history, moments, earlier, event)


def _check_again(history: History, before: ChildGiven, now: ChildGiven) -> Iterator[Violation]:
    """Two attempts of one try: only what an earlier try had submitted may be replaced."""
    child = history.records.get(before.child_id)
    if child is None or child.request.parent_job_id == before.job_id:
        said = f"attempt {before.attempt} was given {before.child_id}, then {now.child_id}"
        yield Violation(Promise.SAME, now.job_id, said)


def _check_retry(
    history: History, moments: _Moments, before: ChildGiven, now: ChildGiven
) -> Iterator[Violation]:
    """Two tries: the later one keeps what had succeeded by then, and nothing that failed."""
    if history.records[now.job_id].seq < history.records[before.job_id].seq:
        return  # a late answer to the earlier one
    had = moments.end_before(history, before.child_id, now.job_id)
    if had is None:
        return
    if had is not JobState.SUCCEEDED:
        if before.child_id == now.child_id:
            said = f"was given {now.child_id}, which had ended {had} before"
            yield Violation(Promise.SAME, now.job_id, said)
    elif (last := _last_try(history, now.child_id)) is None or last.state is not JobState.SUCCEEDED:
        # One that was retried meanwhile, and succeeded then, serves as well.
        said = f"was given {now.child_id} although {before.child_id} had succeeded"
        yield Violation(Promise.SAME, now.job_id, said)


# -- slots --------------------------------------------------------------------------------


def _check_slots(history: History) -> Iterator[Violation]:
    slots: dict[str, int] = {}
    running: dict[str, set[tuple[str, int]]] = defaultdict(set)
    without: dict[str, float] = {}
    """When somebody last went on without a slot, by worker."""
    dispatched: dict[tuple[str, int], int] = {}
    broken_off: dict[tuple[str, int], int] = {}
    for place, event in enumerate(history.events):
        match event:
            case Hired(worker_id, count):
                slots[worker_id] = count
            case Dispatched(job_id, attempt):
                dispatched[job_id, attempt] = place
            case Began(job_id, attempt, worker_id):
                running[worker_id].add((job_id, attempt))
                # A wait that is broken off ends at once, though its slot may have been given to a
                # job whose start is being confirmed.
                given = dispatched.get((job_id, attempt), 0)
                counted = [one for one in running[worker_id] if broken_off.get(one, 0) <= given]
                if len(counted) > slots.get(worker_id, len(counted)):
                    said = f"began as number {len(counted)} on {worker_id}"
                    yield Violation(Promise.SLOTS, job_id, said)
            case Finished(job_id, attempt, worker_id) | WaitBegan(job_id, attempt, worker_id):
                running[worker_id].discard((job_id, attempt))
            case WaitEnded(job_id, attempt, worker_id, wanted_at, at, is_broken_off):
                running[worker_id].add((job_id, attempt))
                if is_broken_off:
                    broken_off[job_id, attempt] = place
                if is_broken_off or len(running[worker_id]) <= slots.get(worker_id, 1 << 30):
                    continue
                since = max(wanted_at, without.get(worker_id, 0.0))
                if at - since < _PATIENCE - 0.001:
                    said = f"went on as number {len(running[worker_id])} on {worker_id}"
                    yield Violation(Promise.SLOTS, job_id, said)
                without[worker_id] = at


# -- counts -------------------------------------------------------------------------------


def _check_counts(history: History) -> Iterator[Violation]:
    counts: dict[str, Counter[JobState]] = defaultdict(Counter)
    child_counts: dict[str, Counter[JobState]] = defaultdict(Counter)
    for job in history.records.values():
        if job.successor is None:
            counts[job.request.tenant][job.state] += 1
            if job.request.child_of is not None:
                child_counts[job.request.child_of][job.state] += 1
    for tenant, said in history.counts.items():
        if dict(said) != counts[tenant]:
            yield Violation(Promise.COUNTS, tenant, f"has {dict(counts[tenant])}, not {dict(said)}")
    for parent_id, said in history.child_counts.items():
        if dict(said) != (had := child_counts[parent_id]):
            yield Violation(
                Promise.COUNTS, parent_id, f"has {dict(had)} below it, not {dict(said)}"
            )
