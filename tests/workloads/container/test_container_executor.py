"""Container jobs of a control plane, on a fake engine: what the executor makes of a job."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.fake_containers import FakeEngine, Script

from penstock.app.containers import container
from penstock.core.job import JobRequest
from penstock.lifecycles.canonical import JobState
from penstock.ports.clock import SystemClock
from penstock.ports.executor import Outcome, Task
from penstock.testing.aio import run_async
from penstock.testing.context import RecordingContext
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.engine import ContainerSpec
from penstock.workloads.container.executor import ContainerExecutor
from penstock.workloads.container.files.artifacts import ArtifactCollector
from penstock.workloads.container.job import Limits
from penstock.workloads.container.protocol.body import read_input

SCRIPTS = {
    "echo:1": Script(echoes=True),
    "long:1": Script(seconds=0.3),
    "leaves:1": Script(leaves={"f": b"12"}),
    "fails:1": Script(leaves={"f": b"12"}, exit_code=3),
}


@asynccontextmanager
async def executing(folder: Path, **settings: Any) -> AsyncIterator[ContainerExecutor]:
    engine = FakeEngine(SystemClock(), SCRIPTS)
    config = WorkerConfig(jobs_dir=folder, stop_grace=0.1, **settings)
    executor = ContainerExecutor(config, engine)
    try:
        yield executor
    finally:
        await executor.close()
    assert engine.leftovers() == []


async def run(executor: ContainerExecutor, payload: bytes) -> Outcome:
    context = RecordingContext()
    executor.check("job.container.run", payload)
    return await executor.run(Task(context.request, 1, payload, 9e9), context)


def result_of(outcome: Outcome) -> dict[str, Any]:
    assert outcome.payload is not None
    return dict(json.loads(outcome.payload))


@run_async
async def test_an_integer_beyond_2_to_the_53_reaches_the_container_unchanged(
    tmp_path: Path,
) -> None:
    payload = {"id": 1790847362514948097, "whole": 1.0}
    job = container("echo:1", payload=payload, env={}).job
    async with executing(tmp_path) as executor:
        outcome = await run(executor, msgspec.json.encode(job))
    assert '"payload":{"id":1790847362514948097,"whole":1.0}' in result_of(outcome)["stdout"]


@run_async
async def test_a_traced_job_hands_its_trace_on_to_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ContainerSpec] = []
    create = FakeEngine.create

    async def note(engine: FakeEngine, spec: ContainerSpec) -> None:
        made.append(spec)
        await create(engine, spec)

    monkeypatch.setattr(FakeEngine, "create", note)
    payload = msgspec.json.encode(container("echo:1", env={"A": "1"}).job)
    caller = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    request = JobRequest(job_id="traced", topic="job.container.run", traceparent=caller)
    context = RecordingContext(request)
    async with executing(tmp_path) as executor:
        await executor.run(Task(request, 1, payload, 9e9), context)
        await run(executor, payload)
    traced, untraced = (dict(spec.env) for spec in made)
    assert traced == {"A": "1", "TRACEPARENT": context.traceparent}
    assert untraced == {"A": "1"}


@run_async
async def test_a_large_job_is_never_read_in_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = []

    def read(payload: bytes) -> Any:
        readers.append(threading.current_thread())
        return read_input(payload)

    monkeypatch.setattr("penstock.workloads.container.executor.read_input", read)
    job = container("echo:1", payload=["x" * 100] * 5000, stdin="none").job
    async with executing(tmp_path) as executor:
        context, payload = RecordingContext(), msgspec.json.encode(job)
        await executor.run(Task(context.request, 1, payload, 9e9), context)
    assert readers
    assert threading.main_thread() not in readers


@run_async
async def test_a_time_limit_that_is_null_is_that_of_the_job(tmp_path: Path) -> None:
    job = b'{"runtime":{"image":"long:1","limits":{"max_runtime_seconds":null}}}'
    async with executing(tmp_path, defaults=Limits(max_runtime_seconds=0.05)) as executor:
        outcome = await run(executor, job)
    assert outcome.status is JobState.SUCCEEDED, outcome


@run_async
async def test_artifacts_that_can_t_be_stored_make_a_success_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(collector: ArtifactCollector, output: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(ArtifactCollector, "add_folder", refuse)
    for image, code, exit_code in (
        ("leaves:1", "RUNTIME_ERROR", 0),
        ("fails:1", "NON_ZERO_EXIT", 3),
    ):
        job = msgspec.json.encode({"runtime": {"image": image}, "outputs": True})
        async with executing(tmp_path) as executor:
            outcome = await run(executor, job)
        result = result_of(outcome)
        assert (outcome.status, outcome.error_code) == (JobState.FAILED, code)
        assert result["exit_code"] == exit_code
        assert result["skipped"] == ["/output: could not be collected: no space left"]
