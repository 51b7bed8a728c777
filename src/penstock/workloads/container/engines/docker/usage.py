"""How much a container uses, read from the kernel where the engine runs on this machine.

The engine deletes a container's cgroup as soon as the container has ended, and reports nothing
afterwards. So the files are opened while it runs, and read at the moment its first process ends,
which the kernel reports sooner than the engine does.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from itertools import chain, repeat
from pathlib import Path

from penstock.workloads.container.engine import EngineError
from penstock.workloads.container.engines.cgroups import Cgroups
from penstock.workloads.container.engines.docker.answers import ContainerAnswer, Stats
from penstock.workloads.container.engines.docker.api import Api, Refused, container
from penstock.workloads.container.engines.programs import process_end
from penstock.workloads.container.job import Usage

_PAUSES = (0.2, 0.5, 1.0, 2.0, 5.0)
"""Seconds between two questions to an engine elsewhere; the last again and again."""
SAMPLE_EVERY = 0.2
"""Seconds; only where the kernel (before 5.19, cgroups of version 2) keeps no peak."""


class Meter:
    """The open files of one container's cgroup."""

    def __init__(self, folders: Callable[[str], Path | None]) -> None:
        memory, cpu = folders("memory"), folders("cpuacct")
        self._files: dict[str, int] = {}
        self._best = Usage()
        self.oom = False
        for name, folder in (
            ("memory.max_usage_in_bytes", memory),
            ("memory.oom_control", memory),
            ("memory.peak", memory),
            ("memory.events", memory),
            ("cpuacct.usage", cpu),
            ("cpu.stat", cpu),
        ):
            if folder is not None:
                self._open(folder, name)
        self.samples = not {"memory.max_usage_in_bytes", "memory.peak"} & self._files.keys()
        if self.samples and memory is not None:
            self._open(memory, "memory.current")

    def _open(self, folder: Path, name: str) -> None:
        with suppress(OSError):
            self._files[name] = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)

    def read(self) -> Usage:
        """Now; or what was last read, when the cgroup is gone."""
        memory = self._number("memory.max_usage_in_bytes") or self._number("memory.peak")
        memory = max(memory, self._number("memory.current"), self._best.peak_memory_bytes or 0)
        seconds = self._number("cpuacct.usage") / 1e9
        seconds = seconds or self._fields("cpu.stat").get("usage_usec", 0) / 1e6
        seconds = max(seconds, self._best.cpu_seconds or 0)
        kills = self._fields("memory.oom_control") or self._fields("memory.events")
        self.oom = self.oom or kills.get("oom_kill", 0) > 0
        self._best = Usage(memory or None, seconds or None)
        return self._best

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _text(self, name: str) -> str:
        try:
            return os.pread(self._files[name], 4096, 0).decode()
        except (KeyError, OSError):
            return ""

    def _number(self, name: str) -> int:
        text = self._text(name).strip()
        return int(text) if text.isdigit() else 0

    def _fields(self, name: str) -> dict[str, int]:
        pairs = (line.split() for line in self._text(name).splitlines())
        return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def open_meter(pid: int, container_id: str) -> Meter | None:
    """None where that process is not on this machine, or not that container's."""
    try:
        lines = Path(f"/proc/{pid}/cgroup").read_text().splitlines()
    except OSError:
        return None
    paths = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if container_id in path:
            paths.update(dict.fromkeys(controllers.split(","), path))
    if not paths:
        return None
    cgroups = Cgroups.here()
    mounts = {**cgroups.controllers, "": cgroups.unified}

    def folder(controller: str) -> Path | None:
        named = controller if controller in paths and controller in mounts else ""
        return Path(mounts[named] + paths[named]) if named in paths and mounts[named] else None

    return Meter(folder)


async def follow(meter: Meter, pid: int) -> None:
    """Read it until its first process ends, and for the last time then; then let go of it."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        meter.read()
        meter.close()
        return
    try:
        meter.read()
        while not await process_end(process, SAMPLE_EVERY if meter.samples else None):
            meter.read()
    finally:
        meter.read()
        meter.close()
        os.close(process)


class Meters:
    """Meters by the names of containers. Nothing of a job waits for them."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._meters: dict[str, Meter] = {}
        self._asked: dict[str, Usage] = {}
        """What the engine said of containers that have no meter."""
        self._over: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, name: str, known: ContainerAnswer | None = None) -> None:
        """It has just started, or is found running."""
        if name not in self._tasks:
            self._tasks[name] = asyncio.create_task(self._follow(name, known))

    async def usage(self, name: str) -> Usage:
        if (meter := self._meters.get(name)) is not None:
            return meter.read()
        if name not in self._over:
            await self._ask(name)
        return self._asked.get(name, Usage())

    def saw_a_memory_kill(self, name: str) -> bool:
        meter = self._meters.get(name)
        return meter is not None and meter.oom

    def over(self, name: str) -> None:
        """It has ended: there is nothing more to be asked."""
        if name in self._tasks:
            self._over.add(name)

    async def end(self, name: str) -> None:
        """It is removed."""
        self._over.discard(name)
        self._meters.pop(name, None)
        self._asked.pop(name, None)
        task = self._tasks.pop(name, None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        for name in list(self._tasks):
            await self.end(name)

    async def _follow(self, name: str, known: ContainerAnswer | None) -> None:
        try:
            found = known
            if found is None:
                found = await self._api.ask(ContainerAnswer, "GET", container(name, "/json"))
        except EngineError:
            return
        meter = open_meter(found.state.pid, found.id) if found.state.pid else None
        if meter is not None:
            self._meters[name] = meter
            await follow(meter, found.state.pid)
            return
        for pause in chain(_PAUSES, repeat(_PAUSES[-1])):
            if name in self._over:
                return
            with suppress(EngineError):
                await self._ask(name)
            await asyncio.sleep(pause)

    async def _ask(self, name: str) -> None:
        """The engine tells what a container uses as long as it runs; the most counts."""
        try:
            query = {"stream": 0, "one-shot": 1}
            answer = await self._api.tell("GET", container(name, "/stats"), query)
        except Refused:
            return
        if answer:  # Podman has nothing at all to say of one that has ended
            now, before = self._api.decoded(Stats, answer).value(), self._asked.get(name, Usage())
            memory = max(now.peak_memory_bytes or 0, before.peak_memory_bytes or 0)
            seconds = max(now.cpu_seconds or 0, before.cpu_seconds or 0)
            self._asked[name] = Usage(memory or None, seconds or None)
