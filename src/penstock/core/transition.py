"""One log entry, the moves that make entries, and the fold that reads them back.

`advance` is the only place where a job changes: every store calls it with the record it
holds and the `Move` that somebody wants, and writes down what it answers. `fold` derives
the same facts from the log alone, by separate code, so that `penstock verify` can compare
the two over a whole database.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from functools import cache

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.job import Job, JobRequest, JobResult
from penstock.core.machine import Step
from penstock.core.verdict import Hold, SafetyVerdict
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
    all_or_none: bool = False
    """Refuse every change of the batch if a different request has this one's id or key."""


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
    verdict: SafetyVerdict | None = None
    """What the safety kernel said, where this is the move that follows from it."""
    hold: Hold | None = None
    """With PARK and APPROVE: the hold as it is from now on."""
    then: tuple[Accept, ...] = ()
    """Accepted in the same commit if, and only if, this moves: a retry, say."""


Change = Accept | Move


class Verdict(Enum):
    MOVED = "moved"
    REPEATED = "repeated"
    REFUSED = "refused"


class Path(Struct, frozen=True, gc=False):
    """The steps that one move is, and what they amount to."""

    steps: tuple[tuple[JobState | None, JobEvent, JobState], ...]

    @property
    def before(self) -> JobState | None:
        return self.steps[0][0]

    @property
    def after(self) -> JobState:
        return self.steps[-1][2]


class Entry(Struct, frozen=True, gc=False):
    """What one move wrote in the log: all of its steps, at one time, by one actor."""

    job_id: str
    n: int
    """The number of the last step."""
    path: Path
    attempt: int
    """As it is after the last step."""
    actor: str
    at: float
    reason: str
    worker_id: str | None

    def transitions(self) -> tuple[Transition, ...]:
        """Spelled out, step by step; the reason belongs to the last."""
        steps = self.path.steps
        attempt = self.attempt - sum(event in _GIVES for _, event, _ in steps)
        spelled = []
        for n, (before, event, after) in enumerate(steps, start=self.n - len(steps) + 1):
            given_to = None
            if event in _GIVES:
                attempt += 1
                given_to = self.worker_id
            reason = self.reason if n == self.n else ""
            spelled.append(
                Transition(
                    self.job_id,
                    n,
                    before,
                    event,
                    after,
                    attempt,
                    self.actor,
                    self.at,
                    reason,
                    given_to,
                )
            )
        return tuple(spelled)


class Answer(Struct, frozen=True, gc=False):
    """What became of one change, and the record as it now is."""

    verdict: Verdict
    job: Job | None
    entry: Entry | None = None
    why: str = ""

    @property
    def moved(self) -> bool:
        return self.verdict is Verdict.MOVED

    @property
    def transitions(self) -> tuple[Transition, ...]:
        return () if self.entry is None else self.entry.transitions()


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
    entry = Entry(request.job_id, 1, BIRTH, 0, accept.actor, accept.at, accept.reason, None)
    return Answer(_MOVED, job, entry)


BIRTH = Path(((None, CANONICAL.birth, CANONICAL.initial),))


def followers(job: Job, move: Move) -> tuple[Accept, ...]:
    """What is accepted with a move if it moves `job` as it is now."""
    if not (move.then and job.cancel_requested):
        return move.then
    return tuple(accept for accept in move.then if not accept.unless_cancelled)


def refusal(batch: Sequence[Change], conflict: Accept, held: Job) -> list[Answer]:
    """The answers to a batch of which nothing is done, because `held` has the id or key of one."""
    why = f"job {held.job_id} has the id or key of {conflict.request.job_id}"
    return [Answer(_REFUSED, held if one is conflict else None, why=why) for one in batch]


def advance(job: Job, move: Move) -> Answer:
    """Apply a move to a record, or say why not. Pure."""
    if move.version is not None and move.version != job.version:
        return Answer(_REFUSED, job, why=f"the job has moved on to version {job.version}")
    if move.attempt is not None and move.attempt != job.attempt:
        return Answer(_REFUSED, job, why=f"attempt {move.attempt} is not live: {job.attempt} is")
    plan = plan_of(job.state, move.events, move.actor.partition(":")[0])
    if plan.refusal:
        return Answer(_REFUSED, job, why=plan.refusal)
    if plan.is_empty or (plan.asks and job.cancel_requested):
        return Answer(_REPEATED, job)

    at = max(move.at, job.updated_at)
    then = followers(job, move) if move.then else ()
    reason = move.reason
    attempt, worker_id, pool = job.attempt, job.worker_id, job.pool
    dispatched_at, started_at, finished_at = job.dispatched_at, job.started_at, job.finished_at
    result = job.result
    if plan.gives:
        attempt += 1
        worker_id, pool = move.worker_id, move.pool
        dispatched_at = at
        started_at = at if plan.restarts else None
    if plan.starts:
        started_at = at
    if plan.ends:
        finished_at = at
        result = move.result
        if then:
            reason = f"{reason} (retried as {then[0].request.job_id})".lstrip()
    version = job.version + plan.length
    changed = Job(
        seq=job.seq,
        request=job.request,
        state=plan.after,
        version=version,
        accepted_at=job.accepted_at,
        updated_at=at,
        attempt=attempt,
        worker_id=worker_id,
        pool=pool,
        dispatched_at=dispatched_at,
        started_at=started_at,
        finished_at=finished_at,
        cancel_requested=job.cancel_requested or plan.asks,
        result=result,
        successor=then[0].request.job_id if then else job.successor,
        verdict=job.verdict if move.verdict is None else move.verdict,
        hold=job.hold if move.hold is None else move.hold,
    )
    given_to = worker_id if plan.gives else None
    entry = Entry(job.request.job_id, version, plan.path, attempt, move.actor, at, reason, given_to)
    return Answer(_MOVED, changed, entry)


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
    return Plan(
        Path(tuple(steps)),
        is_empty=not steps,
        length=len(steps),
        after=state,
        gives=bool(happened & _GIVES),
        restarts=first is JobState.RUNNING,
        starts=JobEvent.START in happened,
        asks=JobEvent.REQUEST_CANCEL in happened,
        ends=state in TERMINAL and first not in TERMINAL,
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
