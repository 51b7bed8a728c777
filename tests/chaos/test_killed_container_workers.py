"""200 random ends of containers: timeouts, cancels, and kill -9 of the worker. Nothing is left,
no job is lost, none is run twice."""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import needs_runtime
from tests.containers.leftovers import cgroups_of, leftovers
from tests.containers.serving import Served

from penstock.testing.engines import IMAGE
from penstock.workloads.container.engines.docker.engine import DockerEngine
from penstock.workloads.container.engines.oci.images import ImageStore

KILLS = 200
BATCH = 20
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


@pytest.mark.timeout(300)
def test_200_random_ends_leave_nothing_and_run_nothing_twice(
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
    ran = Counter(
        word
        for line in log.read_text().splitlines()
        for word in line.split()
        if " run " in f" {line} " and word.startswith("penstock-")
    )
    assert ran, "the wrapper was never called"
    assert max(ran.values()) == 1, (seed, ran.most_common(3))
    assert cgroups_of(set(ran)) == []
    assert served.ask("GET", "/health")[1]["running_jobs"] == 0
    assert sum(codes.values()) == KILLS


ALLOWED = {
    "timeout": {"TIMEOUT", "WORKER_RESTARTED"},
    "cancel": {"CANCELLED", "WORKER_RESTARTED"},
    "kill": {"finished", "WORKER_RESTARTED"},
}
"""How a job may end that is to be ended so; a worker's death may come before."""


def submit(served: Served, name: str, wanted: str, chance: random.Random, mark: str) -> None:
    """One that runs too long, one that runs until it is cancelled, one that ends by itself."""
    seconds = {"timeout": 0.05 + 0.3 * chance.random(), "cancel": 60, "kill": 60}[wanted]
    stubborn = chance.choice(["", "trap '' TERM; "])
    pause = f"sleep 0.{chance.randrange(10, 40)}" if wanted == "kill" else "sleep 60"
    script = f"{stubborn}echo {mark}; {pause}; : {mark}"
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
