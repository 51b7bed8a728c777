"""The canonical job: what is asked (`JobRequest`), what came of it (`JobResult`), and
the record of both (`Job`).

All values are frozen; `msgspec.structs.replace` makes a changed copy. Times are seconds
since the epoch, UTC, and are read from a Clock, never here.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct, field

from penstock.core.verdict import Hold, SafetyVerdict
from penstock.lifecycles.canonical import TERMINAL, JobState


class Priority(StrEnum):
    """A hint to the scheduler; `penstock.core.policy.rank` gives it its meaning."""

    CRITICAL = "critical"
    INTERACTIVE = "interactive"
    BATCH = "batch"


class RetryPolicy(Struct, frozen=True, gc=False, omit_defaults=True):
    """Which failures are tried again, how often, and after how long."""

    retries: int = 0
    delay: float = 1.0
    factor: float = 2.0
    max_delay: float = 300.0
    jitter: float = 0.5
    """The share of a delay that is left to chance."""
    on: tuple[str, ...] = ()
    """Error codes or exception classes to retry; empty means every one."""
    never: tuple[str, ...] = ()
    """Error codes or exception classes never to retry."""


NO_RETRY = RetryPolicy()


class ParentPolicy(StrEnum):
    """What becomes of a job when one that it waits for does not succeed."""

    CANCEL = "cancel"
    RUN = "run"


class UniqueScope(StrEnum):
    """How long a job keeps others with its unique key out."""

    ACTIVE = "active"
    """Until it has ended."""
    WAITING = "waiting"
    """Until it is given to a worker."""


class Unique(Struct, frozen=True, gc=False, omit_defaults=True):
    """At most one job with this key at a time, within a tenant."""

    key: str
    scope: UniqueScope = UniqueScope.ACTIVE
    period: float | None = None
    """Seconds from its acceptance, whatever became of it, instead of a scope."""


class Offer(Struct, frozen=True, gc=False, omit_defaults=True):
    """What whoever serves a topic wants its jobs to have, unless a caller says otherwise."""

    timeout: float | None = None
    retry: RetryPolicy = NO_RETRY
    priority: Priority = Priority.BATCH
    idempotent: bool = False
    unique: Unique | None = None
    max_attempts: int | None = None
    """How often such a job may lose its worker; None: the engine's default."""


class JobRequest(Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """What a caller asks for. `penstock.core.check` says what is acceptable."""

    job_id: str
    topic: str
    priority: Priority = Priority.BATCH
    context_ptr: str = ""
    """An opaque URI of the input payload; empty means no input."""
    adapter_id: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    parent_job_id: str | None = None
    workflow_id: str | None = None
    step_index: int | None = None
    tenant: str = "default"
    labels: dict[str, str] = field(default_factory=dict)
    idempotency_key: str | None = None
    timeout: float | None = None
    """Seconds one attempt may run; None takes the engine's default."""
    dispatch_timeout: float | None = None
    """Seconds a worker may hold the job before it starts; None: the engine's default."""
    deadline: float | None = None
    """The time by which the job must have ended, whatever it waits for."""
    run_at: float | None = None
    """The time before which the job must not start."""
    retry: RetryPolicy = NO_RETRY
    idempotent: bool = False
    """Whether the same job may safely run again after its worker was lost mid-run."""
    complete: bool = False
    """The submitter knew what the topic offers; nothing is to be filled in from it."""
    retry_number: int = 0
    """0 for what a caller submitted, n for the n-th retry that the engine emitted."""
    principal: str = ""
    """Who submitted it: said by the door, never by the caller."""
    capability: str | None = None
    """What it is going to do, in a word that safety rules know, as `repo.write`."""
    risk_tags: tuple[str, ...] = ()
    estimated_cost: float | None = None
    """In whatever unit the safety rules count."""
    after: tuple[str, ...] = ()
    """Jobs that must have ended before this one may start."""
    if_parent_fails: ParentPolicy = ParentPolicy.CANCEL
    unique: Unique | None = None
    schedule: str | None = None
    """The name of the schedule that submitted it."""


class JobResult(Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """What a worker, or the control plane in its stead, says came of a job."""

    job_id: str
    status: JobState
    result_ptr: str | None = None
    worker_id: str | None = None
    execution_ms: float | None = None
    error_code: str | None = None
    error_message: str | None = None
    attempt: int = 0
    error_kinds: tuple[str, ...] = ()
    """The classes of the exception, most special first: what a RetryPolicy matches."""
    retry_after: float | None = None
    """Seconds, when the job itself asked to be tried again."""


class Job(Struct, frozen=True, gc=False, kw_only=True):
    """The record of one job: always the fold of its transitions."""

    seq: int
    """The order of acceptance; unique within one store."""
    request: JobRequest
    state: JobState
    version: int
    """How many transitions it has had."""
    accepted_at: float
    updated_at: float
    attempt: int = 0
    """Which dispatch is the live one: the fence. 0 before the first."""
    worker_id: str | None = None
    pool: str | None = None
    dispatched_at: float | None = None
    started_at: float | None = None
    finished_at: float | None = None
    cancel_requested: bool = False
    result: JobResult | None = None
    successor: str | None = None
    """The job that retries this one."""
    verdict: SafetyVerdict | None = None
    """What the safety kernel said; None while it has not, or where no rules are set."""
    hold: Hold | None = None
    """The approval that it waits for, or had."""

    @property
    def job_id(self) -> str:
        return self.request.job_id

    @property
    def is_final(self) -> bool:
        return self.state in TERMINAL
