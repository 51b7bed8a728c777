"""The engine's API: every operation that a caller can ask of it.

The engine has its own EngineApi; a link to an engine elsewhere is an EngineApi as well. The Python
API, the command line and whatever door comes next are written against this and can't tell
the difference.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from penstock.core.job import Job, JobRequest
from penstock.core.journal import Transition
from penstock.core.verdict import Decision, Rate, SafetyVerdict
from penstock.lifecycles.canonical import JobState
from penstock.ports.blobs import BlobStat
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


class PoolView(Struct, frozen=True, kw_only=True):
    name: str
    topics: tuple[str, ...]
    capacity: int | None
    held: int
    workers: int
    labels: Mapping[str, str]
    paused: bool = False
    """It gets no new jobs; `held` tells how far it is drained."""


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


class Cleaned(Struct, frozen=True):
    jobs: int
    transitions: int
    log_lines: int
    blobs: int


PARTS = ("approvals", "policy", "schedules", "limits", "keys", "audit", "pipelines", "batches")
"""The parts of an EngineApi beside jobs."""

ONCE = frozenset(
    {
        "retry",
        "cancel_many",
        "retry_many",
        "prune",
        "approvals.approve",
        "approvals.reject",
        "schedules.fire",
        "schedules.delete",
        "limits.delete",
        "keys.create",
        "keys.revoke",
        "pipelines.retry_failed",
        "batches.begin_upload",
        "batches.write_upload",
        "batches.keep_upload",
        "batches.delete_file",
        "batches.create",
    }
)
"""Operations that a client must not send again after the answer was lost. The others only read,
or have the same effect and answer when they are repeated; a submission has its client's id."""


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

    async def get(self, job_id: str) -> Job:
        """The record of the try with this id; `successor` names its retry."""

    async def find(self, query: JobQuery) -> list[Job]: ...

    async def history(self, job_id: str) -> list[Transition]: ...

    async def why(self, job_id: str) -> str:
        """Why the job waits, or what is happening to it, in one sentence; of a try that was
        retried: what became of it, and the same about the newest try."""

    async def wait(self, job_id: str, timeout: float | None = None) -> Job:
        """The final record, following retries. Raises WaitTimedOut."""

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

    async def read_log(self, job_id: str, after: int = 0, limit: int = 1000) -> list[LogLine]: ...

    async def read_steps(self, job_id: str, query: StepQuery) -> StepPage:
        """Rows that the job checkpointed, in the order of name and `n`; maybe fewer than asked
        for, if they are long."""

    async def count_steps(self, job_id: str) -> list[StepCount]:
        """How many there are, by name and outcome."""

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

    async def cancel(
        self, job_id: str, *, reason: str = "", children: bool = False, timeout: float = 10.0
    ) -> Cancellation:
        """End the job (and its children), waiting up to `timeout` for running work to end."""

    async def retry(self, job_id: str) -> Job:
        """Submit a job whose newest try did not succeed again, as a new job."""

    async def cancel_many(self, query: JobQuery, *, reason: str = "") -> Bulk:
        """Cancel every unfinished job that matches; `limit` is ignored."""

    async def retry_many(self, query: JobQuery) -> Bulk:
        """Retry every dead letter that matches; each passes the rules again."""

    def events(self, after: int | None = None) -> AsyncIterator[EventBatch]:
        """Everything that happens to any job, from a cursor on, or from now on; for ever.

        No gap and no repeat: what was committed after `after` comes first, from the journal.
        The first batch is empty and tells where reading begins; other empty ones are signs of
        life, every few seconds while nothing happens.
        """

    async def topics(self) -> list[str]:
        """The topics (globs) that workers serve now; any caller may ask."""

    async def workers(self) -> list[WorkerView]: ...

    async def pools(self) -> list[PoolView]: ...

    async def pause_pool(self, name: str) -> PoolView:
        """Give its workers no new jobs; running jobs finish. Survives a restart."""

    async def resume_pool(self, name: str) -> PoolView: ...

    async def status(self) -> EngineStatus: ...

    async def verify(self) -> Verified: ...

    async def prune(self, older_than: float) -> Cleaned:
        """Delete jobs that ended more than so many seconds ago, and unreferenced blobs."""

    async def put_blob(self, data: bytes, media_type: str = "application/json") -> str: ...

    async def get_blob(self, uri: str) -> bytes: ...

    async def stat_blob(self, uri: str, *, job_id: str | None = None) -> BlobStat:
        """With a job: UnreadablePointer also if whoever submitted that may not read it."""

    async def read_blob(self, uri: str, start: int, length: int) -> bytes:
        """A byte range; shorter only at the end."""


