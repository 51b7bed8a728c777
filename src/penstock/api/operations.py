"""Everything that can be asked, in one table."""

from __future__ import annotations

from penstock.api import (
    about,
    actions,
    events,
    fleet,
    health,
    jobs,
    keys,
    limits,
    metrics,
    openai,
    pipeline_jobs,
    pipelines,
    pipes,
    policy,
    results,
    runs,
    schedules,
    submit,
    upkeep,
)
from penstock.api.operation import Operation

OPERATIONS: tuple[Operation, ...] = (
    *submit.OPERATIONS,
    *jobs.OPERATIONS,
    *results.OPERATIONS,
    *actions.OPERATIONS,
    *events.OPERATIONS,
    *schedules.OPERATIONS,
    *pipelines.OPERATIONS,
    *runs.OPERATIONS,
    *pipeline_jobs.OPERATIONS,
    *limits.OPERATIONS,
    *fleet.OPERATIONS,
    *pipes.OPERATIONS,
    *policy.OPERATIONS,
    *keys.OPERATIONS,
    *upkeep.OPERATIONS,
    *health.OPERATIONS,
    *metrics.OPERATIONS,
    *about.OPERATIONS,
    *openai.OPERATIONS,
)
