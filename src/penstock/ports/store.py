"""Where jobs are kept.

A store takes *changes* (accept this request; let these events happen to that job), many
at a time, and answers each with moved, repeated or refused. Three promises:

* `apply` returns only after its answers are as durable as `durability` says. Concurrent
  callers are merged into one commit.
* Every change goes through `penstock.core.transition`: the table decides, the store
  writes down. The log is append-only and the record is its fold.
* Listeners hear of a change after its commit and never otherwise, in commit order.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Protocol

from msgspec import Struct

from penstock.core.job import Job
from penstock.core.transition import Answer, Change, Transition
from penstock.lifecycles.canonical import JobState
from penstock.ports.listeners import Listeners


class Durability(StrEnum):
    """What an acknowledged change survives."""

    DISK = "disk"
    """Power loss: every commit is flushed to disk."""
    OS = "os"
    """The death of the process, but not of the machine."""
    MEMORY = "memory"
    """Nothing: for tests."""


class JobQuery(Struct, frozen=True, kw_only=True):
    """Which jobs, newest first. All conditions must hold."""

    job_id: str | None = None
    """A glob, as in `*4cw6`."""
    states: tuple[JobState, ...] = ()
    topic: str | None = None
    """A glob, as in `job.text.*`."""
    tenant: str | None = None
    parent_job_id: str | None = None
    workflow_id: str | None = None
    """Jobs of a workflow come in the order of their step_index instead, unless `before` or `since`
    asks for a page by `seq`."""
    labels: Mapping[str, str] = {}
    idempotency_key: str | None = None
    principal: str | None = None
    schedule: str | None = None
    parked: bool | None = None
    """True: only jobs that wait for an approval; False: only those that don't."""
    dead: bool = False
    """Only what ended FAILED or TIMEOUT and was not retried: the dead letters."""
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


Listener = Callable[[Sequence[Answer]], None]


class Store(Protocol):
    durability: Durability
    listeners: Listeners[Sequence[Answer]]

    async def apply(self, changes: Sequence[Change]) -> list[Answer]:
        """Make the changes, in order, in one commit; answer each.

        An Accept whose job_id, (tenant, idempotency_key) or unique key is taken is REPEATED,
        with the job that has it (`penstock.core.policy.keeps_out`). If an Accept with
        `all_or_none` finds its id or key taken by a different request, all changes are
        REFUSED; its own answer has the job that is there. With nothing written, it raises
        StoreFailed if the commit fails, or Unstorable if a value can never be written.
        """

    def listen(self, listener: Listener) -> Callable[[], None]:
        """Call `listener` with what moved, after each commit. Returns the way to stop.

        One that raises delays nobody: see `Listeners`.
        """

    async def get(self, job_id: str) -> Job | None: ...

    async def fetch(self, seqs: Sequence[int]) -> list[Job]:
        """The records with these `seq`s that exist, in the order asked for."""

    async def find(self, query: JobQuery) -> list[Job]: ...

    async def unfinished(self) -> list[Job]:
        """Every job that is in no final state, in the order of acceptance."""

    async def history(self, job_id: str) -> list[Transition]: ...

    async def events(self, after: int, limit: int = 1000) -> list[JournalEvent]:
        """What was committed after this cursor, in order; a move's steps are never parted."""

    async def last_event(self) -> int:
        """The cursor of the newest event; 0 if there is none."""

    async def tally(self, tenant: str | None = None) -> dict[JobState, int]:
        """How many jobs are in each state, of one tenant or of all; costs the same always."""

    def write_log(self, lines: Sequence[LogLine]) -> None:
        """Keep these lines; they ride with the next commit, and nobody waits for it."""

    async def read_log(self, job_id: str, after: int = 0, limit: int = 1000) -> list[LogLine]: ...

    async def verify(self) -> Verified:
        """Fold every job's log and compare it with its record."""

    async def prune(
        self, finished_before: float, limit: int, awaited: Container[str] = ()
    ) -> Pruned:
        """Forget up to `limit` jobs that ended before a time, with logs and history.

        Jobs whose ids are `awaited` are kept, and so are their retries.
        """

    async def pointers(self) -> Iterable[str]:
        """Every context_ptr and result_ptr that names a stored blob."""

    async def refers(self, tenant: str, pointer: str) -> bool:
        """Whether a job of this tenant has this blob as its input or its result."""

    async def remember(self, name: str, value: bytes) -> None:
        """Keep a small named fact of the engine itself."""

    async def recall(self, name: str) -> bytes | None: ...

    async def recall_all(self, prefix: str) -> dict[str, bytes]:
        """Every fact whose name begins so, by name, in order."""

    async def forget(self, name: str) -> bool:
        """Drop a fact; False if there was none."""

    def write_audit(self, entries: Sequence[AuditEntry]) -> None:
        """Keep these; they ride with the next commit, as log lines do."""

    async def read_audit(self, query: AuditQuery) -> list[AuditEntry]: ...

    async def close(self) -> None: ...
