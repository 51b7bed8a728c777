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
    ollama,
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
from penstock.api.openai.messages import MESSAGES
from penstock.api.operation import Operation
from penstock.api.problems import ProblemReply

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
    *ollama.OPERATIONS,
)


def shape_of(path: str) -> ProblemReply | None:
    """How errors at a path without an operation are written, if a foreign API has it."""
    if path.startswith("/api/"):
        return ollama.problem_reply
    if path == MESSAGES.path or path.startswith(f"{MESSAGES.path}/"):
        return MESSAGES.problem
    return openai.problem_reply if openai.is_openai_path(path) else None


def alias_of(path: str) -> str | None:
    """What clients mean whose base URL lacks `/v1`, and what other servers of models have."""
    if path in _ALIASES:
        return _ALIASES[path]
    if not openai.is_openai_path(path):
        return None
    meant = path.rstrip("/")
    if not meant.startswith("/v1/"):
        meant = f"/v1{meant}"
    return meant if meant != path else None


_ALIASES = {"/health": "/readyz", "/version": "/api/version"}
