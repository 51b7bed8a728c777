"""The engine's API: every operation that a caller can ask of it, with its HTTP route and role.

The engine has its own EngineApi; a link to an engine elsewhere is an EngineApi as well. The Python
API, the command line and HTTP are written against this Protocol and work with either.
"""

from __future__ import annotations

import builtins
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Protocol, cast

from msgspec import Meta, Struct

from penstock.core.errors import InvalidRequest
from penstock.core.job import Job, JobRequest
from penstock.core.journal import Transition
from penstock.core.verdict import Decision, Rate, SafetyVerdict
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports.blobs import BlobStat
from penstock.ports.credentials import Credentials
from penstock.ports.operations import KeyRole as KeyRole
from penstock.ports.operations import Paging, about, operation
from penstock.ports.store import (
    AuditEntry,
    AuditQuery,
    Durability,
    JobQuery,
    JournalEvent,
    LogLine,
    StepCount,
    StepPage,
    StepQuery,
    Verified,
)

if TYPE_CHECKING:
    from penstock.workloads.llm.batches import Batches
    from penstock.workloads.pipeline.interface import Pipelines


class Cancellation(Struct, frozen=True):
    """The answer to a cancel: the record as it is, and whether the work has ended.

    Cancel and finish race; `job.state` says which won. `ended` is False only while a
    worker still holds work that was asked to end and has not done so yet.
    """

    job: Job
    ended: bool


class Ended(Struct, frozen=True, gc=False):
    """A job that has ended."""

    job_id: str
    """The id by which it was asked for."""
    job: Job
    """The final record: that of its last retry, if there was one."""


MAX_WAITED = 5_000
"""Jobs that one call waits for."""


class Submitted(list[Job]):
    """The engine's own answer to `submit`: the jobs, in the order of the requests."""

    def __init__(self, jobs: Sequence[Job], new: frozenset[str]) -> None:
        super().__init__(jobs)
        self.new = new
        """The ids of the jobs that this call created; the others existed before."""


class Moved(Struct, frozen=True, tag="moved"):
    transition: Transition


class Progressed(Struct, frozen=True, tag="progress"):
    job_id: str
    fraction: float | None
    message: str


class Logged(Struct, frozen=True, tag="log"):
    line: LogLine


class Streamed(Struct, frozen=True, tag="piece"):
    """A part of what a job makes. A late reader gets earlier pieces first; a new attempt
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


class StreamKind(StrEnum):
    """What the event stream tells."""

    JOB = "job"
    """A move of a job."""
    APPROVAL = "approval"
    """A job awaits approval, or got one person's."""
    NOTE = "note"
    """An entry of a job's history that moves nothing; stages of pipelines begin and end so."""
    PROGRESS = "progress"
    LOG = "log"
    """Lines of the jobs in `StreamQuery.logs`."""
    WORKER = "worker"
    POOL = "pool"
    COUNTS = "counts"
    """Jobs by state."""


JOURNAL_KINDS = frozenset({StreamKind.JOB, StreamKind.APPROVAL, StreamKind.NOTE})
"""Kinds that are entries of the journal: nothing of them is missed by a reader that resumes."""
MAX_LOGS = 20


def stream_kind(event: JournalEvent) -> StreamKind:
    match event.transition.event:
        case JobEvent.PARK | JobEvent.APPROVE:
            return StreamKind.APPROVAL
        case JobEvent.NOTE:
            return StreamKind.NOTE
        case _:
            return StreamKind.JOB


class StreamQuery(Struct, frozen=True, kw_only=True):
    """What a reader of the event stream wants; all conditions must hold."""

    kinds: tuple[StreamKind, ...] = ()
    """Empty: all that the caller may see."""
    topic: str | None = None
    """A glob, as in `job.text.*`."""
    tenant: str | None = None
    states: tuple[JobState, ...] = ()
    """Only moves into one of these."""
    events: tuple[JobEvent, ...] = ()
    job_ids: tuple[str, ...] = ()
    logs: tuple[str, ...] = ()
    """Jobs whose log lines are wanted, at most 20."""
    replay: int | None = None
    """A reader that resumes and missed more entries than this goes on from now; the batch says
    so in `gap`. None: it gets all of them."""

    @property
    def is_plain(self) -> bool:
        """Whether no entry of the journal is left out by its conditions."""
        conditions = (self.topic, self.tenant, self.states, self.events, self.job_ids)
        return conditions == (None, None, (), (), ())


class JobProgressView(Struct, frozen=True):
    job_id: str
    tenant: str
    topic: str
    fraction: float | None
    message: str


class StreamBatch(Struct, frozen=True):
    """What a reader of the event stream gets at once."""

    place: str
    """Where to resume after it."""
    entries: tuple[JournalEvent, ...] = ()
    lines: tuple[LogLine, ...] = ()
    progress: tuple[JobProgressView, ...] = ()
    workers: tuple[WorkerView, ...] = ()
    gone_workers: tuple[str, ...] = ()
    pools: tuple[PoolView, ...] = ()
    counts: dict[JobState, int] | None = None
    gap: str = ""
    """Why entries before this are missing, if they are."""


