"""Which runtime works on this machine: found out by running a container with each."""

from __future__ import annotations

import asyncio
import logging
import secrets
from pathlib import Path

from penstock.workloads.container.engine import EngineError, EngineUnavailable, Plan
from penstock.workloads.container.engines.oci.bundle import INIT, MOUNT_POINTS, Process
from penstock.workloads.container.engines.oci.containers import Containers
from penstock.workloads.container.engines.oci.machine import Machine
from penstock.workloads.container.engines.oci.runtimes import Runtime

_TRIAL = "penstock-trial-"
_LONGEST = 20.0
_ABANDONED = 60.0
"""Seconds after which nobody can still be making a container."""

log = logging.getLogger(__name__)


async def choose_runtime(containers: Containers, machine: Machine, root: Path) -> None:
    """Leaves the first that works in front. Raises EngineUnavailable."""
    if machine.init is None:
        return
    problems = []
    while machine.candidates:
        runtime = machine.runtime
        problem = await _try(containers, runtime, root / "trial")
        if not problem:
            return
        problems.append(f"{runtime.name}: {problem}")
        machine.candidates.remove(runtime)
    raise EngineUnavailable(f"No runtime works here. {'; '.join(problems)}")


async def sweep(containers: Containers) -> None:
    """What a worker left that died while it made or removed a container, or tried a runtime. What
    can't be removed now is there for the next sweep."""
    try:
        containers.gone.clear()
    except OSError as error:
        log.warning("the folder of a container that was removed is still there: %s", error)
    for folder in containers.folders():
        unfinished = folder.note() is None or folder.name.startswith(_TRIAL)
        if unfinished and folder.age() > _ABANDONED:
            try:
                await containers.remove(folder.name)
            except EngineError as error:
                log.warning("what is left of container %s is still there: %s", folder.name, error)


async def _try(containers: Containers, runtime: Runtime, rootfs: Path) -> str:
    """Run the init alone, in an empty root file system; says what went wrong."""
    for point in MOUNT_POINTS:
        (rootfs / point).mkdir(parents=True, exist_ok=True)
    name = f"{_TRIAL}{secrets.token_hex(8)}"
    plan = Plan(name=name, image="", memory=32 << 20, cpus=1, pids=64, tmp=1 << 20)
    try:
        async with asyncio.timeout(_LONGEST):
            containers.make(runtime, plan, Process((INIT, "--version"), {}, "/"), rootfs)
            await containers.start(name)
            ended = await containers.wait(name)
    except (EngineError, TimeoutError) as error:
        return str(error) or "it does not end."
    finally:
        await containers.remove(name)
    return "" if ended.code == 0 else ended.error or f"a trial ended with {ended.code}"
