"""`runtime.limits`: what a job asks for, between what makes sense and what the worker grants."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.job import Limits
from penstock.workloads.container.protocol.fields import forbid, number_of, object_of, whole_of
from penstock.workloads.container.protocol.javascript import as_string

FIELD = "runtime.limits"
LEAST: dict[str, float] = {
    "memory_mb": 6,  # Engines refuse less.
    "max_runtime_seconds": 0.001,
    "cpus": 0.01,
    "pids": 16,  # A runtime starts a handful of threads in the container before the job's own.
    "max_output_bytes": 1,
    "tmp_mb": 1,
    "max_artifact_bytes": 1,
    "pull_seconds": 0.001,
}
"""The least that each can be; nothing is rounded up to it."""
_WHOLE = frozenset({"pids", "max_output_bytes", "max_artifact_bytes"})


def read_limits(value: Any, config: WorkerConfig) -> Limits:
    """The worker's defaults, with what the job names in their place."""
    given = object_of(FIELD, value)
    asked = {
        name: _read(name, given[name], least, getattr(config.most, name))
        for name, least in LEAST.items()
        if given.get(name) is not None
    }
    limits = msgspec.structs.replace(config.defaults, **asked) if asked else config.defaults
    _check_total("memory_mb", limits.memory_mb, config.memory_mb)
    _check_total("cpus", limits.cpus, config.cpus)
    return limits


def _read(name: str, value: Any, least: float, most: float) -> float:
    field = f"{FIELD}.{name}"
    if name in _WHOLE:
        return whole_of(field, value, int(least), int(most))
    return number_of(field, value, least, most)


def _check_total(name: str, value: float, total: float) -> None:
    """A job that needs more than all jobs may use together would wait for ever."""
    if total and value > total:
        forbid(
            f"{FIELD}.{name}",
            f"is {as_string(value)}; this worker has {as_string(total)} for all jobs together",
        )
