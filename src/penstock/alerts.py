"""Alert rules of pipelines: thresholds on finished runs, for `Pipeline(alerts=[...])`."""

from penstock.workloads.pipeline.summary import (
    count_above,
    count_below,
    count_equals_zero,
    duration_above,
    ended,
    rate_above,
    rate_below,
)

__all__ = [
    "count_above",
    "count_below",
    "count_equals_zero",
    "duration_above",
    "ended",
    "rate_above",
    "rate_below",
]
