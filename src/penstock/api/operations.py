"""All operations of the engine's HTTP API, in one table."""

from __future__ import annotations

from typing import Any

from penstock.api import (
    about,
    dashboard,
    jobs,
    metrics,
    ollama,
    openai,
    pipelines,
    results,
    schedules,
    sessions,
    stream,
    submit,
)
from penstock.api.openai.messages import create_message
from penstock.api.operation import Operation, resource_of, routes_of
from penstock.api.problems import ProblemReply
from penstock.api.table import ROWS, derived

_OWN: tuple[Operation, ...] = (
    *routes_of(submit, jobs, results, stream, schedules, pipelines),
    *routes_of(sessions, metrics, about, dashboard),
    *openai.OPERATIONS,
    *(one.operation() for one in ollama.ENDPOINTS),
    *routes_of(ollama, answer=dict[str, Any], **ollama.ERRORS),
)
"""Those with a handler of their own."""

_BY_NAME = {one.id: one for one in _OWN}
OPERATIONS: tuple[Operation, ...] = (
    *(_BY_NAME[name] if name in _BY_NAME else derived(name) for name in ROWS),
    *(one for one in _OWN if one.id not in ROWS),
)


_OURS = {resource_of(one.path) for one in OPERATIONS if one.problem is None}
_OPENAI = {resource_of(one.path) for one in openai.OPERATIONS} - _OURS


def shape_of(path: str) -> ProblemReply | None:
    """Error format at a path without an operation, if it belongs to a foreign API."""
    if path.startswith("/api/"):
        return ollama.problem_reply
    if path == create_message.path or path.startswith(f"{create_message.path}/"):
        return create_message.problem
    resource = resource_of(path)
    below = path == "/v1" or path.startswith("/v1/")
    is_openai = resource in _OPENAI or (below and resource not in _OURS)
    return openai.problem_reply if is_openai else None


def alias_of(path: str) -> str | None:
    """Path for clients whose base URL lacks `/v1`, and for paths of other model servers."""
    if path in _ALIASES:
        return _ALIASES[path]
    if resource_of(path) not in _OPENAI:
        return None
    meant = path.rstrip("/")
    if not meant.startswith("/v1/"):
        meant = f"/v1{meant}"
    return meant if meant != path else None


_ALIASES = {"/health": "/readyz", "/version": "/api/version"}
