"""Where pipeline runs are kept, and what a caller can ask of them.

`PipelineStore` is written by whoever runs a pipeline: an executor of the control plane, or a
`PipelineJobManager` alone in a script. `Pipelines` is the part of an EngineApi that callers see.

What the store promises:

* A write returns only after it is as durable as the store says. Concurrent writers are
  merged into one commit.
* Every move of a job asks `lifecycles.pipeline.PIPELINE`; a final status is never overwritten.
* A write carries the fence of its run. One of an older run is refused, whole, with
  `Superseded`, and changes nothing.
* Listeners hear the ids of jobs that changed, after the commit.
"""

from __future__ import annotations

import builtins
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

from msgspec import UNSET, Struct, UnsetType

from penstock.lifecycles.pipeline import PipelineJobEvent, PipelineJobStatus
from penstock.workloads.pipeline.records import (
    Alert,
    Breaker,
    ItemOutcome,
    ItemRecord,
    PipelineEvent,
    PipelineEventKind,
    PipelineInfo,
    PipelineRecord,
    RunSummary,
    StageError,
    StageRecord,
)


class Happening(Struct, frozen=True):
    """An event to be recorded; the store gives it its id."""

    kind: PipelineEventKind
    data: dict[str, Any]


class StageItems(Struct, frozen=True):
    """Items of one stage that were listed, or have ended."""

    stage: str
    items: tuple[ItemRecord, ...]


