"""The values of a staged pipeline (seed 002): the record of a run, its stages and its items.

A pipeline is a sequence of stages. A *map* stage runs once for each of its items, a *step* once;
a step is kept as a stage with one item. Values are frozen; times are seconds since the
epoch, UTC, and come from a Clock.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from enum import StrEnum
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from msgspec import Struct, field

from penstock.core.job import NO_RETRY, RetryPolicy
from penstock.lifecycles.pipeline import PIPELINE, PipelineJobStatus

STALE_MESSAGE = "Job timed out or was orphaned"
"""The seed's words for an orphaned job."""
STALE_AFTER = 7200.0
"""Seconds without progress after which a job is stale: two hours, as the seed says."""


TOPIC = "job.pipeline."
"""How the topics of pipelines begin; the name follows, and a stage's where its items are jobs."""


def pipeline_of(topic: str) -> str | None:
    """The pipeline that a topic starts; None for other topics, and for those of items."""
    name = topic.removeprefix(TOPIC)
    return name if name != topic and "." not in name else None


@functools.lru_cache(1000)
def trace_of(job_id: str) -> str:
    """The id by which a run's logs and summary are found; the same wherever it is asked for."""
    return str(uuid5(NAMESPACE_URL, f"penstock:{job_id}"))


class StageKind(StrEnum):
    MAP = "map"
    """One call an item; a failed item does not fail its siblings."""
    STEP = "step"
    """One call."""


class StageStatus(StrEnum):
    """How a stage stands. The last four are the seed's, and ends."""

    PENDING = "pending"
    """Its turn has not come."""
    RUNNING = "running"
    COMPLETED = "completed"
    """Finished without errors."""
    PARTIAL = "partial"
    """Finished with some errors."""
    FAILED = "failed"
    """It raised, or nothing in it succeeded."""
    SKIPPED = "skipped"
    """It was not run; `reason` says why."""


class ItemOutcome(StrEnum):
    PENDING = "pending"
    """Listed; it has not ended."""
    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"
    """It was not run: its breaker is open, or it is a duplicate; `error` says which."""


class ErrorClass(StrEnum):
    """What kind of failure an item had: the first is worth trying again."""

    TRANSIENT = "transient"
    PERMANENT = "permanent"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


class WhenOpen(StrEnum):
    """What becomes of an item whose circuit breaker is open."""

    WAIT = "wait"
    SKIP = "skip"
    FAIL = "fail"


class OnChange(StrEnum):
    """What becomes of an unfinished job whose pipeline was changed meanwhile."""

    RESUME = "resume"
    """Go on where the finished stages are still the same; else refuse."""
    RESTART = "restart"
    """Forget what was done and run every stage."""
    REFUSE = "refuse"
    """FAILED, with the reason."""


class OnOrphan(StrEnum):
    """What becomes of a job whose process is gone."""

    RESUME = "resume"
    FAIL = "fail"


class StageInfo(Struct, frozen=True, kw_only=True):
    """A stage as it was declared."""

    name: str
    kind: StageKind
    over: str = ""
    """What a map goes over: `stage:NAME`, `config:FIELD` or `source:FUNCTION`."""
    of: str = ""
    """The stage whose results a step is given."""
    needs: tuple[str, ...] = ()
    mode: str = "async"
    """async, thread or process."""
    concurrency: int = 1
    rate: float | None = None
    """Calls a second, at most."""
    timeout: float | None = None
    """Seconds that one call may take."""
    stage_timeout: float | None = None
    retry: RetryPolicy = NO_RETRY
    breaker: str | None = None
    when_open: WhenOpen = WhenOpen.WAIT
    enabled: str = ""
    """The config flag that switches it on."""
    critical: bool = False
    """Whether its failure ends the job as FAILED."""
    counts: bool = True
    """Whether it is looked at when the job's status is determined."""
    min_ok: int = 0
    """Items that must succeed, else the stage failed."""
    max_failed: float | None = None
    """The share of failed items, between 0 and 1, above which the stage failed."""
    distributed: bool = False
    """Whether its items are jobs of their own, for any worker."""
    version: str = ""
    doc: str = ""

    @property
    def form(self) -> str:
        """What it is, as far as its results depend on it: a change makes it another stage."""
        return "|".join((str(self.kind), self.over or self.of, self.version))


