"""Transitions of jobs, and the journal that keeps them.

A *stride* is one move that one or many jobs made in one commit: the same events, actor, time
and worker. A commit appends its strides as one page (a very large one as several). Pages are
numbered in commit order and never change. A job's record lists the pages that it is in, so
its history is found without an index.

`penstock.core.ledger` changes jobs. `fold` derives the same facts from the log alone, by
separate code, so that `penstock verify` can compare the two over a whole database.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from penstock.core.job import Job
from penstock.core.machine import Step
from penstock.lifecycles.canonical import (
    ACTORS,
    CANONICAL,
    TERMINAL,
    JobEvent,
    JobState,
)


class Transition(Struct, frozen=True, gc=False, omit_defaults=True):
    """One entry of the append-only log."""

    job_id: str
    n: int
    """1 for the acceptance, then counting up: equals the job's version after it."""
    before: JobState | None
    event: JobEvent
    after: JobState
    attempt: int
    actor: str
    """A role, or `role:name`."""
    at: float
    reason: str = ""
    worker_id: str | None = None
    """Set where the entry gives the job to a worker."""


class Path(Struct, frozen=True, gc=False):
    """The steps that one move is, and what they amount to."""

    steps: tuple[tuple[JobState | None, JobEvent, JobState], ...]
    before: JobState | None
    after: JobState


_ENDS_OF_WORK = frozenset({JobEvent.SUCCEED, JobEvent.FAIL})
GIVES = frozenset({JobEvent.DISPATCH, JobEvent.REDISPATCH})


BIRTH = Path(((None, CANONICAL.birth, CANONICAL.initial),), None, CANONICAL.initial)


class Plan(Struct, frozen=True, gc=False):
    """What events would do to a state, worked out once for all jobs."""

    path: Path
    refusal: str = ""
    is_empty: bool = False
    """Nothing would change: they only repeat what is."""
    length: int = 0
    after: JobState = JobState.PENDING
    gives: bool = False
    restarts: bool = False
    """It gives to another worker what had started already."""
    starts: bool = False
    asks: bool = False
    ends: bool = False
    is_plain: bool = False
    """It moves a job on, and nothing but its state and the guards need be looked at."""


_PLAIN = (frozenset({JobEvent.SCHEDULE}), frozenset({JobEvent.START}))


@cache
def plan_of(state: JobState, events: tuple[JobEvent, ...], role: str) -> Plan:
    """Ask the table, event by event."""
    if state is JobState.DISPATCHED and events[0] in _ENDS_OF_WORK:
        # A result that overtakes the news of the start implies the start.
        events = (JobEvent.START, *events)
    first = state
    steps: list[tuple[JobState | None, JobEvent, JobState]] = []
    for event in events:
        step = CANONICAL.judge(state, event)
        if step is Step.ILLEGAL:
            return Plan(BIRTH, f"'{event}' can't happen to a job that is {state}")
        if step is Step.REPEAT:
            continue
        if role not in ACTORS[event]:
            return Plan(BIRTH, f"'{event}' is not for a {role} to do")
        before, state = state, CANONICAL.after(state, event)
        steps.append((before, event, state))
    happened = {event for _, event, _ in steps}
    gives = bool(happened & GIVES)
    ends = state in TERMINAL and first not in TERMINAL
    asks = JobEvent.REQUEST_CANCEL in happened
    return Plan(
        Path(tuple(steps), first, state),
        is_empty=not steps,
        length=len(steps),
        after=state,
        gives=gives,
        restarts=first is JobState.RUNNING,
        starts=JobEvent.START in happened,
        asks=asks,
        ends=ends,
        is_plain=happened in _PLAIN or ((gives or ends) and not asks),
    )


class Folded(Struct, frozen=True, gc=False):
    """What a log says of its job."""

    state: JobState
    version: int
    attempt: int
    worker_id: str | None
    accepted_at: float
    updated_at: float
    dispatched_at: float | None
    started_at: float | None
    finished_at: float | None
    cancel_requested: bool

    @classmethod
    def of(cls, job: Job) -> Folded:
        """The same facts, as the record has them."""
        return cls(
            job.state,
            job.version,
            job.attempt,
            job.worker_id,
            job.accepted_at,
            job.updated_at,
            job.dispatched_at,
            job.started_at,
            job.finished_at,
            job.cancel_requested,
        )


