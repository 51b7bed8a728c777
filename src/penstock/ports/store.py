"""Where jobs are kept: the backend that writes what `penstock.core.ledger` decided.

A backend stores and finds; it never decides. Everything above it is in
`penstock.control.ledger`, which merges callers into one commit and holds the open jobs.
Reads and writes may suspend and may fail.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Generic, Protocol, TypedDict, TypeVar

from msgspec import Struct

from penstock.core.job import Job
from penstock.core.journal import LoggedStride, Transition
from penstock.core.ledger import Commit, Counts, Known, Step, Wanted
from penstock.core.steps import MAX_PAGE_BYTES, MAX_PAGE_ROWS
from penstock.lifecycles.canonical import JobState


class Durability(StrEnum):
    """What an acknowledged change survives."""

    DISK = "disk"
    """Power loss: every commit is flushed to disk."""
    OS = "os"
    """The death of the process, but not of the machine."""
    MEMORY = "memory"
    """Nothing: for tests."""


MAX_SEARCHED = 20_000
"""Jobs in whose errors a text is looked for: the newest that match the other conditions."""


class JobQuery(Struct, frozen=True, kw_only=True):
    """Which jobs, newest first. All conditions must hold.

    A job and its retries are one: the conditions are those of its newest try, which stands for
    them. `tries`, and each of `job_id`, `parent_job_id`, `first_try` and `idempotency_key`, asks
    for tries one by one instead.
    """

    job_id: str | None = None
    """A glob, as in `*4cw6`."""
    states: tuple[JobState, ...] = ()
    topic: str | None = None
    """A glob, as in `job.text.*`."""
    tenant: str | None = None
    parent_job_id: str | None = None
    child_of: str | None = None
    """The children of a job, by the id of its first try."""
    first_try: str | None = None
    """The tries of one job: the one with this id and its retries."""
    workflow_id: str | None = None
    """Jobs of a workflow come in the order of their step_index instead, unless `before` or `since`
    asks for a page by `seq`."""
    labels: Mapping[str, str] = {}
    idempotency_key: str | None = None
    principal: str | None = None
    schedule: str | None = None
    error: str | None = None
    """Text in the error code or message of a job that ended without success. The case of ASCII
    letters does not matter. It is looked for in the newest 20,000 that match all else."""
    awaiting_approval: bool | None = None
    """True: only jobs that are awaiting approval; False: only those that are not."""
    dead: bool = False
    """Only what ended FAILED or TIMEOUT and was not retried: the dead letters."""
    tries: bool = False
    """Every try, also those that were retried since."""
    accepted_from: float | None = None
    accepted_to: float | None = None
    """Accepted from the one time on, and before the other."""
    before: int | None = None
    """Only jobs accepted before this `seq`: where the page before ended."""
    since: int | None = None
    """Only jobs accepted after this `seq`: where the page before ended, oldest first."""
    oldest_first: bool = False
    limit: int = 50

    @property
    def by_step(self) -> bool:
        """Whether they come in the order of a workflow."""
        return self.workflow_id is not None and self.before is None and self.since is None

    @property
    def folded(self) -> bool:
        """Whether the newest try of a job stands for all."""
        by_id = (self.job_id, self.parent_job_id, self.first_try, self.idempotency_key)
        return not self.tries and by_id == (None, None, None, None)


class JobConditions(TypedDict, total=False):
    """The fields of a JobQuery as arguments of a call, as `client.jobs(topic="job.text.*")`."""

    job_id: str | None
    states: tuple[JobState, ...]
    topic: str | None
    tenant: str | None
    parent_job_id: str | None
    child_of: str | None
    first_try: str | None
    workflow_id: str | None
    labels: Mapping[str, str]
    idempotency_key: str | None
    principal: str | None
    schedule: str | None
    error: str | None
    awaiting_approval: bool | None
    dead: bool
    tries: bool
    accepted_from: float | None
    accepted_to: float | None
    before: int | None
    since: int | None
    oldest_first: bool
    limit: int


class LogLine(Struct, frozen=True):
    """One line that a job wrote."""

    job_id: str
    attempt: int
    at: float
    level: str
    text: str
    n: int = 0
    """Its place in the job's output, given by the store: where a reader resumes."""


