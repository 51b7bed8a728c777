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

from penstock.core.run_alerts import BUILT_IN as BUILT_IN
from penstock.core.run_alerts import evaluate as evaluate
from penstock.core.stages import AlertRule
from penstock.lifecycles.pipeline import PipelineJobStatus


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
