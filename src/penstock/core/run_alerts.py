"""Which thresholds a finished run has crossed: pure, so that whoever ends a run can ask.

`penstock.workloads.pipeline.alerts` makes the rules, and says what a metric is.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.core.stages import Alert, AlertRule, PipelineRecord, StageRecord, StageStatus

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