class JournalEvent(Struct, frozen=True, gc=False):
    """One transition, with its place in the journal of the whole store."""

    cursor: int
    """Grows from one event to the next, over all jobs; not every number is used."""
    tenant: str
    topic: str
    transition: Transition


class AuditEntry(Struct, frozen=True, omit_defaults=True):
    """Who did what, and whether they were let."""

    at: float
    principal: str
    action: str
    """As `job.cancel`, `key.create`, `pool.pause`."""
    subject: str = ""
    """What it was done to: a job_id, a name."""
    tenant: str | None = None
    detail: str = ""
    outcome: str = "done"
    """done or refused"""
    n: int = 0
    """Its place in the log, given by the store."""


class AuditQuery(Struct, frozen=True, kw_only=True):
    """Which entries, newest first."""

    principal: str | None = None
    action: str | None = None
    """A glob, as in `key.*`."""
    subject: str | None = None
    tenant: str | None = None
    before: int | None = None
    """Only entries before this `n`: where the page before ended."""
    limit: int = 50


class Mismatch(Struct, frozen=True):
    """A job whose record is not the fold of its log."""

    job_id: str
    problem: str


class Verified(Struct, frozen=True):
    """What a whole reading of the store found."""

    jobs: int
    transitions: int
    mismatches: tuple[Mismatch, ...]


class Pruned(Struct, frozen=True):
    """What a clean-up removed."""

    jobs: int
    transitions: int
    log_lines: int
    steps: int = 0


class StepQuery(Struct, frozen=True, kw_only=True):
    """Which checkpointed rows of a job, by name and place."""

    name: str | None = None
    after: tuple[str, int] | None = None
    """Only rows after this (name, n): where the page before ended."""
    outcomes: tuple[str, ...] = ()
    """Only rows with one of these outcomes; of any, if there are none."""
    limit: int = MAX_PAGE_ROWS


class StepPage(Struct, frozen=True):
    """Some checkpointed rows: at most as many as asked for, and not many bytes."""

    steps: list[Step]
    more: bool
    """Whether there are rows after these."""

    @classmethod
    def of(cls, rows: Iterable[tuple[int, Step]], limit: int) -> StepPage:
        """The first of these rows, each given with its size; one at least, if there is one."""
        steps: list[Step] = []
        total = 0
        for size, step in rows:
            total += size
            if len(steps) >= limit or (steps and total > MAX_PAGE_BYTES):
                return cls(steps, more=True)
            steps.append(step)
        return cls(steps, more=False)

    @property
    def last(self) -> tuple[str, int] | None:
        """Where the next page begins, if there is one."""
        return (self.steps[-1].name, self.steps[-1].n) if self.more else None


class StepCount(Struct, frozen=True):
    """How many checkpointed rows of a job have this name and outcome."""

    name: str
    outcome: str
    rows: int
    size: int
    """Bytes."""


class Extras(Struct, frozen=True, kw_only=True):
    """Writes that are part of a commit and need no decision."""

    lines: list[LogLine] = []
    audit: list[AuditEntry] = []
    facts: dict[str, bytes | None] = {}
    """Named facts of the engine itself; None drops one."""
    replayed: int | None = None
    """With this commit, all rows are up to date with the journal up to this page: a restart
    replays only what comes after it."""

    def __bool__(self) -> bool:
        return bool(self.lines or self.audit or self.facts or self.replayed)


class Opened(Struct, frozen=True):
    """What an owner of a store needs to know at its start."""

    epoch: int
    """This owner's number: a write with another one is refused."""
    next_seq: int
    next_page: int
    open_jobs: list[Job]
    """Every job in no final state, in the order of acceptance, brought up to date from the
    journal."""
    lagging: list[int]
    """The `seq`s of those whose rows lag behind."""
    counts: Counts
    """Of finished jobs, and of tries that were retried."""
    alone: bool = True
    """Whether it is certain that no earlier owner runs any more."""


JournalPages = list[tuple[int, list[LoggedStride]]]


class Newer(Struct, frozen=True):
    """What a reader of a store that another engine owns has not seen yet."""

    epoch: int
    """The owner's number."""
    replayed: int
    """The page of the journal up to which no row lags behind."""
    pages: JournalPages
    open_jobs: dict[int, Job]
    """The jobs of these pages that have not ended, by `seq`, as their rows have them."""


