"""One checker for all reliability tests: did the engine keep its promises?

A test of any kind (a simulation, real processes that are killed, a model) writes down what
could be seen from outside, in the order in which it was seen, and what the store holds in
the end. `check` reads that history and reports every promise that was broken.

What was not observed is not judged: a test that can't see commits leaves them out, and then
the final logs are taken for what was committed.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum

from msgspec import Struct, field

from penstock.core.job import Job, JobRequest
from penstock.core.journal import BrokenLog, Folded, Transition, fold
from penstock.core.ledger import Step
from penstock.lifecycles.canonical import TERMINAL, JobEvent, JobState, Role
from penstock.ports.engine_api import Limit
from penstock.ports.store import Mismatch


class Promise(StrEnum):
    """What is promised, by the name under which its breach is reported."""

    KEPT = "every acknowledged job is in the store"
    ENDED = "every accepted job reaches a final state"
    ONE_END = "a job ends once, and its end is never overwritten"
    TABLE = "no move outside the table"
    FOLD = "a record is the fold of its log"
    ATTEMPTS = "attempts count up by one"
    LIVE = "only the worker that has a job now moves it"
    FENCE = "no two runs under one fence"
    ONCE = "a job that may not run twice does not"
    ANSWERED = "whoever waits for a job is told its end"
    COMMITTED = "nothing is visible before its commit"
    CURRENT = "no worker is told to run what has ended or was given to another"
    LINKED = "a retry is linked both ways, and is the only one"
    UNWANTED = "what was asked to end is not retried"
    UNTOUCHED = "a job is only taken from a worker that was away or gave it back"
    JUDGED = "what goes out was let pass by the rules in force"
    APPROVED = "what people must approve goes out only with their word, under the same rules"
    WITHIN = "no more are with workers than a limit says"
    CHECKPOINT = "a checkpoint that was acknowledged is there for every later reader"
    CHECKPOINT_LIVE = "only the live attempt of a job checkpoints"
    AFTER = "a job goes out after those it waits for, and only if they ended as it wants"
    FAMILY = "children end with a parent that did not succeed, unless they are detached"
    SAME = "a job that runs again gets its children; a retry runs again what did not succeed"
    SLOTS = "no more run on a worker than it has slots, and who waits for others takes none"
    COUNTS = "a job and its retries are counted as one, in the state of the newest try"


class Violation(Struct, frozen=True):
    promise: Promise
    job_id: str
    what: str

    def __str__(self) -> str:
        return f"{self.promise}: {self.job_id}: {self.what}"


# -- what can be seen ---------------------------------------------------------------------


class Committed(Struct, frozen=True):
    """An entry of a job's log became durable."""

    entry: Transition
    at: float = 0.0
    """Monotonic."""


class Acknowledged(Struct, frozen=True):
    """A caller was told that this job is accepted."""

    job: Job


class Dispatched(Struct, frozen=True):
    """A worker was given a job."""

    job_id: str
    attempt: int
    worker_id: str


class StartConfirmed(Struct, frozen=True):
    """A worker was told that a start is durable."""

    job_id: str
    attempt: int


class Told(Struct, frozen=True):
    """Somebody who waited was told the end of a job."""

    job: Job


class Heard(Struct, frozen=True):
    """A reader of a job's updates was told of a move."""

    entry: Transition


class Began(Struct, frozen=True):
    """A worker began to run a job's own code."""

    job_id: str
    attempt: int
    worker_id: str


class Finished(Struct, frozen=True):
    """A worker ran a job's own code to some end."""

    job_id: str
    attempt: int
    worker_id: str


class StepsCommitted(Struct, frozen=True):
    """Rows of an attempt became durable; before the moves of the same commit."""

    job_id: str
    attempt: int


class Checkpointed(Struct, frozen=True):
    """A running job was told that a row is durable."""

    job_id: str
    attempt: int
    place: tuple[str, int]