async def newest_try(api: EngineApi, job: Job) -> Job:
    """The record of the last retry of a job; its own, if it was not retried."""
    while job.successor is not None:
        job = await api.get(job.successor)
    return job


# -- approvals --------------------------------------------------------------------------------


class Approvals(Protocol):
    async def approve(self, job_id: str, *, reason: str = "", snapshot: str = "") -> Job:
        """Approve a job that is awaiting approval.

        `snapshot` is that of the hold the caller looked at; if the job waits under another
        one meanwhile, StaleApproval. NotPermitted if the caller submitted it or is not an approver;
        Conflict if it is not awaiting approval, or the caller has approved it already.
        """

    async def reject(self, job_id: str, *, reason: str = "") -> Job:
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
    async def current(self) -> PolicyView: ...

    async def explain(self, job_id: str) -> Explanation: ...

    async def simulate(self, text: str, limit: int = 10_000) -> Simulation:
        """Judge the newest `limit` jobs by these rules (TOML). Changes nothing."""

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
    last_at: float | None = None
    """The time for which it fired last."""
    last_job_id: str | None = None
    fired: int = 0
    skipped: int = 0
    """How often it was skipped because the previous job had not ended."""
    problem: str = ""
    """Why its last firing was refused (as for an unknown topic) or skipped."""


class Schedules(Protocol):
    async def put(self, schedule: Schedule) -> ScheduleView:
        """Create or change a schedule. Raises InvalidRequest, naming the field."""

    async def list(self) -> list[ScheduleView]: ...

    async def get(self, name: str, tenant: str = "default") -> ScheduleView: ...

    async def pause(
        self, name: str, tenant: str = "default", *, paused: bool = True
    ) -> ScheduleView: ...

    async def fire(self, name: str, tenant: str = "default") -> Job:
        """Submit its job now, in addition to its times."""

    async def delete(self, name: str, tenant: str = "default") -> None: ...


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
    async def put(self, limit: Limit) -> LimitView:
        """Create or change a limit; it applies from the next dispatch on."""

    async def list(self) -> list[LimitView]: ...

    async def delete(self, name: str) -> None: ...


# -- API keys ---------------------------------------------------------------------------------


class KeyRole(StrEnum):
    """What a key is good for. Any of them may look at what its tenant has."""

    SUBMIT = "submit"
    """Submit jobs; cancel and retry single ones."""
    OPERATE = "operate"
    """Schedules, limits and pools; cancel and retry in bulk."""
    APPROVE = "approve"
    """Approve and reject jobs that are awaiting approval."""
    ADMIN = "admin"
    """Everything, and keys, rules and the audit log besides."""


class Caller(Struct, frozen=True):
    """Somebody at one of the doors."""

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
"""Who can open the engine's own socket, holds its token, or runs it: its owner."""


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


class Keys(Protocol):
    async def create(
        self,
        name: str,
        roles: tuple[KeyRole, ...],
        *,
        tenant: str | None = None,
        expires_in: float | None = None,
    ) -> NewKey: ...

    async def list(self) -> list[KeyView]: ...

    async def revoke(self, key_id: str) -> KeyView:
        """By its id, or by its name if only one valid key has it."""


# -- audit and sessions -----------------------------------------------------------------------


class Audit(Protocol):
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


class Authenticator(Protocol):
    def authenticate(self, token: str) -> Session:
        """Raises NotAuthenticated for an invalid token."""