class FollowedBackend(Protocol):
    """What a backend has besides if engines that don't own it can read along."""

    async def newer(self, epoch: int, page: int) -> Newer:
        """What was committed after this page; all that rows may lag behind, if the owner's
        number is not this one any more."""

    async def count_open(self, skip: Collection[int]) -> list[tuple[str, str, JobState, int]]:
        """The jobs that have not ended by tenant, topic and state, without these."""

    async def count_ended(self) -> Counts:
        """The others, and tries that were retried."""


class Backend(Protocol):
    """Every method but `close` raises StoreFailed if the storage fails."""

    durability: Durability

    async def open(self, *, own: bool = True) -> Opened:
        """Bring the storage up to date and own it: an earlier owner can write no more.

        Without `own`, only look at it: nothing is changed.
        """

    async def load(self, wanted: Wanted) -> Known:
        """The records with these ids and keys, as their rows have them."""

    async def write(self, commit: Commit, extras: Extras, epoch: int) -> None:
        """Write all of it durably, or nothing.

        Rows of `lagging` jobs need not be written. Raises Unstorable if a value can never be
        written, and StoreFailed if the epoch is not the owner's.
        """

    async def fetch(self, seqs: Sequence[int]) -> list[Job]:
        """The records with these `seq`s that exist, in the order asked for."""

    async def find(self, query: JobQuery, skip: Collection[int] = ()) -> list[Job]:
        """A page of records as their rows have them, but for those with a `seq` in `skip`."""

    async def journal(self, pages: Sequence[int]) -> JournalPages:
        """These journal pages, as far as they exist, in order."""

    async def events(self, after: int, limit: int) -> list[JournalEvent]:
        """What was committed after this cursor, in order; a move's steps are never parted.

        More than `limit` only to finish a move. Events of pruned jobs are left out.
        """

    async def last_event(self) -> int:
        """The cursor of the newest event; 0 if there never was one."""

    async def read_log(self, job_id: str, after: int = 0, limit: int = 1000) -> list[LogLine]: ...

    async def read_steps(self, job_id: str, query: StepQuery) -> StepPage: ...

    async def count_steps(self, job_id: str) -> list[StepCount]:
        """By name and outcome, in that order."""

    async def count_children(
        self, first_try: str, tenant: str | None, skip: Collection[int]
    ) -> dict[JobState, int]:
        """The children of a job by state, each with its retries as one, as their rows have them;
        those of one tenant, or of all; but for those with a `seq` in `skip`."""

    async def read_audit(self, query: AuditQuery) -> list[AuditEntry]: ...

    async def facts(self, prefix: str) -> dict[str, bytes]:
        """Every named fact whose name begins so, by name, in order."""

    async def pointers(self) -> set[str]:
        """Every stored blob that is the input or result of a job, or of one of its steps."""

    async def refers(self, tenant: str, pointer: str) -> bool:
        """Whether a job of this tenant, or one of its steps, has this blob as input or result."""

    async def miscounted(self) -> list[Mismatch]:
        """Where the stored counts of finished jobs differ from the rows there are."""

    async def prune(
        self, finished_before: float, limit: int, awaited: Container[str], epoch: int
    ) -> tuple[Pruned, Counts]:
        """Forget up to `limit` jobs that ended before a time, with steps, logs and history.

        Of a job with very many steps, only some of these, and the job in a later call: then
        there is more to do although it answers fewer jobs than `limit`.
        Jobs whose ids are `awaited` are kept, and so are their retries. Answers also what
        that does to the counts. It may be called while a commit is written.
        """

    async def close(self) -> None: ...


log = logging.getLogger(__name__)

T = TypeVar("T")


class Listeners(Generic[T]):
    """The listeners of one store.

    The commit has happened when they are called, so one that raises must not keep the others
    or the committing caller waiting. Its error is logged and goes to `on_failure`: whatever
    that listener maintains no longer matches the store.
    """

    def __init__(self) -> None:
        self._listeners: list[Callable[[T], None]] = []
        self.on_failure: Callable[[Exception], None] = lambda error: None

    def add(self, listener: Callable[[T], None]) -> Callable[[], None]:
        """Returns the way to stop listening."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def tell(self, news: T) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(news)
            except Exception as error:
                log.exception("a listener failed after a commit")
                self.on_failure(error)

    def clear(self) -> None:
        self._listeners.clear()
