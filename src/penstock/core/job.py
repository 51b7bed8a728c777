"""The canonical job: what is asked (`JobRequest`), what came of it (`JobResult`), and
the record of both (`Job`); and the rules that follow from them alone: order, defaults, retries,
unique keys, ids.

All values are frozen; `msgspec.structs.replace` makes a changed copy. Times are seconds
since the epoch, UTC, and are read from a Clock, never here.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Iterable
from enum import StrEnum

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from penstock.core.artifact import Artifact
from penstock.core.verdict import Constraints, Hold, SafetyVerdict
from penstock.lifecycles.canonical import TERMINAL, WAITING, JobState


class Priority(StrEnum):
    """A hint to the scheduler; `rank` gives it its meaning."""

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


class TopicDefaults(Struct, frozen=True, gc=False, omit_defaults=True):
    """Defaults of a topic's jobs, set by the workers that serve it; a caller may override them."""

    timeout: float | None = None
    retry: RetryPolicy = NO_RETRY
    priority: Priority = Priority.BATCH
    idempotent: bool = False
    unique: Unique | None = None
    max_attempts: int | None = None
    """How often such a job may lose its worker; None: the engine's default."""
    reattach_timeout: float | None = None
    """Seconds that a running job whose worker is lost waits for a worker that can reattach to its
    work; None: there is nothing to reattach to."""


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
    """Do not apply the topic's defaults."""
    retry_number: int = 0
    """0 for what a caller submitted, n for the n-th retry that the engine emitted."""
    principal: str = ""
    """Who submitted it: set from the key, never by the caller."""
    capability: str | None = None
    """What it is going to do, in a word that safety rules know, as `repo.write`."""
    risk_tags: tuple[str, ...] = ()
    estimated_cost: float | None = None
    """In whatever unit the safety rules count."""
    after: tuple[str, ...] = ()
    """Jobs that must have ended before this one may start."""
    if_parent_fails: ParentPolicy = ParentPolicy.CANCEL
    takes_results: bool = False
    """Whether `{"$result_of": id}` in its input stands for the result of a job in `after`."""
    unique: Unique | None = None
    schedule: str | None = None
    """The name of the schedule that submitted it."""
    first_try: str | None = None
    """Set by the engine on a retry: the first job of the chain of tries."""
    try_number: int = 1
    """Set by the engine on a retry, by policy or by hand: 2 for the second try."""
    child_of: str | None = None
    """The job inside which it was submitted, by its first try; a retry of it keeps this."""
    detached: bool = False
    """Whether it goes on when the job that it is a child of ends without success."""
    traceparent: str | None = None
    """W3C trace context: the span within which it was submitted (`penstock.core.trace`)."""


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
    traceback: str | None = None
    """Where the exception was raised, as Python prints it: the last 8,000 characters."""
    artifacts: tuple[Artifact, ...] = ()
    """The files that it left, by name, whatever its end."""


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
    uncharged: int = 0
    """How many of its attempts don't count as losses: they ended through no fault of the job."""
    pages: tuple[int, ...] = ()
    """The journal pages that hold its transitions."""

    @property
    def job_id(self) -> str:
        return self.request.job_id

    @property
    def is_final(self) -> bool:
        return self.state in TERMINAL


# -- rules ------------------------------------------------------------------------------------

HEAD_START: dict[Priority, float] = {
    Priority.CRITICAL: 3600.0,
    Priority.INTERACTIVE: 300.0,
    Priority.BATCH: 0.0,
}
"""Seconds of waiting time that a priority is worth."""

RETRY_REQUESTED = "RETRY"
"""The error code of a job that raised `penstock.Retry`."""

IN_VAIN = frozenset(
    {
        "BAD_INPUT",
        "UNKNOWN_TOPIC",
        "NOT_IMPORTABLE",
        "RESULT_NOT_STORABLE",
        "RESULT_TOO_LARGE",
        "RESULT_WRONG_TYPE",
        "UNREADABLE_POINTER",
        "TOO_LARGE",
        "OUTPUT_LIMIT",
        "CONSTRAINT_NOT_ENFORCED",
        "FATAL",
    }
)
"""Errors that a retry would repeat: not retried unless the policy names them."""