class StepsRead(Struct, frozen=True):
    """A running job read the rows that there are."""

    job_id: str
    attempt: int
    places: tuple[tuple[str, int], ...]


class GaveBack(Struct, frozen=True):
    """A worker handed a job back that it had not begun."""

    job_id: str
    attempt: int
    worker_id: str


class Absent(Struct, frozen=True):
    """A worker is dead, or was cut off or silent for so long that it may be given up."""

    worker_id: str


class CutOff(Struct, frozen=True):
    """A worker's connection dropped: what was on its way to it may be lost."""

    worker_id: str


class Present(Struct, frozen=True):
    """A worker is there again."""

    worker_id: str


class Hired(Struct, frozen=True):
    """A worker registered, with this many slots."""

    worker_id: str
    slots: int


class ChildGiven(Struct, frozen=True):
    """A running job asked for a child, and was given this one."""

    job_id: str
    attempt: int
    asked: str
    """What for, and the how manieth of the same work that this is in the attempt."""
    child_id: str


class WaitBegan(Struct, frozen=True):
    """A running job began to wait for others."""

    job_id: str
    attempt: int
    worker_id: str


class WaitEnded(Struct, frozen=True):
    """A running job that has waited for others went on."""

    job_id: str
    attempt: int
    worker_id: str
    wanted_at: float
    """Monotonic: when it had what it waited for, and when it went on."""
    at: float
    is_broken_off: bool
    """It did not wait for a slot, as it was cancelled or the wait timed out."""


class Lent(Struct, frozen=True):
    """A worker said that a job waits for others, so that it takes no room in limits."""

    job_id: str
    attempt: int


class TookBack(Struct, frozen=True):
    """A worker was told that there is room again for a job that has waited."""

    job_id: str
    attempt: int


class RulesSet(Struct, frozen=True):
    """The safety kernel was given other rules."""

    snapshot: str


class LimitsSet(Struct, frozen=True):
    """The limiter was given other limits."""

    limits: tuple[Limit, ...]


class Noticed(Struct, frozen=True):
    """The scheduler began a turn: from now on only the newest rules and limits hold."""


Event = (
    Committed
    | Acknowledged
    | Dispatched
    | StartConfirmed
    | Told
    | Heard
    | Began
    | Finished
    | StepsCommitted
    | Checkpointed
    | StepsRead
    | GaveBack
    | Absent
    | CutOff
    | Present
    | Hired
    | ChildGiven
    | WaitBegan
    | WaitEnded
    | Lent
    | TookBack
    | RulesSet
    | LimitsSet
    | Noticed
)


def job_of(event: Event) -> str | None:
    """The job that an event is about; None where it is about a worker or the engine."""
    match event:
        case Committed(entry) | Heard(entry):
            return entry.job_id
        case Acknowledged(job) | Told(job):
            return job.job_id
        case Absent() | CutOff() | Present() | Hired() | RulesSet() | LimitsSet() | Noticed():
            return None
        case _:
            return event.job_id


class History(Struct):
    """What was seen, in order, and what the store holds in the end."""

    events: list[Event] = field(default_factory=list)
    records: Mapping[str, Job] = field(default_factory=dict)
    logs: Mapping[str, Sequence[Transition]] = field(default_factory=dict)
    steps: Mapping[str, Sequence[Step]] = field(default_factory=dict)
    counts: Mapping[str, Mapping[JobState, int]] = field(default_factory=dict)
    """How many jobs of each tenant the store says are in each state."""
    child_counts: Mapping[str, Mapping[JobState, int]] = field(default_factory=dict)
    """The same of the children of a job, by its first try."""
    quiescent: bool = True
    """Whether everything was given the time to come to its end."""
    waiting: Sequence[str] = ()
    """Jobs for whose end somebody still waits when all is over."""
    mismatches: Sequence[Mismatch] = ()
    """What the store itself finds wrong with what it holds."""
    presence_known: bool = False
    """Whether absences and hand-backs of workers were written down."""