class Save(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Everything that one write changes, all of it or nothing.

    `listed` inserts items; one whose key the stage has already is left out. `ended` replaces
    the outcome of items that are listed, by `seq`. Stages replace those of the same name.
    """

    job_id: str
    fence: int
    at: float
    event: PipelineJobEvent | None = None
    """What happens to the job; refused (`IllegalMove`) where its table has no such move."""
    stages: tuple[StageRecord, ...] = ()
    listed: tuple[StageItems, ...] = ()
    ended: tuple[StageItems, ...] = ()
    happened: tuple[Happening, ...] = ()
    current_stage: str | UnsetType = UNSET
    errors: tuple[StageError, ...] | UnsetType = UNSET
    summary: RunSummary | UnsetType = UNSET
    alerts: tuple[Alert, ...] | UnsetType = UNSET
    abandoned_items: tuple[str, ...] | UnsetType = UNSET
    cancel_effective: bool | UnsetType = UNSET
    fingerprint: str | UnsetType = UNSET
    lease_until: float | UnsetType | None = UNSET


class Saved(Struct, frozen=True):
    """What a write came to."""

    status: PipelineJobStatus
    cancel_requested: bool
    """So a running job learns of a cancel with each of its own writes."""
    listed: int = 0
    """How many of the items to be listed were new."""


class Claim(Struct, frozen=True, kw_only=True):
    """Asks for the right to run a job: as its next run, with the next fence."""

    job_id: str
    owner: str
    now: float
    lease_until: float | None = None
    fence: int | None = None
    """Must be higher than the job's own; None: its own and one more, but only where its lease
    is over (`lease_until` not after `now`) or it was never run."""


class CancelAnswer(Struct, frozen=True):
    """What became of the wish to cancel."""

    accepted: bool
    status: PipelineJobStatus
    """The status after the row was changed, or not."""
    reason: str = ""
    """Why it was not accepted."""


class RunQuery(Struct, frozen=True, kw_only=True):
    """Which runs, newest first. All conditions must hold."""

    pipeline: str | None = None
    statuses: tuple[PipelineJobStatus, ...] = ()
    tenant: str | None = None
    retry_of: str | None = None
    before: tuple[float, str] | None = None
    """(created_at, id) at which the page before ended."""
    limit: int = 50


class PipelineStore(Protocol):
    async def create(
        self, record: PipelineRecord, *, single_flight: bool = False
    ) -> PipelineRecord:
        """Store a new run, PENDING. One that is there already (same id) is returned as it is.

        With `single_flight`, raises PipelineBusy (a Conflict) while another unfinished run of
        the same pipeline and tenant is there.
        """

    async def get(self, job_id: str) -> PipelineRecord | None: ...

    async def glance(self, job_id: str) -> Saved | None:
        """Its status, and whether a cancel was asked for; the cheapest question there is."""

    async def find(self, query: RunQuery) -> list[PipelineRecord]: ...

    async def unfinished(self) -> list[PipelineRecord]:
        """Every run that is PENDING or RUNNING, oldest first."""

    async def claim(self, claim: Claim) -> PipelineRecord | None:
        """The record with its new fence and owner, `resumes` one higher if it was RUNNING;
        None if somebody else has it, or it has ended."""

    async def save(self, save: Save) -> Saved: ...

    async def request_cancel(self, job_id: str, now: float) -> CancelAnswer:
        """PENDING becomes CANCELLED at once, with `finished_at` and the event `job_complete`,
        which nobody else would write; RUNNING is marked. NotFound."""

    async def fail_stale(self, job_id: str, now: float, message: str, version: int) -> bool:
        """FAILED (`clean_up`) with this error, if the record still has this version.

        Stages that were running are failed too, `job_complete` is written, and the fence goes
        up, so that a runner which comes back is refused.
        """

    async def items(
        self,
        job_id: str,
        stage: str,
        *,
        after: int = -1,
        limit: int = 1000,
        outcomes: tuple[ItemOutcome, ...] = (),
    ) -> list[ItemRecord]:
        """Items with a `seq` above `after`, in order."""

    async def items_by_key(
        self, job_id: str, stage: str, keys: Sequence[str]
    ) -> list[ItemRecord]: ...

    async def fan(self, job_id: str, stage: str) -> int:
        """How many items a stage that maps over this one will have: the sum over ok items."""

    async def forget_stages(self, job_id: str, fence: int, stages: Sequence[str]) -> None:
        """Remove their items: what a restart does."""

    async def events(
        self, job_id: str, after: int = 0, limit: int = 1000
    ) -> list[PipelineEvent]: ...

    async def breaker(self, name: str) -> Breaker | None: ...

    async def breakers(self) -> list[Breaker]: ...

    async def put_breaker(self, breaker: Breaker) -> bool:
        """Store it if its `version` is one more than the stored one's (0 where none is)."""

    async def declare(self, infos: Sequence[PipelineInfo]) -> None:
        """Remember what can be started."""

    async def declared(self) -> list[PipelineInfo]: ...

    async def remember(self, name: str, value: bytes) -> None:
        """Keep a small fact, as a pipeline's own versions of something."""

    async def recall(self, name: str) -> bytes | None: ...

    async def refers(self, tenant: str, pointer: str) -> bool:
        """Whether an item of one of the tenant's runs points to this blob."""

    async def pointers(self) -> builtins.list[str]:
        """Every blob that an item points to."""

    async def prune(self, finished_before: float, limit: int = 1000) -> int:
        """Forget runs that ended before, with their items and events."""

    def listen(self, listener: Callable[[Sequence[str]], None]) -> Callable[[], None]:
        """Hear of jobs that changed; returns how to stop hearing."""

    async def close(self) -> None: ...


class Pipelines(Protocol):
    """What a caller can ask about pipelines. A run's id is its canonical job's id."""

    async def list(self) -> builtins.list[PipelineInfo]:
        """What can be started."""

    async def show(self, name: str) -> PipelineInfo:
        """One of them. NotFound."""

    async def start(
        self,
        name: str,
        config: dict[str, Any] | None = None,
        *,
        tenant: str = "default",
        idempotency_key: str | None = None,
        retry_of: str | None = None,
    ) -> PipelineRecord:
        """Submit a canonical job for it. NotFound, InvalidRequest (names the config's field),
        PipelineBusy (names the running job)."""

    async def get(self, job_id: str) -> PipelineRecord: ...

    async def runs(self, query: RunQuery) -> builtins.list[PipelineRecord]: ...

    async def items(
        self,
        job_id: str,
        stage: str,
        *,
        after: int = -1,
        limit: int = 100,
        outcomes: tuple[ItemOutcome, ...] = (),
    ) -> builtins.list[ItemRecord]:
        """NotFound also for a stage that the run does not have."""

    async def cancel(self, job_id: str, *, reason: str = "", timeout: float = 10.0) -> CancelAnswer:
        """Waits up to `timeout` for running work to stop."""

    async def retry_failed(self, job_id: str) -> PipelineRecord:
        """A new run, linked by `retry_of`, of what failed and what depends on it.
        IllegalMove unless the run has ended; InvalidRequest if nothing failed in it."""

    def stream(self, job_id: str, after: int = 0) -> AsyncIterator[PipelineEvent]:
        """Its events from an id on, as they come, until `job_complete`. NotFound at once."""

    async def breakers(self) -> builtins.list[Breaker]: ...

    async def reset_breaker(self, name: str) -> Breaker:
        """Close it by hand. NotFound."""
