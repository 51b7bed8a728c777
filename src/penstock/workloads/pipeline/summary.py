"""The summary of a run: one small value that says what each stage did."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.workloads.pipeline.records import (
    Alert,
    AlertRule,
    PipelineRecord,
    RunSummary,
    StageRecord,
    StageStatus,
)

Metrics = dict[str, float | int | str | bool]


def summarise(record: PipelineRecord, now: float) -> RunSummary:
    """The run as it stands. Made after its last work stage, it is open: no `finished_at`."""
    return RunSummary(
        trace_id=record.trace_id,
        started_at=record.started_at,
        finished_at=record.finished_at,
        duration_ms=_wall_ms(record, now) or 0.0,
        stages_ms=sum(stage.duration_ms for stage in record.stages),
        status=record.status,
        stages={stage.name: metrics_of(stage) for stage in record.stages},
        alerts=tuple(alert.code for alert in record.alerts),
        trigger="retry" if record.retry_of and record.trigger == "manual" else record.trigger,
    )


def closed(record: PipelineRecord, alerts: Iterable[Alert]) -> RunSummary:
    """The summary at the end, whatever the end. `record` has its final status and times."""
    final = summarise(record, record.finished_at or record.created_at)
    return replace(final, alerts=tuple(dict.fromkeys(alert.code for alert in alerts)))


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


def _wall_ms(record: PipelineRecord, now: float | None) -> float | None:
    """From the start of a run to its end, or to `now` where it has none yet."""
    end = now if record.finished_at is None else record.finished_at
    if end is None or record.started_at is None:
        return None
    return max(0.0, end - record.started_at) * 1000


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


def stage_ending(stage: StageRecord) -> dict[str, Any]:
    """What the event `stage_complete` says."""
    return {
        **progress_of(stage),
        "reason": stage.reason,
        "duration_ms": stage.duration_ms,
        "metrics": stage.metrics,
        "errors": list(stage.errors),
    }


def ending_of(record: PipelineRecord) -> dict[str, Any]:
    """What the event `job_complete` says of a run that has ended."""
    return {
        "status": str(record.status),
        "stage_progress": {stage.name: progress_of(stage) for stage in record.stages},
        "errors": msgspec.to_builtins(list(record.errors)),
        "alerts": [alert.code for alert in record.alerts],
    }


def rate_below(code: str, metric: str, of: str, share: float) -> AlertRule:
    """Less than this share, between 0 and 1."""
    return AlertRule(code=code, metric=metric, of=of, below=share)


def rate_above(code: str, metric: str, of: str, share: float) -> AlertRule:
    """More than this share, between 0 and 1."""
    return AlertRule(code=code, metric=metric, of=of, above=share)


def count_below(code: str, metric: str, count: float) -> AlertRule:
    return AlertRule(code=code, metric=metric, below=count)


def count_above(code: str, metric: str, count: float) -> AlertRule:
    return AlertRule(code=code, metric=metric, above=count)


def count_equals_zero(code: str, metric: str) -> AlertRule:
    return AlertRule(code=code, metric=metric, equals="0")


def duration_above(code: str, seconds: float, stage: str | None = None) -> AlertRule:
    """Of one stage, or from the start of the job to its end."""
    metric = "duration_ms" if stage is None else f"{stage}.duration_ms"
    return AlertRule(code=code, metric=metric, above=seconds * 1000)


def ended(code: str, status: PipelineJobStatus | str) -> AlertRule:
    return AlertRule(code=code, metric="status", equals=str(status))


BUILT_IN = ("total", "ok", "failed", "skipped", "done", "duration_ms", "rate")
"""Metrics that every stage has. One of the same name that the stage counted goes before."""

Value = float | int | str
_RAN = frozenset({StageStatus.COMPLETED, StageStatus.PARTIAL, StageStatus.FAILED})


def evaluate(rules: Iterable[AlertRule], record: PipelineRecord) -> tuple[Alert, ...]:
    """The alerts of a run with its final status and times, each code once."""
    alerts: dict[str, Alert] = {}
    for rule in rules:
        alert = None if rule.code in alerts else _alert(rule, record)
        if alert is not None:
            alerts[rule.code] = alert
    return tuple(alerts.values())


def _alert(rule: AlertRule, record: PipelineRecord) -> Alert | None:
    value = _measured(rule, record)
    crossed = None if value is None else _crossed(rule, value)
    if value is None or crossed is None:
        return None
    words, threshold = crossed
    name = f"{rule.metric} of {rule.of}" if rule.of else rule.metric
    text = f"{name} is {_shown(value)}, {words} {_shown(threshold)}"
    return Alert(code=rule.code, message=text, value=value, threshold=threshold)


def _measured(rule: AlertRule, record: PipelineRecord) -> Value | None:
    value = _metric(rule.metric, record)
    if not rule.of:
        return value
    whole = _metric(rule.of, record)
    if isinstance(value, str) or isinstance(whole, str) or value is None or not whole:
        return None
    return value / whole


def _crossed(rule: AlertRule, value: Value) -> tuple[str, float | str] | None:
    """In words, and which threshold; None if it is within them all."""
    if rule.equals is not None and _is(value, rule.equals):
        return "which is", rule.equals
    if isinstance(value, str):
        return None
    if rule.below is not None and value < rule.below:
        return "below", rule.below
    if rule.above is not None and value > rule.above:
        return "above", rule.above
    return None


def _metric(name: str, record: PipelineRecord) -> Value | None:
    if name == "status":
        return str(record.status)
    if name == "duration_ms":
        return _wall_ms(record, None)
    stage, _, metric = name.partition(".")
    found = record.stage(stage)
    if found is None or found.status not in _RAN:
        return None
    counted: Value | None = getattr(found, metric) if metric in BUILT_IN else 0
    return found.metrics.get(metric, counted)


def _is(value: Value, wanted: str) -> bool:
    if isinstance(value, str):
        return value.casefold() == wanted.casefold()
    try:
        return value == float(wanted)
    except ValueError:
        return False


def _shown(value: Value) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"