class BrokenLog(ValueError):
    """A log that no legal life of a job could have written."""


def fold(log: Iterable[Transition]) -> Folded:
    """Derive a job's facts from its whole log, checking every step against the table."""
    folded: Folded | None = None
    for entry in log:
        folded = _first(entry) if folded is None else _next(folded, entry)
    if folded is None:
        raise BrokenLog("the log is empty")
    return folded


def _first(entry: Transition) -> Folded:
    if entry.n != 1 or entry.before is not None or entry.event is not CANONICAL.birth:
        raise BrokenLog(f"the log does not begin with an acceptance but with {entry}")
    return Folded(entry.after, 1, 0, None, entry.at, entry.at, None, None, None, False)


def _next(so_far: Folded, entry: Transition) -> Folded:
    if entry.n != so_far.version + 1:
        raise BrokenLog(f"entry {entry.n} follows entry {so_far.version}")
    if entry.before is not so_far.state:
        raise BrokenLog(f"entry {entry.n} starts from {entry.before}, not {so_far.state}")
    if CANONICAL.judge(so_far.state, entry.event) is not Step.MOVE:
        raise BrokenLog(f"entry {entry.n}: '{entry.event}' is not legal from {so_far.state}")
    if CANONICAL.after(so_far.state, entry.event) is not entry.after:
        raise BrokenLog(f"entry {entry.n}: '{entry.event}' does not lead to {entry.after}")
    if entry.at < so_far.updated_at:
        raise BrokenLog(f"entry {entry.n} is older than the one before it")
    now = replace(so_far, state=entry.after, version=entry.n, updated_at=entry.at)
    match entry.event:
        case JobEvent.DISPATCH | JobEvent.REDISPATCH:
            if entry.attempt != so_far.attempt + 1:
                raise BrokenLog(f"entry {entry.n}: attempt {entry.attempt} after {so_far.attempt}")
            restarted = entry.at if so_far.state is JobState.RUNNING else None
            now = replace(
                now,
                attempt=entry.attempt,
                worker_id=entry.worker_id,
                dispatched_at=entry.at,
                started_at=restarted,
            )
        case JobEvent.START:
            now = replace(now, started_at=entry.at)
        case JobEvent.REQUEST_CANCEL:
            now = replace(now, cancel_requested=True)
    if entry.after in TERMINAL and so_far.state not in TERMINAL:
        now = replace(now, finished_at=entry.at)
    return now


# -- strides and pages ------------------------------------------------------------

EVENT_BITS = 16
"""A cursor is a page number and, in its last bits, the place of an event in the page."""
PAGE_EVENTS = 4000
"""Events after which a commit begins another page."""


def cursor_of(page: int, index: int) -> int:
    """The cursor of event `index` (from 1 on) of a page."""
    return page << EVENT_BITS | index


def page_of(cursor: int) -> int:
    return cursor >> EVENT_BITS


class Stride(Struct, frozen=True, gc=False):
    """One move that many jobs made together. `jobs` are their records after it."""

    path: Path
    actor: str
    at: float
    reason: str
    worker_id: str | None
    """Set where the move gives the jobs to a worker."""
    pool: str | None
    jobs: list[Job]

    def transitions(self, job: Job) -> tuple[Transition, ...]:
        """The log entries of one of its jobs; the reason belongs to the last."""
        return spell_out(
            self.path.steps,
            job.request.job_id,
            job.version,
            job.attempt,
            self.actor,
            self.at,
            self.reason,
            self.worker_id,
        )


class Page(Struct, frozen=True, gc=False):
    number: int
    strides: list[Stride]


class LoggedStride(Struct, frozen=True, array_like=True):
    """A stride as the journal keeps it: jobs by their `seq`."""

    before: JobState | None
    events: tuple[JobEvent, ...]
    actor: str
    at: float
    reason: str
    worker_id: str | None
    pool: str | None
    seqs: list[int]
    versions: list[int]
    attempts: list[int]

    def transitions(self, index: int, job_id: str) -> tuple[Transition, ...]:
        return spell_out(
            steps_of(self.before, self.events),
            job_id,
            self.versions[index],
            self.attempts[index],
            self.actor,
            self.at,
            self.reason,
            self.worker_id,
        )


