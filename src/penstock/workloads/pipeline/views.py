"""Runs and their items as JSON shows them: one shape during a run and after it, every field there.

The stored values leave out what has its default; a reader of JSON should not have to know
what that was. `view_of` and `record_of` are each other's inverse.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import asdict

from penstock.core.errors import UnreadablePointer
from penstock.core.pointer import JSON, data_media_type, decode_data, encode_data
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.workloads.pipeline.records import (
    Alert,
    ErrorClass,
    ItemOutcome,
    ItemRecord,
    PipelineRecord,
    RunSummary,
    StageError,
    StageRecord,
)


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
    """After a cancel was requested: whether it was cancelled, or finished first."""
    abandoned_items: tuple[str, ...]
    """`stage/key` of work that did not stop within the grace time."""
    summary: RunSummary | None
    """There once its work stages have ended."""
    alerts: tuple[Alert, ...]
    config: dict[str, Any]
    """As validated at the start, with all defaults."""
    created_at: float
    started_at: float | None
    finished_at: float | None
    progress_at: float | None
    """When it last made progress."""
    retry_of: str | None
    """The run whose finished items this one takes over."""
    tenant: str
    trigger: str
    """manual, schedule, retry or child."""
    fingerprint: str
    """Of the pipeline's definition."""
    worker_id: str
    """The worker that has it, or had it last."""
    attempt: int
    """How often it was dispatched: each attempt goes on where the one before stopped."""


_RUN_FIELDS = tuple(
    name for name in RunView.__struct_fields__ if name in PipelineRecord.__struct_fields__
)


def view_of(record: PipelineRecord) -> RunView:
    return RunView(
        job_id=record.id,
        stage_progress={stage.name: StageView(**asdict(stage)) for stage in record.stages},
        **{name: getattr(record, name) for name in _RUN_FIELDS},
    )


def record_of(view: RunView) -> PipelineRecord:
    stages = sorted(view.stage_progress.values(), key=lambda stage: stage.index)
    return PipelineRecord(
        id=view.job_id,
        stages=tuple(StageRecord(**asdict(stage)) for stage in stages),
        **{name: getattr(view, name) for name in _RUN_FIELDS},
    )


INLINE = 4096
"""Bytes of JSON that are shown as the value that they are."""
_LONGEST = len(encode_data(b"#" * INLINE))


class ItemView(Struct, frozen=True, kw_only=True):
    """One item of one stage. Of a value and its pointer one is there; none if there is none."""

    seq: int
    """Its place in the stage, from 0."""
    key: str
    """What it is known by, in this run and in one that retries it."""
    outcome: ItemOutcome
    input: Raw | UnsetType = UNSET
    """What it was given, where that is JSON of at most 4 KiB."""
    input_ptr: str | UnsetType = UNSET
    """Where else it is: a `data:` URI or a blob."""
    output: Raw | UnsetType = UNSET
    """What it gave, where that is JSON of at most 4 KiB."""
    output_ptr: str | UnsetType = UNSET
    """Where else it is: a `data:` URI or a blob."""
    output_count: int
    """How many items it gives a stage that maps over this one."""
    attempts: int
    error_class: ErrorClass | None
    error_code: str
    error: str
    duration_ms: float
    finished_at: float | None
    reused: bool
    """Whether it was taken over from the run that this one retries."""


_ITEM_FIELDS = tuple(
    name for name in ItemRecord.__struct_fields__ if name not in ("input", "output")
)


def item_view(item: ItemRecord) -> ItemView:
    given, gave = _shown(item.input), _shown(item.output)
    return ItemView(
        input=UNSET if given is None else given,
        input_ptr=item.input if given is None and item.input else UNSET,
        output=UNSET if gave is None else gave,
        output_ptr=item.output if gave is None and item.output else UNSET,
        **{name: getattr(item, name) for name in _ITEM_FIELDS},
    )


def item_of(view: ItemView) -> ItemRecord:
    """The record that a view was made of."""
    return ItemRecord(
        input=_pointer(view.input, view.input_ptr),
        output=_pointer(view.output, view.output_ptr),
        **{name: getattr(view, name) for name in _ITEM_FIELDS},
    )


def _shown(pointer: str) -> Raw | None:
    """The value behind a pointer; None where there is none that can be shown."""
    if not pointer.startswith("data:") or len(pointer) > _LONGEST:
        return None
    try:
        data = decode_data(pointer) if data_media_type(pointer) == JSON else b""
        if not 0 < len(data) <= INLINE:
            return None
        msgspec.json.decode(data)  # or the whole answer would be no JSON
    except (UnreadablePointer, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return Raw(data)


def _pointer(value: Raw | UnsetType, pointer: str | UnsetType) -> str:
    if value is not UNSET:
        return encode_data(bytes(value))
    return "" if pointer is UNSET else pointer
