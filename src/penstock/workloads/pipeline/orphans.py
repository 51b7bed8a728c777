"""What is to become of an unfinished run that nobody in this process works on.

A run is held by a lease: whoever runs it says again and again until when it may be taken for
alive. All that is decided here is decided from the record, the declaration and the time, so
that two processes that look at the same run come to the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct
from msgspec.structs import replace

from penstock.ports.clock import Clock
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.records import (
    STALE_AFTER,
    STALE_MESSAGE,
    OnOrphan,
    PipelineInfo,
    PipelineRecord,
)
from penstock.workloads.pipeline.store import PipelineStore


class Fate(StrEnum):
    LEAVE = "leave"
    """Somebody has it, or may yet."""
    RESUME = "resume"
    """Nobody has it, and it can be taken up here."""
    STALE = "stale"
    """Nobody will end it: FAILED, in the seed's words."""
    GIVE_UP = "give_up"
    """It was resumed too often: FAILED, and the reason says so."""


def reason_for(fate: Fate, record: PipelineRecord) -> str | None:
    """The error with which a run ends that is not to go on; None: it is not to end."""
    if fate is Fate.STALE:
        return STALE_MESSAGE
    if fate is Fate.GIVE_UP:
        return f"it was taken up {record.resumes} times, and never got to an end"
    return None


class Patience(Struct, frozen=True, kw_only=True):
    """How long a run is left to whoever has it."""

    max_resumes: int
    slack: float
    """Seconds more for the holder of a lease to end a run without progress itself."""


def is_orphan(record: PipelineRecord, now: float) -> bool:
    """Nobody holds it. A run without a lease that was begun is watched by the control plane."""
    if record.lease_until is None:
        return record.fence == 0
    return record.lease_until <= now


def is_stuck(record: PipelineRecord, stale_after: float | None, now: float) -> bool:
    """It made no progress for so long that it can't be told from a dead one."""
    return stale_after is not None and now - last_progress(record) > stale_after


def limit_of(record: PipelineRecord, info: PipelineInfo | None) -> float | None:
    """How long it may go without progress: as long as one call of its stage may take, too."""
    if info is None or info.stale_after is None:
        return STALE_AFTER if info is None else None
    calls = [stage.timeout or 0.0 for stage in info.stages if stage.name == record.current_stage]
    return max([info.stale_after, *calls])


def last_progress(record: PipelineRecord) -> float:
    return max(record.progress_at or 0.0, record.started_at or 0.0, record.created_at)


def fate_of(
    record: PipelineRecord,
    info: PipelineInfo | None,
    now: float,
    patience: Patience,
    *,
    runnable: bool,
) -> Fate:
    """`info` is its declaration, if anybody knows it; `runnable`: its code is here."""
    stale_after = limit_of(record, info)
    if not is_orphan(record, now):
        watched = record.lease_until is not None
        late = stale_after is not None and is_stuck(record, stale_after + patience.slack, now)
        return Fate.STALE if watched and late else Fate.LEAVE
    if runnable and record.cancel_requested:
        return Fate.RESUME  # to be ended as CANCELLED: no stage of it runs
    if info is not None and info.on_orphan is OnOrphan.FAIL:
        return Fate.STALE
    if not runnable:
        return Fate.STALE if is_stuck(record, stale_after, now) else Fate.LEAVE
    return Fate.GIVE_UP if record.resumes >= patience.max_resumes else Fate.RESUME


class Sweeper:
    """Judges the runs of a store for one manager, and ends those that nobody will."""

    def __init__(
        self,
        store: PipelineStore,
        pipelines: Mapping[str, Definition],
        clock: Clock,
        owner: str,
        patience: Patience,
    ) -> None:
        self._store, self._pipelines, self._clock = store, pipelines, clock
        self._owner, self._patience = owner, patience

    def fate_of(self, record: PipelineRecord, info: PipelineInfo | None = None) -> Fate:
        """Of one that this manager has no task for: a lease of its own is over, then."""
        known = self._pipelines.get(record.pipeline)
        if record.owner == self._owner:
            record = replace(record, lease_until=0.0)
        return fate_of(
            record,
            info if known is None else known.info(),
            self._clock.now(),
            self._patience,
            runnable=known is not None,
        )

    async def end_if_stale(self, record: PipelineRecord, info: PipelineInfo | None) -> bool:
        """FAILED, unless it has changed since it was read."""
        why = reason_for(self.fate_of(record, info), record)
        if why is None:
            return False
        return await self._store.fail_stale(record.id, self._clock.now(), why, record.version)

    def is_lost(self, record: PipelineRecord) -> bool:
        """Whether a run of this process must be ended from outside: it gets nowhere, and whoever
        should have seen that has let its lease run out."""
        now, info = self._clock.now(), self._pipelines[record.pipeline].info()
        return is_orphan(record, now) and is_stuck(record, limit_of(record, info), now)