class Timeouts(Struct, frozen=True, kw_only=True):
    """Timeouts of the control plane."""

    timeout: float = 3600.0
    """Seconds an attempt may run, unless the job says otherwise."""
    dispatch_timeout: float = 300.0
    """Seconds a worker may hold a job before it starts it."""
    lease: float = 15.0
    """Seconds that a silent worker is still presumed alive."""
    lost_grace: float = 3.0
    """Seconds a worker has to come back after its connection dropped."""
    kill_grace: float = 5.0
    """Seconds that work has to end by itself after it was asked to."""
    max_attempts: int = 5
    """How often an idempotent job may lose its worker before it ends TIMEOUT."""


def completed(request: JobRequest, defaults: TopicDefaults | None) -> JobRequest:
    """Fill in what the caller left open with the topic's defaults."""
    if request.complete or defaults is None:
        return request
    return replace(
        request,
        timeout=defaults.timeout if request.timeout is None else request.timeout,
        retry=defaults.retry if request.retry == NO_RETRY else request.retry,
        priority=defaults.priority if request.priority is Priority.BATCH else request.priority,
        idempotent=request.idempotent or defaults.idempotent,
        unique=request.unique or defaults.unique,
        complete=True,
    )


def ready_at(request: JobRequest, accepted_at: float) -> float:
    """The time from which a job may start."""
    return accepted_at if request.run_at is None else max(accepted_at, request.run_at)


def rank(request: JobRequest, accepted_at: float) -> float:
    """The order within a tenant: the lowest goes first.

    All waiting jobs age alike, so comparing "waited so long plus head start" at any
    moment is comparing this fixed number. A batch job is therefore overtaken only by
    interactive jobs that came less than five minutes after it, and never starves.
    """
    return ready_at(request, accepted_at) - HEAD_START[request.priority]


def backoff(retry: RetryPolicy, number: int, chance: float) -> float:
    """Seconds to wait before retry `number` (1 is the first); `chance` is in [0, 1)."""
    steps = min(number - 1, 64)
    delay = min(retry.delay * retry.factor**steps, retry.max_delay)
    return delay * (1 - retry.jitter * chance)


def may_retry(job: Job, result: JobResult) -> bool:
    """Whether the retry policy and the safety rules allow a retry."""
    request = job.request
    retry = request.retry
    most = constraints_of(job).max_retries
    if request.retry_number >= (retry.retries if most is None else min(retry.retries, most)):
        return False
    if result.status not in (JobState.FAILED, JobState.TIMEOUT):
        return False
    return is_retryable(retry, result)


def is_retryable(retry: RetryPolicy, result: JobResult) -> bool:
    """Whether another try could help, by the kind of error alone."""
    if result.error_code == RETRY_REQUESTED:
        return True
    kinds = {result.error_code or "", *result.error_kinds}
    if kinds & set(retry.never):
        return False
    if retry.on:
        return bool(kinds & set(retry.on))
    return result.error_code not in IN_VAIN


def retry_of(job: Job, result: JobResult, job_id: str, now: float, chance: float) -> JobRequest:
    """The retry of a job: the same request with a new id, parent and time."""
    request = job.request
    number = request.retry_number + 1
    after = result.retry_after
    delay = backoff(request.retry, number, chance) if after is None else after
    return replace(
        request,
        job_id=job_id,
        parent_job_id=request.job_id,
        first_try=chain_of(request),
        try_number=request.try_number + 1,
        idempotency_key=None,
        run_at=now + delay,
        retry_number=number,
    )


def chain_of(request: JobRequest) -> str:
    """The id by which a job and its retries are known: that of the first try."""
    return request.first_try or request.job_id


def constraints_of(job: Job) -> Constraints:
    """The constraints that the safety rules set for this job."""
    verdict = job.verdict
    return _FREE if verdict is None or verdict.constraints is None else verdict.constraints


_FREE = Constraints()


def run_limit(job: Job, default_timeout: float) -> float:
    """Maximum run time of one attempt in seconds, by the job and by the safety rules."""
    limit = default_timeout if job.request.timeout is None else job.request.timeout
    most = constraints_of(job).max_runtime
    return limit if most is None else min(limit, most)


def keeps_out(held: Job, now: float) -> bool:
    """Whether a job's unique key excludes a new job with the same key now."""
    unique = held.request.unique
    if unique is None:
        return False
    if unique.period is not None:
        return now < held.accepted_at + unique.period
    if unique.scope is UniqueScope.WAITING:
        return held.state in WAITING
    return not held.is_final


_MAY_DIFFER = frozenset(
    {"job_id", "run_at", "deadline", "retry_number", "complete", "principal", "traceparent"}
)
"""Fields that may differ in a repeated request: generated ids, times relative to now, traces."""
_CHILD_MAY_DIFFER = _MAY_DIFFER | {"parent_job_id"}


