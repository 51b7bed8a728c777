"""One log entry, what a move does to a state, and the fold that reads a log back.

`penstock.core.ledger` changes jobs. `fold` derives the same facts from the log alone, by
separate code, so that `penstock verify` can compare the two over a whole database.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

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

    @property
    def before(self) -> JobState | None:
        return self.steps[0][0]

    @property
    def after(self) -> JobState:
        return self.steps[-1][2]


_ENDS_OF_WORK = frozenset({JobEvent.SUCCEED, JobEvent.FAIL})
GIVES = frozenset({JobEvent.DISPATCH, JobEvent.REDISPATCH})


BIRTH = Path(((None, CANONICAL.birth, CANONICAL.initial),))


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


_PLAIN = frozenset({JobEvent.SCHEDULE})


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
        Path(tuple(steps)),
        is_empty=not steps,
        length=len(steps),
        after=state,
        gives=gives,
        restarts=first is JobState.RUNNING,
        starts=JobEvent.START in happened,
        asks=asks,
        ends=ends,
        is_plain=happened == _PLAIN or ((gives or ends) and not asks),
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
