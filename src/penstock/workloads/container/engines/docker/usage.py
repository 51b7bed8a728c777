"""How much a container uses, read from the kernel where the engine runs on this machine.

The engine deletes a container's cgroup as soon as the container has ended, and reports nothing
afterwards. So the cgroup is read at the moment its first process ends, which the kernel reports
sooner than the engine does. Of a container on another machine the engine is asked while it runs.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from msgspec import Struct

from penstock.workloads.container.engine import EngineError
from penstock.workloads.container.engines.cgroups import Cgroups
from penstock.workloads.container.engines.docker.answers import ContainerAnswer, Stats
from penstock.workloads.container.engines.docker.api import Api, Refused, container
from penstock.workloads.container.engines.programs import process_end
from penstock.workloads.container.job import Usage

SAMPLE_EVERY = 0.2
"""Seconds; only where the kernel (before 5.19, cgroups of version 2) keeps no peak."""
ASK_EVERY = 1.0
"""Seconds between two questions to an engine on another machine."""


class Meter(Struct):
    """The most that was seen of one container."""

    cgroup: str = ""
    """Its path below each controller; empty for a container on another machine."""
    used: Usage = Usage()
    oom: bool = False
    ended: bool = False

    def add(self, now: Usage) -> None:
        peak = max(now.peak_memory_bytes or 0, self.used.peak_memory_bytes or 0)
        seconds = max(now.cpu_seconds or 0, self.used.cpu_seconds or 0)
        self.used = Usage(peak or None, seconds or None)

    def read(self, cgroups: Cgroups) -> None:
        """Changes nothing once the cgroup is gone."""
        self.add(cgroups.usage(self.cgroup))
        self.oom = self.oom or cgroups.oom_kills(self.cgroup) > 0

    async def follow(self, cgroups: Cgroups, pid: int) -> None:
        """Read it until its first process ends, and for the last time then."""
        try:
            process = os.pidfd_open(pid)
        except OSError:
            return self.read(cgroups)
        try:
            self.read(cgroups)
            pause = None if cgroups.keeps_peak(self.cgroup) else SAMPLE_EVERY
            while not await process_end(process, pause):
                self.read(cgroups)
        finally:
            self.read(cgroups)
            os.close(process)


def cgroup_of(pid: int, container_id: str) -> str:
    """Empty where that process is not on this machine, or not that container's."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return ""
    paths = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in lines}
    path = paths.get("memory", paths.get("", ""))
    return path.lstrip("/") if container_id in path else ""


class Meters:
    """Meters by the names of containers. Nothing of a job waits for them."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._meters: dict[str, Meter] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, name: str, known: ContainerAnswer | None = None) -> None:
        """It has just started, or is found running."""
        if name not in self._tasks:
            self._meters[name] = Meter()
            self._tasks[name] = asyncio.create_task(self._follow(name, known))

    async def usage(self, name: str) -> Usage:
        meter = self._meters.get(name) or Meter()
        if meter.cgroup:
            meter.read(Cgroups.here())
        elif not meter.ended:
            await self._ask(name, meter)
        return meter.used

    def saw_a_memory_kill(self, name: str) -> bool:
        return name in self._meters and self._meters[name].oom

    def over(self, name: str) -> None:
        """It has ended: there is nothing more to be asked."""
        if name in self._meters:
            self._meters[name].ended = True

    async def end(self, name: str) -> None:
        """It is removed."""
        self._meters.pop(name, None)
        if (task := self._tasks.pop(name, None)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        for name in list(self._tasks):
            await self.end(name)

    async def _follow(self, name: str, found: ContainerAnswer | None) -> None:
        meter = self._meters[name]
        try:
            if found is None:
                found = await self._api.ask(ContainerAnswer, "GET", container(name, "/json"))
            meter.cgroup = cgroup_of(found.state.pid, found.id) if found.state.pid else ""
            if meter.cgroup:
                await meter.follow(Cgroups.here(), found.state.pid)
            while not (meter.cgroup or meter.ended):
                await self._ask(name, meter)
                await asyncio.sleep(ASK_EVERY)
        except EngineError:
            return

    async def _ask(self, name: str, meter: Meter) -> None:
        """The engine tells what a container uses as long as it runs."""
        try:
            query = {"stream": 0, "one-shot": 1}
            answer = await self._api.tell("GET", container(name, "/stats"), query)
        except Refused:
            return
        if answer:  # Podman has nothing at all to say of one that has ended
            meter.add(self._api.decoded(Stats, answer).value())
