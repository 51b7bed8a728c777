"""Thresholds on a finished run.

    Pipeline("news", alerts=[
        rate_below("download_rate_low", "ingest.body_downloaded", of="ingest.total", share=0.7),
        count_below("brief_story_count_low", "brief.story_count", 10),
        duration_above("pipeline_duration_high", 600),
        ended("pipeline_failed", "FAILED"),
    ])

A metric is `stage.metric`: one that the stage counted itself, or one of `BUILT_IN`; or it is
`duration_ms` or `status` of the whole job. One that a stage never counted is 0. A stage that
did not run raises no alerts: why it did not is told by its status.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.workloads.pipeline.records import (
    Alert,
    AlertRule,
    PipelineRecord,
    StageRecord,
    StageStatus,
)


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


def evaluate(
    rules: Iterable[AlertRule], record: PipelineRecord, now: float | None = None
) -> tuple[Alert, ...]:
    """The alerts of a run with its final status, each code once.

    `now` stands for `finished_at` in a record that has none yet.
    """
    alerts: dict[str, Alert] = {}
    for rule in rules:
        alert = None if rule.code in alerts else _alert(rule, record, now)
        if alert is not None:
            alerts[rule.code] = alert
    return tuple(alerts.values())


def _alert(rule: AlertRule, record: PipelineRecord, now: float | None) -> Alert | None:
    value = _measured(rule, record, now)
    crossed = None if value is None else _crossed(rule, value)
    if value is None or crossed is None:
        return None
    words, threshold = crossed
    name = f"{rule.metric} of {rule.of}" if rule.of else rule.metric
    text = f"{name} is {_shown(value)}, {words} {_shown(threshold)}"
    return Alert(code=rule.code, message=text, value=value, threshold=threshold)


def _measured(rule: AlertRule, record: PipelineRecord, now: float | None) -> Value | None:
    value = _metric(rule.metric, record, now)
    if not rule.of:
        return value
    whole = _metric(rule.of, record, now)
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


def _metric(name: str, record: PipelineRecord, now: float | None) -> Value | None:
    if name == "status":
        return str(record.status)
    if name == "duration_ms":
        end = now if record.finished_at is None else record.finished_at
        if end is None or record.started_at is None:
            return None
        return max(0.0, end - record.started_at) * 1000
    stage, _, metric = name.partition(".")
    found = record.stage(stage)
    return None if found is None or found.status not in _RAN else _of_stage(found, metric)


def _of_stage(stage: StageRecord, metric: str) -> Value | None:
    if metric in stage.metrics:
        return stage.metrics[metric]
    if metric in BUILT_IN:
        value: float | int | None = getattr(stage, metric)
        return value
    return 0


def _is(value: Value, wanted: str) -> bool:
    if isinstance(value, str):
        return value.casefold() == wanted.casefold()
    try:
        return value == float(wanted)
    except ValueError:
        return False


def _shown(value: Value) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"
