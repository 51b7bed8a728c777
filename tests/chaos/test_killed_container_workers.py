"""Random ends of containers, alone and under an engine: timeouts, cancels, kill -9 of the worker.
Nothing is left, no job is lost, none is run twice.

`PENSTOCK_CONTAINER_KILLS` says how many ends there are.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import needs_runtime
from tests.containers.leftovers import cgroups_of, leftovers
from tests.containers.serving import Served
from tests.support.waiting import eventually

import penstock
from penstock.testing.engines import IMAGE
from penstock.workloads.container.engines.docker.engine import DockerEngine
from penstock.workloads.container.engines.oci.images import ImageStore

KILLS = int(os.environ.get("PENSTOCK_CONTAINER_KILLS", "60"))
BATCH = 20
COMMAND = Path(sys.executable).with_name("penstock")
_WRAPPER = """#!/bin/sh
echo "$@" >> {log}
exec {program} "$@"
"""


@pytest.fixture
def counted(tmp_path: Path, busybox: Path) -> Iterator[tuple[Served, Path]]:
    """A worker on runc, and a file with a line for each time that runc was called."""
    runc = needs_runtime("runc")
    folder, log = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    (folder / "runc").write_text(_WRAPPER.format(log=log, program=runc))
    (folder / "runc").chmod(0o755)
    served = Served(tmp_path, "oci", runtime="runc", max_concurrent_jobs=4, stop_grace=0.1, cpus=64)
    served.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    store = ImageStore(served.jobs_dir / "oci" / "images")
    store.import_tree(busybox, IMAGE, cmd=("/bin/sh",), env=("PATH=/bin",))
    yield served.start(), log
    served.stop()


@pytest.mark.timeout(120 + 3 * KILLS)
def test_random_ends_leave_nothing_and_run_nothing_twice(
    counted: tuple[Served, Path],
) -> None:
    served, log = counted
    seed = random.randrange(1 << 32)
    chance, mark = random.Random(seed), f"9{seed:010}"
    codes: Counter[str] = Counter()
    for batch in range(KILLS // BATCH):
        names = [f"job-{batch}-{n}" for n in range(BATCH)]
        wanted = {name: chance.choice(["timeout", "cancel", "kill"]) for name in names}
        for name in names:
            submit(served, name, wanted[name], chance, mark)
        disturb(served, wanted, chance)
        for name in names:
            record = served.ended(name)
            code = (record["error"] or {}).get("code", "finished")
            codes[code] += 1
            assert code in ALLOWED[wanted[name]], (seed, name, wanted[name], record)
    settle(lambda: leftovers(mark, served.jobs_dir))
    check_runs(log, seed)
    assert served.ask("GET", "/health")[1]["running_jobs"] == 0
    assert sum(codes.values()) == KILLS // BATCH * BATCH


def check_runs(log: Path, seed: int) -> None:
    """No container was started twice, and none has left a cgroup."""
    ran = Counter(
        word
        for line in log.read_text().splitlines()
        for word in line.split()
        if " run " in f" {line} " and word.startswith("penstock-")
    )
    assert ran, "the wrapper was never called"
    assert max(ran.values()) == 1, (seed, ran.most_common(3))
    assert cgroups_of(set(ran)) == []


ALLOWED = {
    "timeout": {"TIMEOUT", "WORKER_RESTARTED"},
    "cancel": {"CANCELLED", "WORKER_RESTARTED"},
    "kill": {"finished", "WORKER_RESTARTED"},
}
"""How a job may end that is to be ended so; a worker's death may come before."""


def course(wanted: str, chance: random.Random, mark: str) -> tuple[float, str]:
    """One that runs too long, one that runs until it is cancelled, one that ends by itself."""
    seconds = {"timeout": 0.05 + 0.3 * chance.random(), "cancel": 60, "kill": 60}[wanted]
    stubborn = chance.choice(["", "trap '' TERM; "])
    pause = f"sleep 0.{chance.randrange(10, 40)}" if wanted == "kill" else "sleep 60"
    return seconds, f"{stubborn}echo {mark}; {pause}; : {mark}"


def submit(served: Served, name: str, wanted: str, chance: random.Random, mark: str) -> None:
    seconds, script = course(wanted, chance, mark)
    status, answer = served.submit(
        name, "sh", "-c", script, limits={"max_runtime_seconds": seconds, "cpus": 0.5}
    )
    assert status == 202, answer


def disturb(served: Served, wanted: dict[str, str], chance: random.Random) -> None:
    """Cancel those that want it, one after another, and kill the worker in the middle of it."""
    due = [name for name, how in wanted.items() if how == "cancel"]
    moment = chance.randrange(len(due) + 1)
    for n, name in enumerate(due):
        if n == moment:
            revive(served)
        time.sleep(chance.random() * 0.05)
        assert served.ask("DELETE", f"/jobs/{name}")[0] in (200, 202)
    if moment == len(due):
        revive(served)


def revive(served: Served) -> None:
    served.kill()
    served.start()


def settle(look: Any) -> None:
    """What was told as ended is cleared away soon after."""
    until = time.monotonic() + 20
    while (found := look()) and time.monotonic() < until:
        time.sleep(0.05)
    assert found == []


# -- under an engine ----------------------------------------------------------------------