class PipelineInfo(Struct, frozen=True, kw_only=True, dict=True):
    """A pipeline as it was declared: what can be listed, drawn and started."""

    name: str
    topic: str
    stages: tuple[StageInfo, ...]
    fingerprint: str
    config_schema: dict[str, Any] = field(default_factory=dict)
    """JSON schema of its config."""
    policy: str = "document"
    single_flight: bool = True
    on_change: OnChange = OnChange.RESUME
    on_orphan: OnOrphan = OnOrphan.RESUME
    stale_after: float | None = STALE_AFTER
    alerts: tuple[AlertRule, ...] = ()
    doc: str = ""

    @functools.cached_property
    def first_stages(self) -> list[StageRecord]:
        """The stages of a run of which nothing has begun."""
        return first_stages(self.stages)


class AlertRule(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A threshold on a finished run; the functions of `penstock.alerts` make them."""

    code: str
    metric: str
    """`stage.metric`, or `duration_ms` or `status` of the whole job."""
    of: str = ""
    """Divide by this metric; where it is zero, the rule is silent."""
    below: float | None = None
    above: float | None = None
    equals: str | None = None


class Alert(Struct, frozen=True, kw_only=True):
    code: str
    message: str
    value: float | str
    threshold: float | str


class StageError(Struct, frozen=True):
    stage: str
    message: str
    code: str = ""


class StageRecord(Struct, frozen=True, kw_only=True):
    """How far one stage of one run is. The same shape while it runs and after."""

    name: str
    index: int
    kind: StageKind
    form: str = ""
    """What it was declared to be: kind, input and version. One of another form is another stage."""
    status: StageStatus = StageStatus.PENDING
    reason: str = ""
    """Why it was skipped, or failed as a whole."""
    counted: bool = True
    """Whether the run's status takes it into account."""
    critical: bool = False
    empty: bool = False
    """It had nothing to do."""
    listed: bool = False
    """Its items are all known."""
    total: int = 0
    done: int = 0
    """Items that ended in any way: ok + failed + skipped."""
    ok: int = 0
    failed: int = 0
    skipped: int = 0
    reused: int = 0
    """Of `ok`: taken over from the run that this one retries."""
    output_count: int = 0
    """How many items it gives a stage that maps over it."""
    rate: float | None = None
    """Items a second, over the last seconds."""
    eta: float | None = None
    """Seconds that the rest will take at that rate."""
    started_at: float | None = None
    finished_at: float | None = None
    duration_ms: float = 0.0
    """Time spent running it, over all attempts."""
    metrics: dict[str, float | int | str | bool] = field(default_factory=dict)
    errors: tuple[str, ...] = ()
    """The first few; every item keeps its own."""
    generation: int = 0
    """Which set of item rows is this stage's: one that is listed anew begins another."""

    @property
    def is_final(self) -> bool:
        return self.status not in (StageStatus.PENDING, StageStatus.RUNNING)


class ItemRecord(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One item of one stage. Input and output are pointers: `data:` or a blob."""

    seq: int
    """Its position in the stage, from 0."""
    key: str
    """What it is known by, in this run and in one that retries it."""
    input: str = ""
    outcome: ItemOutcome = ItemOutcome.PENDING
    output: str = ""
    output_count: int = 0
    """How many items it gives a stage that maps over this one."""
    attempts: int = 0
    error_class: ErrorClass | None = None
    error_code: str = ""
    error: str = ""
    duration_ms: float = 0.0
    finished_at: float | None = None
    reused: bool = False
    """Whether it was taken over from the run that this one retries."""


def first_stages(infos: Iterable[StageInfo]) -> list[StageRecord]:
    """The stages of a run of which nothing has begun."""
    return [
        StageRecord(
            name=info.name,
            index=index,
            kind=info.kind,
            counted=info.counts,
            critical=info.critical,
            form=info.form,
        )
        for index, info in enumerate(infos)
    ]


def by_name(stages: Iterable[StageRecord]) -> dict[str, StageRecord]:
    return {stage.name: stage for stage in stages}


class RunSummary(Struct, frozen=True, kw_only=True):
    """One per run, made after its last work stage (the flowchart's place for it), closed at the
    end of the job, whatever the end."""

    trace_id: str
    started_at: float | None
    finished_at: float | None
    duration_ms: float
    """Wall time."""
    stages_ms: float
    """Time within stages."""
    status: PipelineJobStatus
    stages: dict[str, dict[str, float | int | str | bool]]
    alerts: tuple[str, ...] = ()
    """Codes."""
    trigger: str = "manual"
    """manual, schedule, retry or child."""


class PipelineRecord(Struct, frozen=True, kw_only=True):
    """The record of one run of a pipeline: the fold of its job and of the rows that the job
    checkpointed. As JSON it has one shape during the run and after it, with every field."""

    id: str = field(name="job_id")
    """That of its canonical job, too."""
    trace_id: str
    pipeline: str
    status: PipelineJobStatus = PipelineJobStatus.PENDING
    current_stage: str | None = None
    stage_progress: dict[str, StageRecord] = field(default_factory=dict)
    """By name, in their order."""
    errors: tuple[StageError, ...] = ()
    cancel_requested: bool = False
    cancel_effective: bool | None = None
    """After a cancel was requested: whether it was cancelled, or finished first."""
    abandoned_items: tuple[str, ...] = ()
    """`stage/key` of work that did not stop within the grace time."""
    summary: RunSummary | None = None
    """There once its work stages have ended."""
    alerts: tuple[Alert, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    """As validated at the start, with all defaults."""
    created_at: float
    started_at: float | None = None
    finished_at: float | None = None
    progress_at: float | None = None
    """When it last made progress."""
    retry_of: str | None = None
    """The run whose finished items this one takes over."""
    tenant: str = "default"
    trigger: str = "manual"
    """manual, schedule, retry or child."""
    fingerprint: str = ""
    """Of the pipeline's definition."""
    worker_id: str = ""
    """The worker that has it, or had it last."""
    attempt: int = 0
    """How often it was dispatched: each attempt goes on where the one before stopped."""

    @property
    def stages(self) -> tuple[StageRecord, ...]:
        return tuple(self.stage_progress.values())

    @property
    def is_final(self) -> bool:
        return PIPELINE.is_final(self.status)

    @property
    def left_undone(self) -> bool:
        """Whether an ended run left anything that another could do better."""
        if self.status in (PipelineJobStatus.FAILED, PipelineJobStatus.CANCELLED):
            return True
        return any(
            stage.failed or (stage.counted and stage.status is not StageStatus.COMPLETED)
            for stage in self.stages
        )

    def stage(self, name: str) -> StageRecord | None:
        return self.stage_progress.get(name)


class PipelineEventKind(StrEnum):
    JOB_START = "job_start"
    STAGE_START = "stage_start"
    STAGE_PROGRESS = "stage_progress"
    STAGE_COMPLETE = "stage_complete"
    CUSTOM = "custom"
    """What a stage emitted itself."""
    JOB_COMPLETE = "job_complete"
    """The last one."""


class PipelineEvent(Struct, frozen=True, omit_defaults=True):
    """Something that happened to a run."""

    id: int | None
    """Its position in the history of the run's job; None for progress, which is not stored."""
    job_id: str
    at: float
    kind: PipelineEventKind
    data: dict[str, Any] = field(default_factory=dict)


class BreakerState(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Breaker(Struct, frozen=True, kw_only=True):
    """A circuit breaker, shared by every run of every pipeline that names it."""

    name: str
    state: BreakerState = BreakerState.CLOSED
    failures: int = 0
    """In a row."""
    threshold: int = 5
    cooldown: float = 60.0
    trials: int = 1
    """Calls let through at once while it is half open."""
    opened_at: float | None = None
    trial_until: tuple[float, ...] = ()
    """When each trial under way is given up for lost, so that its slot comes back."""
    version: int = 0
