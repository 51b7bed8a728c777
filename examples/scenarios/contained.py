"""Containers: a command with limits and walls around it, and an honest word about its end."""

from __future__ import annotations

from pathlib import Path

import penstock
from penstock.testing.images import IMAGE, EngineMissing, busybox_tree
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.engine import EngineError
from penstock.workloads.container.engines.discovery import candidates, open_engine
from penstock.workloads.container.engines.oci.images import ImageStore
from scenarios.scenario import Scenario, Stage, Story, expect

_FOUND: dict[str, str] = {
    "lacks": "no container engine here: install Docker or Podman, or crun as root"
}


async def find_engine(data: Path) -> str:
    """The engine for this demo's container jobs, with an image; '' if there is none, and then
    `lacking` says why."""
    folder = data / "containers"
    for one in await candidates(folder / "oci"):
        if one.works and await _has_image(one.name, folder):
            _FOUND["lacks"] = ""
            return one.name.partition("/")[0]
    return ""


async def _has_image(name: str, folder: Path) -> bool:
    if name.startswith("oci"):
        try:
            tree = busybox_tree(folder / "tree")
        except EngineMissing as missing:
            _FOUND["lacks"] = str(missing)
            return False
        store = ImageStore(folder / "oci" / "images")
        store.import_tree(tree, IMAGE, cmd=("/bin/sh",), env=("PATH=/bin",))
        return True
    engine = await open_engine(WorkerConfig(engine=name, jobs_dir=folder))
    try:
        await engine.image(IMAGE)
    except EngineError:
        _FOUND["lacks"] = f"{name} has no image {IMAGE}: '{name} pull {IMAGE}' brings it"
        return False
    finally:
        await engine.close()
    return True


def lacking() -> str:
    return _FOUND["lacks"]


async def word(stage: Stage) -> Story:
    shout = penstock.container(
        IMAGE,
        *("sh", "-c", "tr a-z A-Z < /input/said.txt | tee /output/shouted.txt"),
        inputs={"said.txt": "hello from a container\n"},
        outputs=True,
    )
    job = await shout.asubmit(stage.ps)
    result = await job.aresult(30)
    expect(result["stdout"] == "HELLO FROM A CONTAINER\n", f"it said {result['stdout']!r}")
    (left,) = await job.aartifacts()
    expect(left.name == "shouted.txt", "it left no file")
    return Story(job, f"exit {result['exit_code']}, no network, read-only root; one artifact")


async def greedy(stage: Stage) -> Story:
    bomb = "x=$(head -c 300000000 /dev/zero | tr '\\0' x); echo ${#x}"
    job = await penstock.container(IMAGE, "sh", "-c", bomb, memory_mb=32).asubmit(stage.ps)
    end = await job.await_end(30)
    assert end.result is not None
    expect(end.result.error_code == "OOM_KILLED", f"it says {end.result.error_code}")
    return Story(job, "OOM_KILLED, not just exit code 137")


async def endless(stage: Stage) -> Story:
    job = await penstock.container(IMAGE, "sleep", "600", timeout=0.3).asubmit(stage.ps)
    await job.await_end(30)
    return Story(job, "TERM, grace, KILL: the container is gone")


SCENARIOS = [
    Scenario("a container", "job.container.run", "SUCCEEDED", word, lacking),
    Scenario("a container, out of memory", "job.container.run", "FAILED", greedy, lacking),
    Scenario("a container, out of time", "job.container.run", "TIMEOUT", endless, lacking),
]
