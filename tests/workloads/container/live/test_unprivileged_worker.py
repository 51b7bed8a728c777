"""A worker that is not root, and what the users of its containers leave in /output."""

from __future__ import annotations

import asyncio
import concurrent.futures.thread  # noqa: F401 - what the child could not import any more
import encodings.idna  # noqa: F401
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from tests.support.fake_containers import FakeEngine, Script

from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.ports.clock import SystemClock
from penstock.ports.executor import Environment, Task
from penstock.testing.context import RecordingContext
from penstock.testing.images import IMAGE
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.engine import ContainerEngine
from penstock.workloads.container.engines.docker.engine import DockerEngine
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


@contextmanager
def as_worker(*groups: int, work: Callable[[], Coroutine[Any, Any, bytes]]) -> Iterator[list[Any]]:
    """A process of the worker's user, and afterwards what it answered."""
    told, answer = os.pipe(), list[Any]()
    child = os.fork()
    if not child:
        try:
            os.setgroups(groups)
            os.setgid(WORKER)
            os.setuid(WORKER)
            said = asyncio.run(work())
        except BaseException as error:
            said = json.dumps({"raised": f"{error!r} {error.__cause__!r}"}).encode()
        os.write(told[1], said)
        os._exit(0)
    os.close(told[1])
    yield answer
    with open(told[0], "rb") as file:
        answer.append(json.loads(file.read()))
    os.waitpid(child, 0)


def result_of(folder: Path, leave: Callable[[Path], None]) -> dict[str, Any]:
    """Of a job in whose output folder `leave`, as root, leaves something while it runs."""
    runs, goes_on = os.pipe(), os.pipe()
    engine = FakeEngine(SystemClock(), {"tool:1": Script(seconds=0.01)})

    def heard(method: str) -> None:
        if method == "start":
            os.write(runs[1], b"r")
            os.read(goes_on[0], 1)

    engine.heard = heard
    with as_worker(work=lambda: executed(folder, engine, "tool:1")) as answer:
        assert os.read(runs[0], 1) == b"r"
        (output,) = folder.glob("jobs/*/output")
        leave(output)
        os.write(goes_on[1], b"g")
    for end in (*runs, *goes_on):
        os.close(end)
    return dict(answer[0])


class EngineState:
    async def read(self, name: str) -> bytes:
        return b"engine-id"


async def executed(folder: Path, engine: ContainerEngine, image: str, *cmd: str) -> bytes:
    executor = ContainerExecutor(WorkerConfig(jobs_dir=folder), engine)
    none, state = cast("Any", None), cast("Any", EngineState())
    environment = Environment("w", SystemClock(), MemoryBlobs(), none, state)
    context = RecordingContext(environment=environment)
    job = json.dumps({"runtime": {"image": image, "cmd": cmd}, "outputs": True}).encode()
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


GROUP = 4242


def in_docker(folder: Path, socket: Path, *groups: int) -> dict[str, Any]:
    """A job on a Docker engine whose socket is for one group."""

    async def work() -> bytes:
        script = "id -u; mkdir -m 755 /output/plots; echo made > /output/plots/a.txt"
        return await executed(folder, DockerEngine(socket), IMAGE, "sh", "-c", script)

    before = socket.stat()
    above = [(one, one.stat().st_mode) for one in (socket.parent, *socket.parent.parents)]
    os.chown(socket, 0, GROUP)
    socket.chmod(0o660)
    for one, mode in above:
        one.chmod(mode | 0o011)
    try:
        with as_worker(*groups, work=work) as answer:
            pass
    finally:
        os.chown(socket, before.st_uid, before.st_gid)
        socket.chmod(before.st_mode)
        for one, mode in above:
            one.chmod(mode)
    return dict(answer[0])


def test_the_group_docker_is_enough_to_run_jobs(folder: Path, docker_socket: Path) -> None:
    result = in_docker(folder, docker_socket, GROUP)
    assert (result.get("status"), result.get("stdout")) == ("SUCCEEDED", f"{JOB}\n"), result
    assert result["artifacts"] == ["plots/a.txt"]


def test_without_the_group_the_worker_says_that_it_can_not_reach_the_engine(
    folder: Path, docker_socket: Path
) -> None:
    assert "no container can be run here" in in_docker(folder, docker_socket)["raised"]