def check(history: History) -> list[Violation]:
    """Every promise that this history breaks."""
    return [
        *_check_acknowledged(history),
        *_check_waiting(history),
        *(Violation(Promise.FOLD, found.job_id, found.problem) for found in history.mismatches),
        *_check_ends(history),
        *_check_logs(history),
        *_check_live(history),
        *_check_links(history),
        *_check_runs(history),
        *_check_order(history),
        *_check_checkpoints(history),
        *(_check_presence(history) if history.presence_known else ()),
    ]


# -- what the store holds -----------------------------------------------------------------


def _check_acknowledged(history: History) -> Iterator[Violation]:
    for event in history.events:
        if isinstance(event, Acknowledged):
            job_id = event.job.job_id
            held = history.records.get(job_id)
            if held is None:
                yield Violation(Promise.KEPT, job_id, "was acknowledged and is gone")
            elif held.request != event.job.request:
                yield Violation(Promise.KEPT, job_id, "is not the request that was acknowledged")


def _check_waiting(history: History) -> Iterator[Violation]:
    for job_id in history.waiting:
        record = history.records.get(job_id)
        if record is not None and record.state in TERMINAL:
            yield Violation(Promise.ANSWERED, job_id, f"is {record.state}, and a caller waits on")


def _check_ends(history: History) -> Iterator[Violation]:
    told: dict[str, Job] = {}
    for event in history.events:
        if isinstance(event, Told):
            job = event.job
            before = told.setdefault(job.job_id, job)
            if (before.state, before.result) != (job.state, job.result):
                yield Violation(
                    Promise.ONE_END, job.job_id, f"told {before.state}, then {job.state}"
                )
    for job_id, record in history.records.items():
        if history.quiescent and record.state not in TERMINAL:
            yield Violation(Promise.ENDED, job_id, f"is still {record.state}")
        if job_id in told and (told[job_id].state, told[job_id].result) != (
            record.state,
            record.result,
        ):
            yield Violation(
                Promise.ONE_END, job_id, f"was told {told[job_id].state}, is {record.state}"
            )
        ends = [entry.after for entry in history.logs[job_id] if _is_end(entry)]
        if len(ends) > 1:
            yield Violation(Promise.ONE_END, job_id, f"ended {' and '.join(ends)}")


def _check_logs(history: History) -> Iterator[Violation]:
    for job_id, record in history.records.items():
        log = history.logs[job_id]
        attempts = [entry.attempt for entry in log if entry.event in _GIVING]
        if attempts != list(range(1, len(attempts) + 1)):
            yield Violation(Promise.ATTEMPTS, job_id, f"were {attempts}")
        try:
            folded = fold(log)
        except BrokenLog as error:
            yield Violation(Promise.TABLE, job_id, str(error))
            continue
        if folded != Folded.of(record):
            yield Violation(Promise.FOLD, job_id, f"is {Folded.of(record)}, its log says {folded}")


def _check_live(history: History) -> Iterator[Violation]:
    for job_id, record in history.records.items():
        holder: str | None = None
        for entry in history.logs[job_id]:
            if entry.event in _GIVING:
                holder = entry.worker_id
            role, _, who = entry.actor.partition(":")
            if role == Role.WORKER and entry.event is not JobEvent.NOTE and who != holder:
                said = f"'{entry.event}' by {who} while {holder} had it"
                yield Violation(Promise.LIVE, job_id, said)
        result = record.result
        if result is not None and result.attempt not in (0, record.attempt):
            said = f"the result of attempt {result.attempt} ended attempt {record.attempt}"
            yield Violation(Promise.LIVE, job_id, said)