def difference(request: JobRequest, held: JobRequest) -> str | None:
    """The first field in which a repeated request differs from the stored one, if any."""
    if request.tenant != held.tenant:
        return "tenant"
    if has_child_key(request) and request.idempotency_key == held.idempotency_key:
        return None  # the key says what is asked; a retry of the parent may ask otherwise
    may_differ = _MAY_DIFFER
    if request.child_of is not None and request.child_of == held.child_of:
        may_differ = _CHILD_MAY_DIFFER  # asked for in another try of the same parent
    for name in JobRequest.__struct_fields__:
        if name not in may_differ and getattr(request, name) != getattr(held, name):
            return name
    return None


def child_key(chain: str, digest: bytes, number: int) -> str:
    """The idempotency key of a child that was submitted without one: by the chain of its parent,
    the digest of topic and input, and which of those with the same digest it is."""
    return f"{_CHILD_KEY}{chain}:{digest.hex()}:{number}"


_CHILD_KEY = "child:"


def has_child_key(request: JobRequest) -> bool:
    """Whether the key of a request is such a key."""
    key = request.idempotency_key
    return key is not None and request.child_of is not None and key.startswith(_CHILD_KEY)


def next_child_key(key: str) -> str:
    """The key under which a child that failed in an earlier try of its parent runs again."""
    stem, tilde, number = key.partition("~")
    return f"{stem}~{int(number) + 1 if tilde else 1}"


def request_hash(request: JobRequest) -> str:
    """Hash of the whole request; an approval is bound to it."""
    encoded = msgspec.json.encode(request, order="deterministic")
    return hashlib.sha256(encoded).hexdigest()


# -- ids --------------------------------------------------------------------------------------

_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [a + b for a in _DIGITS for b in _DIGITS]
_MASK = (1 << 80) - 1
_LOW = (1 << 20) - 1


def _encode(value: int, pairs: int) -> str:
    return "".join([_PAIRS[value >> shift & 1023] for shift in range(10 * (pairs - 1), -1, -10)])


class IdSource:
    """Makes job ids that are unique and sort by time; never goes back, even if the clock does.

    An id is a ULID in lower case: 48 bits of milliseconds, 80 bits that start at random in each
    millisecond and count up within it. So a store's index grows at its right edge only.
    """

    def __init__(self, entropy: Callable[[], int] = lambda: secrets.randbits(79)) -> None:
        self._entropy = entropy
        self._millis = -1
        self._stem = ""
        """What ids have in common while only the last 20 bits of the count change."""
        self._count = 0

    def next(self, now: float) -> str:
        millis = int(now * 1000)
        if millis > self._millis:
            self._millis = millis
            self._count = self._entropy()
            self._begin()
        else:
            self._count = (self._count + 1) & _MASK
            if not self._count & _LOW:
                self._begin()
        low = self._count & _LOW
        return self._stem + _PAIRS[low >> 10] + _PAIRS[low & 1023]

    def _begin(self) -> None:
        self._stem = _encode(self._millis, 5) + _encode(self._count >> 20, 6)


# -- raised by a job's own code ---------------------------------------------------------------


class Retry(Exception):
    """Raised in a job: try it again, after this many seconds (or by the job's own backoff).

    Given to a stage of a pipeline, `Retry(3)` says how often an item is tried again, and the
    other arguments say after how long and upon which errors, as `RetryPolicy` has them.
    """

    def __init__(
        self,
        message: str | int = "the job asked to be tried again",
        *,
        after: float | None = None,
        delay: float = 1.0,
        factor: float = 2.0,
        max_delay: float = 30.0,
        jitter: float = 0.5,
        on: Iterable[type[BaseException] | str] = (),
        never: Iterable[type[BaseException] | str] = (),
    ) -> None:
        retries = message if isinstance(message, int) else 0
        super().__init__(f"up to {retries} more times" if retries else message)
        self.after = after
        self.policy = RetryPolicy(
            retries,
            delay,
            factor,
            max_delay,
            jitter,
            tuple(map(_name, on)),
            tuple(map(_name, never)),
        )


class Cancelled(Exception):
    """Raised inside a job that was asked to end; letting it pass is the way to obey."""


def _name(kind: type[BaseException] | str) -> str:
    return kind if isinstance(kind, str) else kind.__name__
