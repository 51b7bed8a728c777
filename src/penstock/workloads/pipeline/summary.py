"""The summary of a run: one small value that says what each stage did."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.workloads.pipeline.records import Alert, PipelineRecord, RunSummary, StageRecord

Metrics = dict[str, float | int | str | bool]


def summarise(record: PipelineRecord, now: float) -> RunSummary:
    """The run as it stands. Made after its last work stage, it is open: no `finished_at`."""
    end = now if record.finished_at is None else record.finished_at
    return RunSummary(
        trace_id=record.trace_id,
        started_at=record.started_at,
        finished_at=record.finished_at,
        duration_ms=_wall_ms(record.started_at, end),
        stages_ms=sum(stage.duration_ms for stage in record.stages),
        status=record.status,
        stages={stage.name: metrics_of(stage) for stage in record.stages},
        alerts=tuple(alert.code for alert in record.alerts),
        trigger=_trigger(record),
    )


def closed(
    summary: RunSummary | None, record: PipelineRecord, alerts: Iterable[Alert]
) -> RunSummary:
    """The summary at the end, whatever the end, also of a run that came to no open one.
    `record` has its final status and times."""
    final = summarise(record, record.finished_at or record.created_at)
    return replace(
        summary or final,
        started_at=final.started_at,
        finished_at=final.finished_at,
        duration_ms=final.duration_ms,
        stages_ms=final.stages_ms,
        status=final.status,
        stages=final.stages,
        alerts=tuple(dict.fromkeys(alert.code for alert in alerts)),
    )


def metrics_of(stage: StageRecord) -> Metrics:
    """Counts and own metrics of a stage; where both have a name, its own goes before."""
    counts: Metrics = {
        "status": str(stage.status),
        "total": stage.total,
        "ok": stage.ok,
        "failed": stage.failed,
        "skipped": stage.skipped,
        "duration_ms": stage.duration_ms,
    }
    if stage.reason:
        counts["reason"] = stage.reason
    if stage.empty:
        counts["empty"] = True
    if stage.reused:
        counts["reused"] = stage.reused
    return {**counts, **stage.metrics}


def _trigger(record: PipelineRecord) -> str:
    return "retry" if record.retry_of and record.trigger == "manual" else record.trigger


def _wall_ms(started_at: float | None, end: float) -> float:
    return 0.0 if started_at is None else max(0.0, end - started_at) * 1000


def progress_of(stage: StageRecord) -> dict[str, Any]:
    """What an event says of a stage while it runs."""
    return {
        "stage": stage.name,
        "status": str(stage.status),
        "total": stage.total,
        "done": stage.done,
        "ok": stage.ok,
        "failed": stage.failed,
        "skipped": stage.skipped,
        "rate": stage.rate,
        "eta": stage.eta,
    }


def ending_of(record: PipelineRecord) -> dict[str, Any]:
    """What the event `job_complete` says of a run that has ended."""
    return {
        "status": str(record.status),
        "stage_progress": {stage.name: progress_of(stage) for stage in record.stages},
        "errors": msgspec.to_builtins(list(record.errors)),
        "alerts": [alert.code for alert in record.alerts],
    }