def _check_links(history: History) -> Iterator[Violation]:
    children: dict[str, list[JobRequest]] = defaultdict(list)
    for record in history.records.values():
        if record.request.retry_number:
            children[record.request.parent_job_id or ""].append(record.request)
        if (successor := record.successor) is not None:
            held = history.records.get(successor)
            if held is None or held.request.parent_job_id != record.job_id:
                yield Violation(Promise.LINKED, record.job_id, f"{successor} does not know it")
    for parent_id, retries in children.items():
        names = sorted(retry.job_id for retry in retries)
        if len(names) > 1:
            yield Violation(Promise.LINKED, parent_id, f"was retried as {' and '.join(names)}")
        parent = history.records.get(parent_id)
        if parent is None or parent.successor not in names:
            yield Violation(Promise.LINKED, parent_id, f"does not know its retry {names[0]}")
        elif _was_asked_to_end(history.logs[parent_id]):
            yield Violation(Promise.UNWANTED, parent_id, f"was retried as {names[0]}")


def _is_end(entry: Transition) -> bool:
    return entry.after in TERMINAL and entry.event is not JobEvent.NOTE


def _was_asked_to_end(log: Sequence[Transition]) -> bool:
    return any(entry.event is JobEvent.REQUEST_CANCEL for entry in log)


_GIVING = (JobEvent.DISPATCH, JobEvent.REDISPATCH)


# -- what ran -----------------------------------------------------------------------------


def _check_runs(history: History) -> Iterator[Violation]:
    runs = [event for event in history.events if isinstance(event, Began)]
    for (job_id, attempt), count in Counter((run.job_id, run.attempt) for run in runs).items():
        if count > 1:
            yield Violation(Promise.FENCE, job_id, f"attempt {attempt} ran {count} times")
    attempts: dict[str, set[int]] = defaultdict(set)
    for run in runs:
        attempts[run.job_id].add(run.attempt)
    for job_id, ran in attempts.items():
        record = history.records.get(job_id)
        if record is None:
            yield Violation(Promise.KEPT, job_id, "ran and is not in the store")
        elif len(ran) > 1 and not record.request.idempotent:
            yield Violation(Promise.ONCE, job_id, f"attempts {sorted(ran)} ran")


# -- when it was seen ---------------------------------------------------------------------


class _Durable:
    """What is committed at a moment of the history."""

    def __init__(self) -> None:
        self.versions: dict[str, int] = defaultdict(int)
        self.given: set[tuple[str, int, str | None]] = set()
        self.started: set[tuple[str, int]] = set()
        self.attempts: dict[str, int] = defaultdict(int)
        self.ends: dict[str, JobState] = {}
        self.entries: set[tuple[str, int, JobEvent]] = set()

    def add(self, entry: Transition) -> None:
        self.versions[entry.job_id] = max(self.versions[entry.job_id], entry.n)
        self.entries.add((entry.job_id, entry.n, entry.event))
        if entry.event in _GIVING:
            self.given.add((entry.job_id, entry.attempt, entry.worker_id))
            self.attempts[entry.job_id] = entry.attempt
        if entry.after is JobState.RUNNING:
            self.started.add((entry.job_id, entry.attempt))
        if _is_end(entry):
            self.ends.setdefault(entry.job_id, entry.after)


def _check_order(history: History) -> Iterator[Violation]:
    durable = _Durable()
    commits_known = any(isinstance(event, Committed) for event in history.events)
    if not commits_known:
        for log in history.logs.values():
            for entry in log:
                durable.add(entry)
    for event in history.events:
        if isinstance(event, Committed):
            durable.add(event.entry)
        elif (early := _what_is_early(event, durable)) is not None:
            yield Violation(Promise.COMMITTED, *early)
        elif commits_known and isinstance(event, Dispatched | StartConfirmed):
            if event.job_id in durable.ends:
                said = f"attempt {event.attempt} after it ended {durable.ends[event.job_id]}"
                yield Violation(Promise.CURRENT, event.job_id, said)
            elif event.attempt != durable.attempts[event.job_id]:
                said = f"attempt {event.attempt} after {durable.attempts[event.job_id]}"
                yield Violation(Promise.CURRENT, event.job_id, said)


