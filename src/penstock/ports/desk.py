"""Everything a caller can ask of an engine, in one place.

The engine has its own Desk; a link to an engine elsewhere is a Desk as well. The Python
API, the command line and whatever door comes next are written against this and can't tell
the difference.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from penstock.core.job import Job, JobRequest
from penstock.core.pipes import PipesView
from penstock.core.transition import Transition
from penstock.lifecycles.canonical import JobState
from penstock.ports.approvals import Approvals
from penstock.ports.audit import Audit
from penstock.ports.batches import Batches
from penstock.ports.blobs import BlobStat
from penstock.ports.keys import Keys
from penstock.ports.limits import LimitBook
from penstock.ports.pipelines import Pipelines
from penstock.ports.policy import Policy
from penstock.ports.schedules import Schedules
from penstock.ports.store import Durability, JobQuery, JournalEvent, LogLine, Verified


class Cancellation(Struct, frozen=True):
    """The answer to a cancel: the record as it is, and whether the work has ended.

    Cancel and finish race; `job.state` says which won. `ended` is False only while a
    worker still holds work that was asked to end and has not done so yet.
    """

    job: Job
    ended: bool


class Submitted(list[Job]):
    """What the engine's own Desk answers to `submit`: the jobs, in the order of the requests."""

    def __init__(self, jobs: Sequence[Job], new: frozenset[str]) -> None:
        super().__init__(jobs)
        self.new = new
        """The ids of those that this call made; the others were there before."""


class Moved(Struct, frozen=True, tag="moved"):
    transition: Transition


class Progressed(Struct, frozen=True, tag="progress"):
    job_id: str
    fraction: float | None
    message: str


class Logged(Struct, frozen=True, tag="log"):
    line: LogLine


class Streamed(Struct, frozen=True, tag="piece"):
    """A part of what a job makes. Whoever comes late is told those before first; a new attempt
    begins again with number 1."""

    job_id: str
    attempt: int
    n: int
    text: str


JobUpdate = Moved | Progressed | Logged | Streamed


class EventBatch(Struct, frozen=True, weakref=True):
    """Events that were committed together, or read together; readers may share it."""

    events: tuple[JournalEvent, ...]
    cursor: int
    """Where to resume after it: that of its last event, or of one the reader may not see."""


class Bulk(Struct, frozen=True):
    """What an operation on many jobs came to."""

    matched: int
    done: int
    refused: tuple[tuple[str, str], ...] = ()
    """(job_id, why), the first hundred."""


class WorkerView(Struct, frozen=True, kw_only=True):
    worker_id: str
    pool: str
    topics: tuple[str, ...]
    slots: int
    limit: int
    """How many jobs it wants to hold now."""
    held: int
    labels: Mapping[str, str]
    host: str
    pid: int
    local: bool
    status: str
    """ready, draining or missing"""
    silent_for: float
    """Seconds since it was last heard of."""
    facts: Mapping[str, Any] = {}
    """What its executors tell of themselves, as `pipes`."""


class PoolView(Struct, frozen=True, kw_only=True):
    name: str
    topics: tuple[str, ...]
    capacity: int | None
    held: int
    workers: int
    labels: Mapping[str, str]
    paused: bool = False
    """It is given nothing new; `held` tells how far it is drained."""


class EngineStatus(Struct, frozen=True, kw_only=True):
    version: str
    pid: int
    started_at: float
    durability: Durability
    data_dir: str
    rules: str
    """The snapshot of the safety rules in force."""
    tally: dict[JobState, int]
    waiting: int
    held: int
    workers: int
    finished: int
    """Jobs that ended since the engine started."""
    parked: int = 0
    """Jobs that wait for an approval."""
    paused_pools: tuple[str, ...] = ()
    paused_topics: Mapping[str, str] = {}
    """Topics that no worker can run at present, as when a language engine is out of memory, and
    why. Their jobs wait."""
    policy_problem: str = ""
    """Why the rule file as it now is was not taken."""


