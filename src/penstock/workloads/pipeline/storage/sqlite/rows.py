"""Runs, stages and items as rows."""

from __future__ import annotations

import math
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.workloads.pipeline.records import (
    Alert,
    Breaker,
    ErrorClass,
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
from penstock.workloads.pipeline.store import Saved
from penstock.workloads.pipeline.store_rules import Head

Row = tuple[Any, ...]

LONG = 1000
"""Letters of config from which it is kept apart."""

_encoder = msgspec.json.Encoder()
_STATUSES: dict[str, PipelineJobStatus] = {status.value: status for status in PipelineJobStatus}
_OUTCOMES: dict[str, ItemOutcome] = {outcome.value: outcome for outcome in ItemOutcome}
_CLASSES: dict[str | None, ErrorClass | None] = {None: None, **{c.value: c for c in ErrorClass}}
_KINDS: dict[str, PipelineEventKind] = {kind.value: kind for kind in PipelineEventKind}
_BOOLS: dict[int | None, bool | None] = {None: None, 0: False, 1: True}

_read_dict = msgspec.json.Decoder(dict[str, Any]).decode
_read_stages = msgspec.json.Decoder(tuple[StageRecord, ...]).decode
_read_errors = msgspec.json.Decoder(tuple[StageError, ...]).decode
_read_alerts = msgspec.json.Decoder(tuple[Alert, ...]).decode
_read_texts = msgspec.json.Decoder(tuple[str, ...]).decode
_read_summary = msgspec.json.Decoder(RunSummary).decode
read_stage = msgspec.json.Decoder(StageRecord).decode
read_breaker = msgspec.json.Decoder(Breaker).decode
read_info = msgspec.json.Decoder(PipelineInfo).decode


def text(value: object) -> str:
    return _encoder.encode(value).decode()


def read_glance(row: Row) -> Saved:
    return Saved(_STATUSES[row[0]], row[1] == 1)


def read_run(row: Row) -> PipelineRecord:
    errors, alerts, abandoned, summary, config, stages = row[20:]
    return PipelineRecord(
        status=_STATUSES[row[0]],
        fence=row[1],
        version=row[2],
        cancel_requested=row[3] == 1,
        cancel_effective=_BOOLS[row[4]],
        current_stage=row[5],
        started_at=row[6],
        finished_at=row[7],
        lease_until=row[8],
        progress_at=row[9],
        owner=row[10],
        resumes=row[11],
        id=row[12],
        created_at=row[13],
        pipeline=row[14],
        tenant=row[15],
        trace_id=row[16],
        fingerprint=row[17],
        retry_of=row[18],
        trigger=row[19],
        errors=read_errors(errors),
        alerts=() if alerts is None else _read_alerts(alerts),
        abandoned_items=() if abandoned is None else _read_texts(abandoned),
        summary=None if summary is None else _read_summary(summary),
        config=_read_dict(config),
        stages=() if stages is None else _read_stages(f"[{stages}]"),
    )


def read_errors(errors: str | None) -> tuple[StageError, ...]:
    return () if errors is None else _read_errors(errors)


def run_row(record: PipelineRecord, config: str) -> Row:
    return (
        *head_row(Head.of(record)),
        record.id,
        record.created_at,
        record.pipeline,
        record.tenant,
        record.trace_id,
        record.fingerprint,
        record.retry_of,
        record.trigger,
        None if len(config) > LONG else config,
        text(record.errors) if record.errors else None,
        alerts_text(record.alerts) if record.alerts else None,
        text(record.abandoned_items) if record.abandoned_items else None,
        None if record.summary is None else summary_text(record.summary),
    )


def read_head(row: Row) -> Head:
    """From a row whose first column is the run's number."""
    return Head(
        _STATUSES[row[1]],
        row[2],
        row[3],
        row[4] == 1,
        _BOOLS[row[5]],
        row[6],
        row[7],
        row[8],
        row[9],
        row[10],
        row[11],
        row[12],
    )


def head_row(head: Head) -> Row:
    return (
        head.status,
        head.fence,
        head.version,
        head.cancel_requested,
        head.cancel_effective,
        head.current_stage,
        head.started_at,
        head.finished_at,
        head.lease_until,
        head.progress_at,
        head.owner,
        head.resumes,
    )


def progress_row(run: int, head: Head) -> Row:
    return (
        head.version,
        head.cancel_requested,
        head.cancel_effective,
        head.current_stage,
        head.lease_until,
        head.progress_at,
        run,
    )


def stage_row(run: int, stage: StageRecord) -> Row:
    record = _encoder.encode(stage)
    if b":null" in record:
        # JSON has no NaN and no infinity: such a metric would not be readable again.
        record = _encoder.encode(replace(stage, metrics=_finite(stage.metrics)))
    return run, stage.name, stage.index, stage.status, record.decode()


def summary_text(summary: RunSummary) -> str:
    stages = {name: _finite(metrics) for name, metrics in summary.stages.items()}
    return text(replace(summary, stages=stages))


def alerts_text(alerts: tuple[Alert, ...]) -> str:
    return text([_finite(msgspec.structs.asdict(alert)) for alert in alerts])


def _finite(metrics: dict[str, Any]) -> dict[str, Any]:
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in metrics.items()
    }


def span(lot: int, after: int = -1) -> tuple[int, int]:
    """The places of a lot's items lie between these; from a `seq` on, if wished."""
    return (lot << 32) + after, (lot + 1) << 32


def ended_row(lot: int, item: ItemRecord) -> Row:
    return (
        item.outcome,
        item.fan,
        item.attempts,
        item.reused,
        item.duration_ms,
        item.finished_at,
        item.error_class,
        item.error_code,
        item.error,
        item.output,
        (lot << 32) + item.seq,
    )


def listed_row(lot: int, item: ItemRecord) -> Row:
    return (*ended_row(lot, item), lot, item.key, item.input)


def read_item(row: Row) -> ItemRecord:
    return ItemRecord(
        seq=row[0],
        key=row[1],
        input=row[2],
        outcome=_OUTCOMES[row[3]],
        output=row[4],
        fan=row[5],
        attempts=row[6],
        error_class=_CLASSES[row[7]],
        error_code=row[8],
        error=row[9],
        duration_ms=row[10],
        finished_at=row[11],
        reused=row[12] == 1,
    )


def read_event(job_id: str, row: Row) -> PipelineEvent:
    return PipelineEvent(row[0], job_id, row[1], _KINDS[row[2]], _read_dict(row[3]))
