"""A worker that is not root, and what the users of its containers leave in /output."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401 - what the child could not import any more
import encodings.idna  # noqa: F401
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.ports.clock import SystemClock
from penstock.ports.executor import Environment, Task
from penstock.testing.containers import FakeEngine, Script
from penstock.testing.context import RecordingContext
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.executor import ContainerExecutor

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two other users")

WORKER, JOB = 1000, 65534


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not below pytest's own folder, which is for one user only."""
    path = Path(tempfile.mkdtemp(prefix="pu-", dir="/var/tmp"))
    os.chown(path, WORKER, WORKER)
    yield path
    shutil.rmtree(path)


def result_of(folder: Path, leave: Callable[[Path], None]) -> dict[str, Any]:
    """Of a job in whose output folder `leave`, as root, leaves something while it runs."""
    runs, told = os.pipe(), os.pipe()
    goes_on = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.setgroups([])
            os.setgid(WORKER)
            os.setuid(WORKER)
            answer = asyncio.run(executed(folder, runs[1], goes_on[0]))
        except BaseException as error:
            answer = json.dumps({"raised": repr(error)}).encode()
        os.write(told[1], answer)
        os._exit(0)
    os.close(told[1])
    assert os.read(runs[0], 1) == b"r"
    (output,) = folder.glob("jobs/*/output")
    leave(output)
    os.write(goes_on[1], b"g")
    with open(told[0], "rb") as answer_:
        answer = answer_.read()
    os.waitpid(child, 0)
    for end in (*runs, *goes_on):
        os.close(end)
    return dict(json.loads(answer))


async def executed(folder: Path, runs: int, goes_on: int) -> bytes:
    engine = FakeEngine(SystemClock(), {"tool:1": Script(seconds=0.01)})

    def heard(method: str) -> None:
        if method == "start":
            os.write(runs, b"r")
            os.read(goes_on, 1)

    engine.heard = heard
    executor = ContainerExecutor(WorkerConfig(jobs_dir=folder), engine)
    none = cast("Any", None)
    environment = Environment("w", SystemClock(), MemoryBlobs(), none, none)
    context = RecordingContext(environment=environment)
    job = b'{"runtime":{"image":"tool:1"},"outputs":true}'
    try:
        outcome = await executor.run(Task(context.request, 1, job, 9e9), context)
    finally:
        await executor.close()
    result = json.loads(outcome.payload or b"{}")
    result["artifacts"] = [one.name for one in outcome.artifacts]
    return json.dumps({"status": outcome.status, "left": left_in(folder), **result}).encode()


def left_in(folder: Path) -> list[str]:
    return [str(path) for path in folder.glob("jobs/*")]


def belongs_to_the_job(*paths: Path) -> None:
    for path in paths:
        os.chown(path, JOB, JOB)


def test_a_folder_that_the_job_made_is_collected_and_removed(folder: Path) -> None:
    def leave(output: Path) -> None:
        (output / "plots").mkdir()
        (output / "plots" / "a.txt").write_text("hello")
        belongs_to_the_job(output / "plots", output / "plots" / "a.txt")

    result = result_of(folder, leave)
    assert result["status"] == "SUCCEEDED", result
    assert result["artifacts"] == ["plots/a.txt"]
    assert result["left"] == []


def test_a_folder_that_only_the_job_may_look_into_is_refused_and_the_result_kept(
    folder: Path,
) -> None:
    def leave(output: Path) -> None:
        hidden = output / "hidden"
        hidden.mkdir(mode=0o700)
        (hidden / "big").write_bytes(bytes(1 << 20))
        belongs_to_the_job(hidden, hidden / "big")

    result = result_of(folder, leave)
    assert (result["status"], result["error_code"]) == ("FAILED", "OUTPUT_LIMIT"), result
    assert "can't look into" in result["error_message"]


def test_a_result_outlives_a_folder_that_can_not_be_removed(folder: Path) -> None:
    def leave(output: Path) -> None:
        (output / "mine").mkdir()
        (output / "mine" / "a").touch()
        (output / "mine").chmod(0o755)
        belongs_to_the_job(output / "mine", output / "mine" / "a")

    result = result_of(folder, leave)
    assert result["status"] == "SUCCEEDED", result
    assert len(result["left"]) == 1