class Cleaned(Struct, frozen=True):
    jobs: int
    transitions: int
    log_lines: int
    blobs: int


PARTS = ("approvals", "policy", "schedules", "limits", "keys", "audit", "pipelines", "batches")
"""What a Desk has beside jobs, each with methods of its own."""


class Desk(Protocol):
    @property
    def approvals(self) -> Approvals: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def schedules(self) -> Schedules: ...

    @property
    def limits(self) -> LimitBook: ...

    @property
    def keys(self) -> Keys: ...

    @property
    def audit(self) -> Audit: ...

    @property
    def pipelines(self) -> Pipelines: ...

    @property
    def batches(self) -> Batches: ...

    async def submit(self, requests: Sequence[JobRequest]) -> list[Job]:
        """Accept all of them durably, or none: InvalidRequest, Conflict, UnknownTopic …

        A request that was accepted before (same job_id, or same tenant and idempotency
        key) is answered with the job it became. An empty job_id asks for a new one.
        """

    async def get(self, job_id: str) -> Job: ...

    async def find(self, query: JobQuery) -> list[Job]: ...

    async def history(self, job_id: str) -> list[Transition]: ...

    async def why(self, job_id: str) -> str:
        """What the job waits for, or what is happening to it, in one sentence."""

    async def wait(self, job_id: str, timeout: float | None = None) -> Job:
        """The final record, following retries. Raises WaitTimedOut."""

    async def read_log(self, job_id: str, after: int = 0, limit: int = 1000) -> list[LogLine]: ...

    def follow(self, job_id: str, after_log: int | None = 0) -> AsyncIterator[JobUpdate]:
        """Log lines so far, then everything that happens, until the job has ended. None passes
        the log over, for who must not wait for it to be written."""

    async def cancel(
        self, job_id: str, *, reason: str = "", children: bool = False, timeout: float = 10.0
    ) -> Cancellation:
        """End the job (and its children), waiting up to `timeout` for running work to end."""

    async def retry(self, job_id: str) -> Job:
        """Emit a new job for one that ended badly, keeping every field."""

    async def cancel_many(self, query: JobQuery, *, reason: str = "") -> Bulk:
        """Ask for the end of every unfinished job that matches; `limit` is not looked at."""

    async def retry_many(self, query: JobQuery) -> Bulk:
        """Retry every dead letter that matches; each passes the rules again."""

    def events(self, after: int | None = None) -> AsyncIterator[EventBatch]:
        """Everything that happens to any job, from a cursor on, or from now on; for ever.

        No gap and no repeat: what was committed after `after` comes first, from the journal.
        The first batch is empty and tells where reading begins; other empty ones are signs of
        life, every few seconds while nothing happens.
        """

    async def topics(self) -> list[str]:
        """The topics (globs) that workers serve now: any caller may know what can be asked for."""

    async def workers(self) -> list[WorkerView]: ...

    async def pipes(self) -> PipesView:
        """Models that are split over nodes, as the workers that are nodes tell of them."""

    async def pools(self) -> list[PoolView]: ...

    async def pause_pool(self, name: str) -> PoolView:
        """Give its workers nothing new; what they have, they finish. Survives a restart."""

    async def resume_pool(self, name: str) -> PoolView: ...

    async def status(self) -> EngineStatus: ...

    async def verify(self) -> Verified: ...

    async def prune(self, older_than: float) -> Cleaned:
        """Forget what ended more than so many seconds ago, and blobs nobody points to."""

    async def put_blob(self, data: bytes, media_type: str = "application/json") -> str: ...

    async def get_blob(self, uri: str) -> bytes: ...

    async def stat_blob(self, uri: str) -> BlobStat: ...

    async def read_blob(self, uri: str, start: int, length: int) -> bytes:
        """A part of it; short only where it ends."""
