"""A pipeline's run as it is shown: one shape while it runs and after, every field there.

The stored values leave out what has its default; a reader of JSON should not have to know
what that was. `view_of` and `record_of` are each other's inverse.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from penstock.core.stages import Alert, PipelineRecord, RunSummary, StageError, StageRecord
from penstock.lifecycles.pipeline import PipelineJobStatus


class StageView(StageRecord, frozen=True, kw_only=True, omit_defaults=False):
    """How far one stage of one run is."""


class RunView(Struct, frozen=True, kw_only=True):
    """The record of one run of a pipeline."""

    job_id: str
    """That of its canonical job, too."""
    trace_id: str
    pipeline: str
    status: PipelineJobStatus
    current_stage: str | None
    stage_progress: dict[str, StageView]
    """By name, in their order."""
    errors: tuple[StageError, ...]
    cancel_requested: bool
    cancel_effective: bool | None
    """After a cancel was asked for: whether that, or the finish, won."""
    abandoned_items: tuple[str, ...]
    """`stage/key` of work that would not stop within the grace time."""
    summary: RunSummary | None
    """Once its work stages are over."""
    alerts: tuple[Alert, ...]
    config: dict[str, Any]
    """As it was checked at the start, with all defaults."""
    created_at: float
    started_at: float | None
    finished_at: float | None
    progress_at: float | None
    """When it last got on."""
    retry_of: str | None
    """The run whose finished items this one takes over."""
    tenant: str
    trigger: str
    """manual, schedule, retry or child."""
    fingerprint: str
    """Of the pipeline's definition."""
    owner: str
    """Who runs it."""
    fence: int
    """Which run of it is the live one."""
    lease_until: float | None
    """When its owner must have been heard of again; null: the control plane watches it."""
    resumes: int
    """How often it went on after it was cut off."""
    version: int
    """Grows with every change."""


_SAME = tuple(
    name for name in RunView.__struct_fields__ if name in PipelineRecord.__struct_fields__
)


def view_of(record: PipelineRecord) -> RunView:
    return RunView(
        job_id=record.id,
        stage_progress={stage.name: StageView(**asdict(stage)) for stage in record.stages},
        **{name: getattr(record, name) for name in _SAME},
    )


def record_of(view: RunView) -> PipelineRecord:
    stages = sorted(view.stage_progress.values(), key=lambda stage: stage.index)
    return PipelineRecord(
        id=view.job_id,
        stages=tuple(StageRecord(**asdict(stage)) for stage in stages),
        **{name: getattr(view, name) for name in _SAME},
    )