def _what_is_early(event: Event, durable: _Durable) -> tuple[str, str] | None:
    match event:
        case Acknowledged(job) if durable.versions[job.job_id] < job.version:
            return job.job_id, f"version {job.version} was acknowledged"
        case Dispatched(job_id, attempt, worker_id):
            if (job_id, attempt, worker_id) not in durable.given:
                return job_id, f"attempt {attempt} was sent to {worker_id}"
        case StartConfirmed(job_id, attempt) if (job_id, attempt) not in durable.started:
            return job_id, f"the start of attempt {attempt} was confirmed"
        case Told(job) if durable.ends.get(job.job_id) is not job.state:
            return job.job_id, f"its end {job.state} was told"
        case Heard(entry) if (entry.job_id, entry.n, entry.event) not in durable.entries:
            return entry.job_id, f"entry {entry.n} ({entry.event}) was told"
    return None


def _check_checkpoints(history: History) -> Iterator[Violation]:
    kept: dict[str, dict[tuple[str, int], int]] = defaultdict(dict)
    """By job and row: the first attempt that wrote it. A late answer to an attempt that is over
    need not have what its successor wrote."""
    live: dict[str, int] = {}
    for event in history.events:
        match event:
            case Committed(entry):
                if entry.event in _GIVING:
                    live[entry.job_id] = entry.attempt
                elif _is_end(entry):
                    live.pop(entry.job_id, None)
            case StepsCommitted(job_id, attempt) if live.get(job_id) != attempt:
                said = f"attempt {attempt} wrote while {live.get(job_id)} was live"
                yield Violation(Promise.CHECKPOINT_LIVE, job_id, said)
            case Checkpointed(job_id, attempt, place):
                kept[job_id].setdefault(place, attempt)
            case StepsRead(job_id, attempt, places) if lost := {
                place for place, by in kept[job_id].items() if by <= attempt
            }.difference(places):
                said = f"attempt {attempt} did not find {sorted(lost)}"
                yield Violation(Promise.CHECKPOINT, job_id, said)
    for job_id, held in kept.items():
        found = history.steps.get(job_id, ())
        if lost := set(held).difference((step.name, step.n) for step in found):
            yield Violation(Promise.CHECKPOINT, job_id, f"{sorted(lost)} are gone")


def _check_presence(history: History) -> Iterator[Violation]:
    """A worker that was there the whole time keeps what it was given."""
    holder: dict[str, str | None] = {}
    away: set[str | None] = set()
    cut: set[str | None] = set()
    excused: set[str] = set()
    excused_unstarted: set[str] = set()

    def held_by(worker_id: str) -> set[str]:
        return {job_id for job_id, holds in holder.items() if holds == worker_id}

    for event in history.events:
        match event:
            case CutOff(worker_id):
                cut.add(worker_id)
                excused_unstarted |= held_by(worker_id)
            case Present(worker_id):
                away.discard(worker_id)
                cut.discard(worker_id)
            case Absent(worker_id):
                away.add(worker_id)
                excused |= held_by(worker_id)
            case GaveBack(job_id):
                excused.add(job_id)
            case Committed(entry):
                taken = entry.event is JobEvent.REDISPATCH or (
                    entry.event is JobEvent.EXPIRE and entry.reason.startswith("WORKER_LOST")
                )
                if entry.job_id in excused_unstarted and entry.before is JobState.DISPATCHED:
                    taken = False
                if taken and entry.job_id not in excused:
                    said = f"'{entry.event}' took it from {holder.get(entry.job_id)}"
                    yield Violation(Promise.UNTOUCHED, entry.job_id, said)
                if entry.event in _GIVING:
                    holder[entry.job_id] = entry.worker_id
                    excused.discard(entry.job_id)
                    excused_unstarted.discard(entry.job_id)
                    if entry.worker_id in away:
                        excused.add(entry.job_id)
                    if entry.worker_id in cut:
                        excused_unstarted.add(entry.job_id)