@cache
def steps_of(
    before: JobState | None, events: tuple[JobEvent, ...]
) -> tuple[tuple[JobState | None, JobEvent, JobState], ...]:
    steps = []
    state = before
    for event in events:
        after = CANONICAL.initial if state is None else CANONICAL.after(state, event)
        steps.append((state, event, after))
        state = after
    return tuple(steps)


def encode_page(strides: Sequence[Stride]) -> bytes:
    return _encode(
        [
            (
                stride.path.before,
                [event for _, event, _ in stride.path.steps],
                stride.actor,
                stride.at,
                stride.reason,
                stride.worker_id,
                stride.pool,
                [job.seq for job in stride.jobs],
                [job.version for job in stride.jobs],
                [job.attempt for job in stride.jobs],
            )
            for stride in strides
        ]
    )


_encode = msgspec.msgpack.Encoder().encode
decode_page = msgspec.msgpack.Decoder(list[LoggedStride]).decode


def spell_out(
    steps: Sequence[tuple[JobState | None, JobEvent, JobState]],
    job_id: str,
    version: int,
    attempt: int,
    actor: str,
    at: float,
    reason: str,
    worker_id: str | None,
) -> tuple[Transition, ...]:
    """The steps of one job's move; `version` and `attempt` are those after the last."""
    attempt -= sum(event in GIVES for _, event, _ in steps)
    spelled = []
    for n, (before, event, after) in enumerate(steps, start=version - len(steps) + 1):
        given_to = None
        if event in GIVES:
            attempt += 1
            given_to = worker_id
        said = reason if n == version else ""
        spelled.append(
            Transition(job_id, n, before, event, after, attempt, actor, at, said, given_to)
        )
    return tuple(spelled)


def history_of(job: Job, pages: Sequence[tuple[int, Sequence[LoggedStride]]]) -> list[Transition]:
    """A job's transitions up to its version, from the pages that it lists."""
    found: list[Transition] = []
    for _, strides in pages:
        for stride in strides:
            for index, seq in enumerate(stride.seqs):
                if seq == job.seq and stride.versions[index] <= job.version:
                    found.extend(stride.transitions(index, job.job_id))
    return found


def replay(job: Job, page: int, stride: LoggedStride, index: int) -> Job:
    """The record after a stride that its row does not tell of yet.

    Only what the journal alone says: a move that brings a result, a verdict or a hold
    is written to the row in its own commit.
    """
    if stride.versions[index] <= job.version or stride.before is None:
        return job
    plan = plan_of(stride.before, stride.events, stride.actor.partition(":")[0])
    changed = replace(
        job,
        state=plan.after,
        version=stride.versions[index],
        updated_at=stride.at,
        pages=job.pages if job.pages[-1:] == (page,) else (*job.pages, page),
    )
    if plan.gives:
        changed = replace(
            changed,
            attempt=stride.attempts[index],
            worker_id=stride.worker_id,
            pool=stride.pool,
            dispatched_at=stride.at,
            started_at=stride.at if plan.restarts else None,
        )
    if plan.starts:
        changed = replace(changed, started_at=stride.at)
    if plan.asks:
        changed = replace(changed, cancel_requested=True)
    return changed


def catch_up(
    jobs: dict[int, Job], pages: Iterable[tuple[int, Sequence[LoggedStride]]]
) -> list[int]:
    """Bring records, by `seq`, up to date with these pages; answers which of them were behind."""
    behind: dict[int, None] = {}
    for page, strides in pages:
        for stride in strides:
            for index, seq in enumerate(stride.seqs):
                job = jobs.get(seq)
                if job is not None and (now := replay(job, page, stride, index)) is not job:
                    jobs[seq] = now
                    behind[seq] = None
    return list(behind)


def moves_of(
    page: int, strides: Sequence[LoggedStride], after: int
) -> Iterator[tuple[int, LoggedStride, int]]:
    """The moves of a page that end after a cursor: the cursor of the first event, the stride,
    and the place of the job in it."""
    cursor = cursor_of(page, 1)
    for stride in strides:
        length = len(stride.events)
        start = max(0, (after + 1 - cursor) // length)
        for index in range(start, len(stride.seqs)):
            yield cursor + index * length, stride, index
        cursor += len(stride.seqs) * length


def last_cursor(page: int, strides: Sequence[LoggedStride]) -> int:
    """The cursor of a page's last event."""
    return cursor_of(page, sum(len(stride.events) * len(stride.seqs) for stride in strides))