class Bulk(Struct, frozen=True):
    """The result of an operation on many jobs."""

    matched: int
    done: int
    refused: tuple[tuple[str, str], ...] = ()
    """(job_id, reason), the first 100."""


class WorkerView(Struct, frozen=True, kw_only=True):
    worker_id: str
    pool: str
    topics: tuple[str, ...]
    slots: int
    limit: int
    """How many jobs it accepts now."""
    held: int
    labels: Mapping[str, str]
    host: str
    pid: int
    local: bool
    status: str
    """ready, draining or missing"""
    silent_for: float
    """Seconds since its last message."""
    facts: Mapping[str, Any] = {}
    """Facts that its executors report, as `pipes`."""


class TopicView(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A topic that workers serve, and what they announced about its jobs."""

    topic: str
    description: str = ""
    input_schema: Mapping[str, Any] | None = None
    """JSON schema of a job's input; None: the worker did not announce one."""
    output_schema: Mapping[str, Any] | None = None
    """JSON schema of a job's result."""
    paused: str = ""
    """Why no worker can run its jobs at present; they wait."""


class PoolView(Struct, frozen=True, kw_only=True):
    name: str
    topics: tuple[str, ...]
    capacity: int | None
    held: int
    workers: int
    labels: Mapping[str, str]
    paused: bool = False
    """It gets no new jobs; `held` says how far it is drained."""


class WaitCount(Struct, frozen=True):
    """How many jobs had waited so long when they started."""

    seconds: float
    """The upper end of a step of a scale that doubles every two steps."""
    count: int


class Activity(Struct, frozen=True, kw_only=True):
    """What happened since the engine started."""

    submitted: int = 0
    """Without retries."""
    started: int = 0
    retried: int = 0
    ended: dict[JobState, int] = {}
    """Without tries that were retried."""
    failures: dict[str, int] = {}
    """Unsuccessful ends by error code, tries that were retried among them."""
    waits: tuple[WaitCount, ...] = ()
    waited: float = 0.0
    """Seconds that they had waited together."""


class EngineStatus(Struct, frozen=True, kw_only=True):
    version: str
    pid: int
    started_at: float
    durability: Durability
    data_dir: str
    rules: str
    """The snapshot of the safety rules in force."""
    tally: dict[JobState, int]
    """Jobs by state. A job and its retries are one, in the state of its newest try."""
    waiting: int
    held: int
    workers: int
    finished: int
    """Jobs that ended since the engine started."""
    retried: int = 0
    """Tries that were retried, which `tally` and `finished` leave out."""
    awaiting_approval: int = 0
    """Jobs that are awaiting approval."""
    paused_pools: tuple[str, ...] = ()
    paused_topics: Mapping[str, str] = {}
    """Topics that no worker can run at present, as when a language engine is out of memory, and
    why. Their jobs wait."""
    models: Mapping[str, Mapping[str, Any]] = {}
    """Language models by topic, with their size, context and so on."""
    policy_problem: str = ""
    """Why the current rule file was not accepted."""
    activity: Activity = Activity()


class JobCounts(Struct, frozen=True):
    """How many jobs there are; a job and its retries are one."""

    states: dict[JobState, int]
    topics: dict[str, dict[JobState, int]]
    """Unfinished jobs by topic and state."""


class JobTotal(Struct, frozen=True):
    count: int
    exact: bool
    """False: there are at least so many."""


class TimelinePoint(Struct, frozen=True, kw_only=True):
    """What happened in one minute."""

    at: float
    """When it began."""
    submitted: int
    """Without retries."""
    started: int
    ended: dict[JobState, int]
    """Without tries that were retried."""
    open: dict[JobState, int]
    """Unfinished jobs when it ended, or now."""
    retried: int
    wait_p50: float | None
    wait_p99: float | None
    """Seconds that jobs had waited when they started, from when they were allowed to; rounded up
    to a scale that doubles every two steps. None if no job started."""


class FailureCount(Struct, frozen=True):
    topic: str
    error_code: str
    count: int


class Timeline(Struct, frozen=True):
    points: tuple[TimelinePoint, ...]
    """Minute by minute, oldest first; the last one is not over."""
    total: TimelinePoint
    failures: tuple[FailureCount, ...]
    """Tries that did not succeed, the most frequent first, at most 100."""


MAX_MINUTES = 1440
"""Minutes of a timeline."""


class Cleaned(Struct, frozen=True):
    jobs: int
    transitions: int
    log_lines: int
    blobs: int


Reason = Annotated[str, Meta(max_length=1000)]
Patience = Annotated[float, about("Seconds to wait for running work to end.", ge=0, le=60)]
"""Over HTTP at most 60; the HTTP client asks again until the caller's time is over."""


class EngineApi(Protocol):
    @property
    def approvals(self) -> Approvals: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def schedules(self) -> Schedules: ...

    @property
    def limits(self) -> Limits: ...

    @property
    def keys(self) -> Keys: ...

    @property
    def credentials(self) -> Credentials: ...

    @property
    def audit(self) -> Audit: ...

    @property
    def pipelines(self) -> Pipelines: ...

    @property
    def batches(self) -> Batches: ...

    @operation(
        "submit_job",
        "POST /v1/jobs",
        "Submit a job",
        "Answers when the job is durable. A request that was accepted before (same `job_id`, or "
        "same tenant and idempotency key) is answered with 200 and the job it became; a different "
        "request with the same id or key is a conflict.",
        role=KeyRole.SUBMIT,
        status=201,
        refusals=(409, 413, 415, 422, 429),
    )
    @operation(
        "submit_batch",
        "POST /v1/jobs/batch",
        "Submit many jobs, all or none",
        "One commit. If one of them is refused, nothing is stored.",
        role=KeyRole.SUBMIT,
        status=201,
        refusals=(409, 413, 415, 422, 429),
    )
    async def submit(self, requests: Sequence[JobRequest]) -> list[Job]:
        """Accept all of them durably, or none: InvalidRequest, Conflict, UnknownTopic …

        A request that was accepted before (same job_id, or same tenant and idempotency
        key) is answered with the job it became. An empty job_id asks for a new one.
        """

    @operation(
        "get_job",
        "GET /v1/jobs/{job_id}",
        "Get a job's record",
        "Of the try with this id. If it was retried, `successor` names the retry.",
        refusals=(404,),
    )
    async def get(self, job_id: str) -> Job:
        """The record of the try with this id; `successor` names its retry."""

    @operation(
        "list_jobs",
        "GET /v1/jobs",
        "List jobs",
        "A job and its retries are one: the record of the newest try. A page at a time; `next` of "
        "a page is the `cursor` of the following one. Pages are stable: a job that comes in "
        "between shifts nothing and is not shown twice; one that is retried in between moves to "
        "where new jobs are.",
        refusals=(422,),
    )
    async def find(self, query: JobQuery) -> list[Job]: ...

    async def count(self, query: JobQuery) -> JobTotal:
        """How many jobs match: exact up to 1,000, and always if only states and a tenant are
        asked for. The position and length of a page are ignored."""

    @operation(
        "get_counts",
        "GET /v1/counts",
        "Count jobs",
        "By state; unfinished ones also by topic. Costs the same always.",
    )
    async def counts(self) -> JobCounts:
        """Jobs by state, and unfinished ones by topic."""

    @operation(
        "get_timeline",
        "GET /v1/timeline?minutes&topic",
        "Count what happened, minute by minute",
        "Submitted, started and ended jobs, waiting times, and failures by error code, up to a day "
        "back. Kept over a restart; a crash loses at most a minute.",
        refusals=(422,),
    )
    async def timeline(
        self,
        minutes: Annotated[int, about("Minutes back from now.", ge=1, le=MAX_MINUTES)] = 60,
        topic: Annotated[str | None, about("A glob, as in `job.text.*`.")] = None,
    ) -> Timeline:
        """What was submitted, started and ended, minute by minute, up to a day back; of all
        topics or those that match a glob. Survives a restart."""

    @operation(
        "get_history",
        "GET /v1/jobs/{job_id}/history",
        "Get a job's history",
        "Every transition, oldest first.",
        field="transitions",
        refusals=(404,),
    )
    async def history(self, job_id: str) -> list[Transition]: ...

    @operation(
        "why_job",
        "GET /v1/jobs/{job_id}/why",
        "Why a job is where it is",
        "If the try with this id was retried, how it ended, and what is happening to the newest "
        "try.",
        field="why",
        refusals=(404,),
    )
    async def why(self, job_id: str) -> str:
        """Why the job waits, or what is happening to it, in one sentence; of a try that was
        retried: what became of it, and the same about the newest try."""

    @operation(
        "wait_job",
        "GET /v1/jobs/{job_id}/wait",
        "Wait for a job's end",
        "200 with the final record, following retries, as soon as it has ended; 202 with the "
        "record of the newest try as it is when the time ran out first. Ask again then.",
        refusals=(404, 422),
        waits=True,
    )
    async def wait(self, job_id: str, timeout: float | None = None) -> Job:
        """The final record, following retries. Raises WaitTimedOut."""

    @operation(
        "wait_jobs",
        "POST /v1/jobs:wait",
        "Wait for the ends of many jobs",
        "Answers when `count` of them have ended, following retries, and tells of all that have; "
        "with none when the time ran out first. Ask again for the others.",
        refusals=(404, 415, 422),
        waits=True,
    )
    async def wait_many(
        self,
        job_ids: Sequence[str],
        count: int = 1,
        *,
        or_failure: bool = False,
        timeout: float | None = None,
    ) -> list[Ended]:
        """Wait until `count` of these jobs (or all, if there are fewer) have ended.

        Retries are followed. Returns all that have ended, in the order of their ends; fewer if
        their results are large, and maybe none when the time is over. `or_failure`: answers also
        when one ended without success. At most MAX_WAITED jobs. Raises NotFound.
        """

    @operation(
        "get_logs",
        "GET /v1/jobs/{job_id}/logs?limit",
        "Get what a job logged",
        "Oldest first, a page at a time.",
        field="lines",
        refusals=(404, 422),
        paging=Paging("after", ("n",)),
    )
    async def read_log(self, job_id: str, after: int = 0, limit: int = 1000) -> list[LogLine]: ...

    @operation(
        "get_steps",
        "GET /v1/jobs/{job_id}/steps",
        "List the rows that a job checkpointed",
        "In the order of name and number, a page at a time; a page of long rows may have fewer "
        "than `limit`.",
        refusals=(404, 422),
    )
    async def read_steps(self, job_id: str, query: StepQuery) -> StepPage:
        """Rows that the job checkpointed, in the order of name and `n`; maybe fewer than asked
        for, if they are long."""

    @operation(
        "count_steps",
        "GET /v1/jobs/{job_id}/steps/counts",
        "Count the rows that a job checkpointed",
        "By name and outcome.",
        field="counts",
        refusals=(404,),
    )
    async def count_steps(self, job_id: str) -> list[StepCount]:
        """How many there are, by name and outcome."""

    @operation(
        "count_children",
        "GET /v1/jobs/{job_id}/children/counts",
        "Count the jobs that were submitted inside a job",
        "By state, each with its retries as one. `GET /v1/jobs?child_of=` lists them, by the first "
        "try of the parent.",
        field="counts",
        refusals=(404,),
    )
    async def count_children(self, job_id: str) -> dict[JobState, int]:
        """How many jobs were submitted inside this one, or inside another try of it, by state; each
        with its retries as one."""

    def follow(
        self, job_id: str, after_log: int | None = 0, after_move: int | None = None
    ) -> AsyncIterator[JobUpdate]:
        """Log lines so far, then everything that happens, until the job has ended.

        `after_log` None skips the log, for callers that must not wait for it to be written.
        `after_move` is the `n` of the last transition that the caller knows: later ones come
        first.
        """

    @operation(
        "cancel_job",
        "POST /v1/jobs/{job_id}/cancel",
        "Cancel a job",
        "Cancel and finish race; the job's state says which won.",
        role=KeyRole.SUBMIT,
        refusals=(404, 422),
        waits=True,
    )
    async def cancel(
        self,
        job_id: str,
        *,
        reason: Reason = "",
        children: Annotated[bool, about("Whether its children are cancelled, too.")] = False,
        timeout: Patience = 10.0,
    ) -> Cancellation:
        """End the job (and its children), waiting up to `timeout` for running work to end."""

    @operation(
        "retry_job",
        "POST /v1/jobs/{job_id}/retry",
        "Retry a job that ended badly",
        "A new job with every field of the old one; it passes the rules again.",
        role=KeyRole.SUBMIT,
        once=True,
        status=201,
        refusals=(404, 409, 422),
    )
    async def retry(self, job_id: str) -> Job:
        """Submit a job whose newest try did not succeed again, as a new job."""

    @operation(
        "cancel_jobs",
        "POST /v1/jobs:cancel",
        "Cancel many jobs",
        "Every unfinished job that matches. Needs a filter, or `all`.",
        role=KeyRole.OPERATE,
        once=True,
        refusals=(415, 422),
    )
    async def cancel_many(self, query: JobQuery, *, reason: str = "") -> Bulk:
        """Cancel every unfinished job that matches; `limit` is ignored."""

    @operation(
        "retry_jobs",
        "POST /v1/jobs:retry",
        "Retry many dead letters",
        "Each passes the rules again. Needs a filter, or `all`.",
        role=KeyRole.OPERATE,
        once=True,
        refusals=(415, 422),
    )
    async def retry_many(self, query: JobQuery) -> Bulk:
        """Retry every dead letter that matches; each passes the rules again."""

    def stream(self, query: StreamQuery, after: str | None = None) -> AsyncIterator[StreamBatch]:
        """Everything that happens, in one stream: see StreamQuery and StreamBatch; for ever.

        `after` is the `place` of a batch: later entries and lines come first. The first batch has
        the current values. Empty batches are signs of life.
        """

    @operation(
        "list_topics", "GET /v1/topics", "List the topics that workers serve", field="topics"
    )
    async def topics(self) -> list[str]:
        """The topics (globs) that workers serve now; any caller may ask."""

    @operation(
        "describe_topics",
        "GET /v1/topics/schemas",
        "List the topics that your key may submit to, with JSON schemas",
        "As the workers announced them: a sentence, the schema of the input, the schema of the "
        "result. Without globs, and without topics that only other jobs use.",
        field="topics",
    )
    async def describe_topics(self) -> list[TopicView]:
        """The topics that this caller may submit jobs to, with their schemas, sorted by name.

        Without globs, and without topics that only other jobs use. Empty for a caller without
        the role SUBMIT.
        """

    @operation(
        "list_workers", "GET /v1/workers", "List workers", field="workers", role=KeyRole.OPERATE
    )
    async def workers(self) -> list[WorkerView]: ...

    @operation(
        "get_worker",
        "GET /v1/workers/{worker_id}",
        "Get a worker",
        role=KeyRole.OPERATE,
        refusals=(404,),
    )
    async def worker(self, worker_id: str) -> WorkerView: ...

    @operation(
        "drain_worker",
        "POST /v1/workers/{worker_id}/drain",
        "Drain a worker",
        "The worker process is given nothing new, finishes what it runs within its drain timeout, "
        "and leaves. 409 for a worker inside the engine's own process.",
        role=KeyRole.OPERATE,
        all_tenants=True,
        refusals=(404, 409),
    )
    async def drain_worker(self, worker_id: str) -> WorkerView:
        """Let a worker process finish what it runs, give it nothing new, and have it leave.

        Conflict for a worker inside the engine's process: pause its pool instead.
        """

    @operation("list_pools", "GET /v1/pools", "List pools", field="pools", role=KeyRole.OPERATE)
    async def pools(self) -> list[PoolView]: ...

    @operation(
        "get_pool", "GET /v1/pools/{name}", "Get a pool", role=KeyRole.OPERATE, refusals=(404,)
    )
    async def pool(self, name: str) -> PoolView: ...

    @operation(
        "pause_pool",
        "POST /v1/pools/{name}/pause",
        "Pause a pool",
        "Its workers are given nothing new and finish what they have; `held` tells how far it is "
        "drained. It stays paused over a restart.",
        role=KeyRole.OPERATE,
        all_tenants=True,
        refusals=(404,),
    )
    async def pause_pool(self, name: str) -> PoolView:
        """Give its workers no new jobs; running jobs finish. Survives a restart."""

    @operation(
        "resume_pool",
        "POST /v1/pools/{name}/resume",
        "Resume a pool",
        role=KeyRole.OPERATE,
        all_tenants=True,
        refusals=(404,),
    )
    async def resume_pool(self, name: str) -> PoolView: ...

    @operation(
        "get_status",
        "GET /v1/status",
        "How the engine is",
        "And how many jobs are in which state; with a tenant's key, of that tenant.",
    )
    async def status(self) -> EngineStatus: ...

    @operation(
        "verify",
        "POST /v1/verify",
        "Compare every record with its history",
        "Reads the whole store; with many jobs it takes a while.",
        role=KeyRole.ADMIN,
        all_tenants=True,
        patience=3600.0,
    )
    async def verify(self) -> Verified: ...

    @operation(
        "prune",
        "POST /v1/prune",
        "Forget old jobs",
        "What ended before that, with history and logs, and blobs that nothing points to.",
        role=KeyRole.ADMIN,
        all_tenants=True,
        once=True,
        patience=3600.0,
        refusals=(422,),
    )
    async def prune(
        self, older_than: Annotated[float, about("Seconds since a job has ended.", ge=0)]
    ) -> Cleaned:
        """Delete jobs that ended more than this many seconds ago, and unreferenced blobs."""

    @operation(
        "put_blob",
        "POST /v1/blobs",
        "Upload a blob",
        "The body, as it is, is kept under a name made of its content. The Content-Type is kept "
        "with it.",
        role=KeyRole.SUBMIT,
        action="blob.put",
        status=201,
        refusals=(413, 415, 422),
    )
    async def put_blob(self, data: bytes, media_type: str = "application/json") -> str: ...

    @operation(
        "get_blob",
        "GET /v1/blobs/{uri}",
        "Download a blob",
        "By its URI, escaped as one part of a path, or by its digest alone. In parts with `Range` "
        "and `If-Range`; `If-None-Match` answers 304. A key sees the blobs that its tenant's jobs "
        "point to.",
        refusals=(404, 416, 422),
    )
    async def get_blob(self, uri: str) -> bytes: ...

    async def stat_blob(self, uri: str, *, job_id: str | None = None) -> BlobStat:
        """With a job: UnreadablePointer also if its submitter may not read it."""

    async def read_blob(self, uri: str, start: int, length: int) -> bytes:
        """A byte range; shorter only at the end."""


PARTS = tuple(name for name, part in vars(EngineApi).items() if isinstance(part, property))
"""The parts of an EngineApi beside jobs."""


async def journal(api: EngineApi, after: int | None = None) -> AsyncIterator[EventBatch]:
    """The entries of the event stream alone, from a cursor on, or from now on; for ever.

    The first batch is empty and says where reading begins; other empty ones are signs of life.
    Raises InvalidRequest for a cursor that is not in the journal.
    """
    query = StreamQuery(kinds=tuple(JOURNAL_KINDS))
    stream = api.stream(query, None if after is None else str(after))
    async with aclosing(cast("AsyncGenerator[StreamBatch, None]", stream)) as batches:
        async for batch in batches:
            if batch.gap:
                raise InvalidRequest("after", batch.gap)
            yield EventBatch(batch.entries, int(batch.place))


async def newest_try(api: EngineApi, job: Job) -> Job:
    """The record of the last retry of a job; its own, if it was not retried."""
    while job.successor is not None:
        job = await api.get(job.successor)
    return job


# -- approvals --------------------------------------------------------------------------------


class Approvals(Protocol):
    @operation(
        "approve_job",
        "POST /v1/jobs/{job_id}/approve",
        "Approve a job that is awaiting approval",
        "409 if it is not awaiting approval, if this key has approved it already, or if the "
        "request or the rules have changed since. 403 if you submitted it or are not an approver.",
        role=KeyRole.APPROVE,
        once=True,
        refusals=(404, 409, 422),
    )
    async def approve(
        self,
        job_id: str,
        *,
        reason: Reason = "",
        snapshot: Annotated[
            str, about("Of the hold that you looked at; 409 for another one.")
        ] = "",
    ) -> Job:
        """Approve a job that is awaiting approval.

        `snapshot` is that of the hold the caller looked at; if the job waits under another
        one meanwhile, StaleApproval. NotPermitted if the caller submitted it or is not an approver;
        Conflict if it is not awaiting approval, or the caller has approved it already.
        """

    @operation(
        "reject_job",
        "POST /v1/jobs/{job_id}/reject",
        "Reject a job that is awaiting approval",
        "It ends DENIED.",
        role=KeyRole.APPROVE,
        once=True,
        refusals=(404, 409, 422),
    )
    async def reject(self, job_id: str, *, reason: Reason = "") -> Job:
        """Reject it: the job ends DENIED."""


# -- safety rules -----------------------------------------------------------------------------


class RuleView(Struct, frozen=True):
    id: str
    decision: Decision
    conditions: dict[str, str]
    """Its conditions by field; empty: it matches every job."""
    effect: str = ""
    """Its rate, constraints or approval terms."""
    reason: str = ""


class PolicyView(Struct, frozen=True):
    """The rules in force."""

    snapshot: str
    source: str
    """The file they were read from; empty for the built-in rules."""
    loaded_at: float
    default: Decision
    rules: tuple[RuleView, ...]
    problem: str = ""
    """Why the current file was not accepted; the last valid rules stay in force."""


class Condition(Struct, frozen=True):
    """One condition of a rule, tested on a job."""

    field: str
    wanted: str
    found: str
    matched: bool


class RuleTrace(Struct, frozen=True):
    """One rule that was tried. Rules after the first match are not tried."""

    rule_id: str
    matched: bool
    conditions: tuple[Condition, ...]


class Explanation(Struct, frozen=True):
    """How the rules in force judge a job, step by step, and how it was judged before."""

    job_id: str
    then: SafetyVerdict | None
    """The stored verdict; None if it was not judged, or without rules."""
    now: SafetyVerdict
    trace: tuple[RuleTrace, ...]


class Difference(Struct, frozen=True):
    """A past job that other rules would have judged differently."""

    job_id: str
    topic: str
    tenant: str
    was: str
    """decision (rule), as it was"""
    would_be: str


class Simulation(Struct, frozen=True):
    snapshot: str
    looked_at: int
    decisions: dict[str, int]
    """Number of jobs per decision."""
    changed: int
    differences: tuple[Difference, ...]
    """The first 1,000."""


class Policy(Protocol):
    @operation(
        "get_policy",
        "GET /v1/policy",
        "Get the rules in force",
        role=KeyRole.OPERATE,
        all_tenants=True,
    )
    async def current(self) -> PolicyView: ...

    @operation(
        "explain_job",
        "GET /v1/jobs/{job_id}/policy",
        "Explain the decision on a job",
        "Each rule that was tried, and each condition that did or didn't match.",
        refusals=(404,),
    )
    async def explain(self, job_id: str) -> Explanation: ...

    @operation(
        "simulate_policy",
        "POST /v1/policy/simulate",
        "Simulate other rules on past jobs",
        "Changes nothing.",
        role=KeyRole.OPERATE,
        all_tenants=True,
        patience=300.0,
        refusals=(413, 422),
    )
    async def simulate(
        self,
        text: Annotated[str, about("The rules, as a rule file has them (TOML).")],
        limit: Annotated[
            int, about("How many jobs to judge, newest first.", ge=1, le=100_000)
        ] = 10_000,
    ) -> Simulation:
        """Judge the newest `limit` jobs by these rules (TOML). Changes nothing."""

    @operation(
        "reload_policy",
        "POST /v1/policy/reload",
        "Reload the rule file",
        "422 if it is invalid; the last valid rules stay in force.",
        role=KeyRole.ADMIN,
        all_tenants=True,
        refusals=(422,),
    )
    async def reload(self) -> PolicyView:
        """Reload the rule file now. Raises Misconfigured and keeps the last valid rules."""


# -- schedules --------------------------------------------------------------------------------


class CatchUp(StrEnum):
    """What to do about times that were missed while no engine was running."""

    SKIP = "skip"
    """Skip them."""
    LAST = "last"
    """Fire once, for the last of them."""
    ALL = "all"
    """Fire for each of them, oldest first."""


class Schedule(Struct, frozen=True, kw_only=True):
    """When to submit what."""

    name: str
    cron: str
    """Five fields (minute hour day month weekday), six with seconds first, or @hourly …"""
    request: JobRequest
    """What to submit; its job_id is left empty."""
    timezone: str = "UTC"
    catch_up: CatchUp = CatchUp.LAST
    overlap: bool = True
    """Whether to submit a job while the previous one has not ended."""
    tenant: str = "default"
    paused: bool = False


class ScheduleView(Struct, frozen=True, kw_only=True):
    schedule: Schedule
    next_at: float | None
    """When it fires next; None if it is paused or never will."""
    upcoming: tuple[float, ...] = ()
    """Its next times, `next_at` first."""
    last_at: float | None = None
    """The time for which it fired last."""
    last_job_id: str | None = None
    fired: int = 0
    skipped: int = 0
    """How often it was skipped because the previous job had not ended."""
    problem: str = ""
    """Why its last firing was refused (as for an unknown topic) or skipped."""


Tenant = Annotated[str, about("For keys that are of no tenant; else it is the key's own.")]


class Schedules(Protocol):
    @operation(
        "put_schedule",
        "PUT /v1/schedules/{name}?tenant",
        "Create or change a schedule",
        role=KeyRole.OPERATE,
        refusals=(413, 415, 422),
    )
    async def put(self, schedule: Schedule) -> ScheduleView:
        """Create or change a schedule. Raises InvalidRequest, naming the field."""

    @operation("list_schedules", "GET /v1/schedules", "List schedules", field="schedules")
    async def list(self) -> builtins.list[ScheduleView]: ...

    @operation(
        "get_schedule", "GET /v1/schedules/{name}?tenant", "Get a schedule", refusals=(404, 422)
    )
    async def get(self, name: str, tenant: Tenant = "default") -> ScheduleView: ...

    @operation(
        "pause_schedule",
        "POST /v1/schedules/{name}/pause?tenant",
        "Pause a schedule",
        role=KeyRole.OPERATE,
        given={"paused": True},
        refusals=(404, 422),
    )
    @operation(
        "resume_schedule",
        "POST /v1/schedules/{name}/resume?tenant",
        "Resume a schedule",
        role=KeyRole.OPERATE,
        given={"paused": False},
        refusals=(404, 422),
    )
    async def pause(
        self, name: str, tenant: Tenant = "default", *, paused: bool = True
    ) -> ScheduleView: ...

    @operation(
        "fire_schedule",
        "POST /v1/schedules/{name}/fire?tenant",
        "Submit a schedule's job now",
        "In addition to its times, which do not change.",
        role=KeyRole.OPERATE,
        once=True,
        status=201,
        refusals=(404, 409, 422, 429),
    )
    async def fire(self, name: str, tenant: Tenant = "default") -> Job:
        """Submit its job now, in addition to its times."""

    @operation(
        "delete_schedule",
        "DELETE /v1/schedules/{name}?tenant",
        "Delete a schedule",
        "The jobs that it submitted go on.",
        role=KeyRole.OPERATE,
        once=True,
        status=204,
        refusals=(404, 422),
    )
    async def delete(self, name: str, tenant: Tenant = "default") -> None: ...


# -- limits -----------------------------------------------------------------------------------


class Limit(Struct, frozen=True, kw_only=True):
    """Applies to the jobs that match; jobs with the same values of `key` share it."""

    name: str
    key: tuple[str, ...] = ()
    """`tenant`, `topic`, `label:NAME`; none means that all matching jobs share it."""
    topics: tuple[str, ...] = ()
    """Globs; any may match."""
    tenants: tuple[str, ...] = ()
    labels: dict[str, str] = {}
    """All must be there; values are globs."""
    concurrency: int | None = None
    """Maximum number of running jobs."""
    rate: Rate | None = None
    """Maximum number of jobs started in a time (sliding window)."""
    max_waiting: int | None = None
    """Maximum number of waiting jobs; further submissions are refused with TooMany."""


class LimitUse(Struct, frozen=True):
    """One key's share of a limit."""

    key: tuple[str, ...]
    running: int
    waiting: int
    blocked_until: float | None = None
    """When the rate allows the next job, if it delays one now."""


class LimitView(Struct, frozen=True):
    limit: Limit
    uses: tuple[LimitUse, ...]
    """The keys with jobs now, busiest first, at most 100."""


class Limits(Protocol):
    @operation(
        "put_limit",
        "PUT /v1/limits/{name}",
        "Create or change a limit",
        "It applies from the next dispatch on.",
        role=KeyRole.OPERATE,
        all_tenants=True,
        refusals=(413, 422),
    )
    async def put(self, limit: Limit) -> LimitView:
        """Create or change a limit; it applies from the next dispatch on."""

    @operation("list_limits", "GET /v1/limits", "List limits", field="limits")
    async def list(self) -> builtins.list[LimitView]: ...

    @operation("get_limit", "GET /v1/limits/{name}", "Get a limit", refusals=(404,))
    async def get(self, name: str) -> LimitView: ...

    @operation(
        "delete_limit",
        "DELETE /v1/limits/{name}",
        "Delete a limit",
        role=KeyRole.OPERATE,
        all_tenants=True,
        once=True,
        status=204,
        refusals=(404,),
    )
    async def delete(self, name: str) -> None: ...


# -- API keys ---------------------------------------------------------------------------------


class Caller(Struct, frozen=True):
    """Who calls the engine: the principal, its roles and its tenant."""

    principal: str
    roles: frozenset[KeyRole]
    tenant: str | None = None
    """The only tenant whose things they see; None sees every tenant's."""
    key_id: str = ""

    def may(self, role: KeyRole) -> bool:
        return role in self.roles or KeyRole.ADMIN in self.roles

    def sees(self, tenant: str) -> bool:
        return self.tenant is None or self.tenant == tenant


OWNER = Caller("owner", frozenset(KeyRole))
"""The owner: runs the engine, can open its socket, or has its token."""


class KeyView(Struct, frozen=True, kw_only=True):
    """A key, without its token."""

    key_id: str
    name: str
    """The principal of its holder."""
    roles: tuple[KeyRole, ...]
    tenant: str | None
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None


class NewKey(Struct, frozen=True):
    key: KeyView
    token: str
    """Shown once; only its hash is stored."""

    def __repr__(self) -> str:
        # Values end up in logs and tracebacks; a token must not.
        return f"NewKey({self.key!r}, token=...)"


class SignInLink(Struct, frozen=True):
    """Signs a browser in as the person who made it, once."""

    url: str
    """Empty if the engine does not serve HTTP."""
    token: str
    """Shown once; only its hash is kept."""
    expires_at: float

    def __repr__(self) -> str:
        return f"SignInLink(expires_at={self.expires_at!r})"


class Keys(Protocol):
    @operation(
        "create_key",
        "POST /v1/keys",
        "Create a key",
        "Its token is shown once; only its hash is stored.",
        role=KeyRole.ADMIN,
        all_tenants=True,
        once=True,
        status=201,
        refusals=(409, 413, 422),
    )
    async def create(
        self,
        name: Annotated[str, about("The principal of its holder.")],
        roles: Annotated[tuple[KeyRole, ...], Meta(min_length=1, max_length=4)],
        *,
        tenant: Annotated[
            str | None, about("The only tenant whose things it sees; none: every tenant's.")
        ] = None,
        expires_in: Annotated[
            Annotated[float, Meta(gt=0)] | None,
            about("Seconds after which it is no longer valid; none: never."),
        ] = None,
    ) -> NewKey: ...

    @operation(
        "list_keys",
        "GET /v1/keys",
        "List keys",
        "Without their tokens, which are not stored.",
        role=KeyRole.ADMIN,
        all_tenants=True,
        field="keys",
    )
    async def list(self) -> builtins.list[KeyView]: ...

    @operation(
        "revoke_key",
        "DELETE /v1/keys/{key_id}",
        "Revoke a key",
        "By its id, or by its name if only one valid key has it.",
        role=KeyRole.ADMIN,
        all_tenants=True,
        once=True,
        refusals=(404, 409, 422),
    )
    async def revoke(self, key_id: str) -> KeyView:
        """By its id, or by its name if only one valid key has it."""

    @operation(
        "create_link",
        "POST /v1/session/links",
        "Create a sign-in link",
        "It signs a browser in with the caller's own rights, once, within ten minutes. A restart "
        "of the engine makes it invalid.",
        action="session.link",
        once=True,
        status=201,
        refusals=(429,),
    )
    async def create_link(self) -> SignInLink:
        """A link that signs a browser in with the caller's own rights, once."""


# -- audit and sessions -----------------------------------------------------------------------


class Audit(Protocol):
    @operation(
        "read_audit",
        "GET /v1/audit?principal&action&subject&tenant&limit",
        "Read the audit log",
        "Who did what and whether it was permitted, newest first.",
        role=KeyRole.ADMIN,
        all_tenants=True,
        field="entries",
        refusals=(422,),
        paging=Paging("before", ("n",)),
    )
    async def read(self, query: AuditQuery) -> list[AuditEntry]: ...


class Require(Protocol):
    def __call__(self, role: KeyRole, action: str, subject: str = "") -> None:
        """Raises NotPermitted for a role that the caller lacks, and writes it to the audit log."""


class Session(Struct, frozen=True):
    caller: Caller
    api: EngineApi | None = None
    """Checks by itself what this caller may do and see. None where a server has no
    engine."""
    require: Require | None = None
    is_current: Callable[[], bool] | None = None
    """Whether the key that opened it would open it again. None: ask again each time."""


class SignedIn(Struct, frozen=True):
    """A new browser session."""

    caller: Caller
    token: str
    expires_at: float

    def __repr__(self) -> str:
        return f"SignedIn({self.caller!r})"


class Authenticator(Protocol):
    def authenticate(self, token: str) -> Session:
        """Raises NotAuthenticated for an invalid token."""

    def resume(self, token: str) -> Session:
        """The same for the token of a browser session."""

    @operation("create_session")
    async def sign_in(self, *, key: str = "", link: str = "") -> SignedIn:
        """Open a browser session with a key, or with a link, which is spent by it."""

    @operation("delete_session")
    async def sign_out(self, token: str) -> None:
        """End a browser session."""
