"""Submissions to a container worker, right and wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.workloads.container.config import BuildRules, WorkerConfig
from penstock.workloads.container.engine import EngineFacts
from penstock.workloads.container.job import Rejected
from penstock.workloads.container.protocol.submission import Accepted, read_job

CONFIG = WorkerConfig()
BUILDING = WorkerConfig(build=BuildRules(enabled=True, bases=("scratch", "alpine:*")))
FACTS = EngineFacts(name="docker", version="1", can_build=True, networks=True)
"""Of an engine that has no GPUs."""
DIGEST = "sha256:" + "0123456789abcdef" * 4


def job(**changes: Any) -> dict[str, Any]:
    """A job that is accepted, with fields of the top changed."""
    made = {
        "protocol_version": 1,
        "job_id": "job-1",
        "task": {"type": "t", "payload": {"a": 1}},
        "runtime": {"mode": "image", "image": "alpine:latest"},
    } | changes
    return {key: value for key, value in made.items() if value is not ...}


def runtime(**changes: Any) -> dict[str, Any]:
    """A job with fields of `runtime` changed."""
    made = {"mode": "image", "image": "alpine:latest"} | changes
    return job(runtime={key: value for key, value in made.items() if value is not ...})


def building(dockerfile: Any, **more: Any) -> dict[str, Any]:
    return runtime(mode="build", image=..., build={"dockerfile": dockerfile} | more)


def accept(value: Any, config: WorkerConfig = CONFIG, facts: EngineFacts | None = None) -> Accepted:
    return read_job(json.dumps(value).encode(), config, facts)


def refuse(value: Any, config: WorkerConfig = CONFIG, facts: EngineFacts | None = None) -> Rejected:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    with pytest.raises(Rejected) as caught:
        read_job(body, config, facts)
    assert caught.value.error.message
    return caught.value


def code_and_field(
    value: Any, config: WorkerConfig = CONFIG, facts: EngineFacts | None = None
) -> tuple[str, str]:
    error = refuse(value, config, facts).error
    return error.code, error.field