class Plane:
    """An engine, and a container worker of it that can be killed and started again."""

    def __init__(self, folder: Path, environ: dict[str, str]) -> None:
        self.data = folder / "data"
        self._folder, self._environ = (
            folder,
            {**os.environ, **environ, "PENSTOCK_LOST_GRACE": "0.3"},
        )
        self._engine = self._run("up", "--no-http")
        self._worker = self._join()
        client = eventually(self._connected)
        assert client is not None
        self.client = client

    @property
    def jobs_dir(self) -> Path:
        return self.data / "containers"

    def _run(self, *words: str) -> subprocess.Popen[bytes]:
        with (self._folder / "plane.log").open("ab") as log:
            return subprocess.Popen(
                [COMMAND, "--data", self.data, *words], stdout=log, stderr=log, env=self._environ
            )

    def _join(self) -> subprocess.Popen[bytes]:
        return self._run("worker", "--containers", "oci", "--id", "w1", "--concurrency", "4")

    def _connected(self) -> penstock.Client | None:
        try:
            client = penstock.connect(data=self.data).__enter__()
        except penstock.PenstockError:
            return None
        return client

    def kill_worker(self) -> None:
        self._worker.kill()
        self._worker.wait()
        self._worker = self._join()

    def stop(self) -> None:
        for process in (self._worker, self._engine):
            process.terminate()
            process.wait(40)


@pytest.fixture
def plane(tmp_path: Path, busybox: Path) -> Iterator[tuple[Plane, Path]]:
    runc = needs_runtime("runc")
    folder, log = tmp_path / "bin", tmp_path / "calls"
    folder.mkdir()
    (folder / "runc").write_text(_WRAPPER.format(log=log, program=runc))
    (folder / "runc").chmod(0o755)
    store = ImageStore(tmp_path / "data" / "containers" / "oci" / "images")
    store.import_tree(busybox, IMAGE, cmd=("/bin/sh",), env=("PATH=/bin",))
    config = tmp_path / "worker.yaml"
    config.write_text("{runtime: runc, stop_grace: 0.1, cpus: 64, memory_mb: 100000}")
    plane = Plane(
        tmp_path,
        {
            "PATH": f"{folder}:{os.environ['PATH']}",
            "PENSTOCK_CONTAINER_CONFIG": str(config),
        },
    )
    yield plane, log
    plane.stop()


@pytest.mark.timeout(180 + 4 * KILLS)
def test_random_ends_under_an_engine_leave_nothing_and_run_nothing_twice(
    plane: tuple[Plane, Path],
) -> None:
    site, log = plane
    seed = random.randrange(1 << 32)
    chance, mark = random.Random(seed), f"9{seed:010}"
    eventually(lambda: site.client.workers())
    attempts: Counter[int] = Counter()
    for _ in range(KILLS // BATCH):
        wanted = [chance.choice(["timeout", "cancel", "kill"]) for _ in range(BATCH)]
        handles = [give(site.client, how, chance, mark) for how in wanted]
        time.sleep(chance.random() * 0.5)
        site.kill_worker()
        for handle, how in zip(handles, wanted, strict=True):
            if how == "cancel":
                time.sleep(chance.random() * 0.05)
                handle.cancel(timeout=0)
        for handle, how in zip(handles, wanted, strict=True):
            job = handle.wait(60)
            assert job.result is not None
            attempts[job.attempt] += 1
            code = job.result.error_code or "finished"
            assert code in ALLOWED[how], (seed, job.job_id, how, job)
    settle(lambda: leftovers(mark, site.jobs_dir))
    check_runs(log, seed)
    assert sum(count for number, count in attempts.items() if number > 1), "none was reattached to"


def give(
    client: penstock.Client, wanted: str, chance: random.Random, mark: str
) -> penstock.JobHandle[Any]:
    seconds, script = course(wanted, chance, mark)
    limits = {"max_runtime_seconds": seconds, "cpus": 0.5}
    runtime = {"image": IMAGE, "cmd": ["sh", "-c", script], "limits": limits}
    return client.submit("job.container.run", {"runtime": runtime})


@pytest.mark.timeout(240)
@pytest.mark.parametrize("engine", ["docker", "podman"])
def test_an_engine_with_a_daemon_is_left_clean_as_well(
    engine: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    socket: Path = request.getfixturevalue(f"{engine}_socket")
    served = Served(
        tmp_path, f"unix://{socket}", max_concurrent_jobs=4, stop_grace=0.1, cpus=64
    ).start()
    seed = random.randrange(1 << 32)
    chance, mark = random.Random(seed), f"9{seed:010}"
    try:
        wanted = {f"job-{n}": chance.choice(["timeout", "cancel", "kill"]) for n in range(BATCH)}
        for name in wanted:
            submit(served, name, wanted[name], chance, mark)
        disturb(served, wanted, chance)
        for name in wanted:
            record = served.ended(name)
            code = (record["error"] or {}).get("code", "finished")
            assert code in ALLOWED[wanted[name]], (seed, name, wanted[name], record)
        settle(lambda: leftovers(mark, served.jobs_dir) + containers(socket))
    finally:
        served.stop()


def containers(socket: Path) -> list[str]:
    import asyncio

    from penstock.workloads.container.engine import OWNER_LABEL

    async def named() -> list[str]:
        engine = DockerEngine(socket)
        try:
            return [found.name for found in await engine.find({OWNER_LABEL: ""})]
        finally:
            await engine.close()

    return asyncio.run(named())
