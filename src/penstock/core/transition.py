"""One log entry, the moves that make entries, and the fold that reads them back.

`advance` is the only place where a job changes: every store calls it with the record it
holds and the `Move` that somebody wants, and writes down what it answers. `fold` derives
the same facts from the log alone, by separate code, so that `penstock verify` can compare
the two over a whole database.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from functools import cache

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.job import Job, JobRequest, JobResult
from penstock.core.machine import Step
from penstock.lifecycles.canonical import (
    ACTORS,
    CANONICAL,
    TERMINAL,
    JobEvent,
    JobState,
    Role,
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


class Accept(Struct, frozen=True, gc=False):
    """Make this request a durable PENDING job."""

    request: JobRequest
    at: float
    actor: str = Role.GATEWAY.value
    reason: str = ""
    fresh: bool = False
    """The id was just generated here, so nobody can hold it yet."""
    unless_cancelled: bool = False
    """Where it follows a move: not if that job was asked to end in the meantime."""


class Move(Struct, frozen=True, gc=False):
    """Let these events happen to one job, all or none, if the guards hold."""

    job_id: str
    events: tuple[JobEvent, ...]
    actor: str
    at: float
    reason: str = ""
    version: int | None = None
    """Refuse unless the record still has this version."""
    attempt: int | None = None
    """Refuse unless this is still the live attempt (the fence)."""
    worker_id: str | None = None
    pool: str | None = None
    result: JobResult | None = None
    then: tuple[Accept, ...] = ()
    """Accepted in the same commit if, and only if, this moves: a retry, say."""


Change = Accept | Move


class Verdict(Enum):
    MOVED = "moved"
    REPEATED = "repeated"
    REFUSED = "refused"


class Answer(Struct, frozen=True, gc=False):
    """What became of one change, and the record as it now is."""

    verdict: Verdict
    job: Job | None
    transitions: tuple[Transition, ...] = ()
    why: str = ""

    @property
    def moved(self) -> bool:
        return self.verdict is Verdict.MOVED


_MOVED, _REPEATED, _REFUSED = Verdict.MOVED, Verdict.REPEATED, Verdict.REFUSED
_ENDS_OF_WORK = frozenset({JobEvent.SUCCEED, JobEvent.FAIL})
_GIVES = frozenset({JobEvent.DISPATCH, JobEvent.REDISPATCH})


def admit(accept: Accept, seq: int) -> Answer:
    """The first entry of a job's log."""
    request = accept.request
    job = Job(
        seq=seq,
        request=request,
        state=JobState.PENDING,
        version=1,
        accepted_at=accept.at,
        updated_at=accept.at,
    )
    entry = Transition(
        request.job_id,
        1,
        None,
        JobEvent.ACCEPT,
        JobState.PENDING,
        0,
        accept.actor,
        accept.at,
        accept.reason,
    )
    return Answer(_MOVED, job, (entry,))


def followers(job: Job, move: Move) -> tuple[Accept, ...]:
    """What is accepted with a move if it moves `job` as it is now."""
    if not (move.then and job.cancel_requested):
        return move.then
    return tuple(accept for accept in move.then if not accept.unless_cancelled)


def advance(job: Job, move: Move) -> Answer:
    """Apply a move to a record, or say why not. Pure."""
    if move.version is not None and move.version != job.version:
        return Answer(_REFUSED, job, why=f"the job has moved on to version {job.version}")
    if move.attempt is not None and move.attempt != job.attempt:
        return Answer(_REFUSED, job, why=f"attempt {move.attempt} is not live: {job.attempt} is")
    path = _path(job.state, move.events, move.actor.partition(":")[0])
    if isinstance(path, str):
        return Answer(_REFUSED, job, why=path)

    at = max(move.at, job.updated_at)
    state, version, attempt = job.state, job.version, job.attempt
    worker_id, pool = job.worker_id, job.pool
    dispatched_at, started_at, finished_at = job.dispatched_at, job.started_at, job.finished_at
    cancel_requested, result = job.cancel_requested, job.result
    then = followers(job, move)
    entries: list[Transition] = []

    for before, event, after in path:
        given_to = None
        if event in _GIVES:
            attempt += 1
            worker_id = given_to = move.worker_id
            pool = move.pool
            dispatched_at = at
            started_at = at if before is JobState.RUNNING else None
        elif event is JobEvent.START:
            started_at = at
        elif event is JobEvent.REQUEST_CANCEL:
            if cancel_requested:
                continue
            cancel_requested = True
        reason = move.reason if event is move.events[-1] else ""
        if then and after in TERMINAL and before not in TERMINAL:
            reason = f"{reason} (retried as {then[0].request.job_id})".lstrip()
        state = after
        version += 1
        entries.append(
            Transition(
                job.request.job_id,
                version,
                before,
                event,
                after,
                attempt,
                move.actor,
                at,
                reason,
                given_to,
            )
        )

    if not entries:
        return Answer(_REPEATED, job)
    if state in TERMINAL and finished_at is None:
        finished_at = at
        result = move.result
    changed = Job(
        seq=job.seq,
        request=job.request,
        state=state,
        version=version,
        accepted_at=job.accepted_at,
        updated_at=at,
        attempt=attempt,
        worker_id=worker_id,
        pool=pool,
        dispatched_at=dispatched_at,
        started_at=started_at,
        finished_at=finished_at,
        cancel_requested=cancel_requested,
        result=result,
        successor=then[0].request.job_id if then else job.successor,
    )
    return Answer(_MOVED, changed, tuple(entries))


Path = tuple[tuple[JobState, JobEvent, JobState], ...]


@cache
def _path(state: JobState, events: tuple[JobEvent, ...], role: str) -> Path | str:
    """The steps that these events are from this state, or why they can't be taken."""
    if state is JobState.DISPATCHED and events[0] in _ENDS_OF_WORK:
        # A result that overtakes the news of the start implies the start.
        events = (JobEvent.START, *events)
    steps = []
    for event in events:
        step = CANONICAL.judge(state, event)
        if step is Step.ILLEGAL:
            return f"'{event}' can't happen to a job that is {state}"
        if step is Step.REPEAT:
            continue
        if role not in ACTORS[event]:
            return f"'{event}' is not for a {role} to do"
        before, state = state, CANONICAL.after(state, event)
        steps.append((before, event, state))
    return tuple(steps)


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
