"""What each container uses: a meter beside every one that runs."""

from __future__ import annotations

import asyncio

from penstock.workloads.container.engine import EngineError
from penstock.workloads.container.engines.docker.answers import ContainerAnswer, Stats
from penstock.workloads.container.engines.docker.api import Api, Refused, container
from penstock.workloads.container.engines.docker.meter import Meter, follow, open_meter
from penstock.workloads.container.job import Usage


class Meters:
    """Meters by the names of containers. Nothing of a job waits for them."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._meters: dict[str, Meter] = {}
        self._over: set[str] = set()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, name: str, known: ContainerAnswer | None = None) -> None:
        """It has just started, or is found running."""
        if name not in self._tasks:
            self._tasks[name] = asyncio.create_task(self._follow(name, known))

    async def usage(self, name: str) -> Usage:
        meter = self._meters.get(name)
        if meter is not None:
            return meter.read()
        if name in self._over:
            return Usage()
        try:
            query = {"stream": 0, "one-shot": 1}
            answer = await self._api.tell("GET", container(name, "/stats"), query)
        except Refused:
            return Usage()
        # Podman has nothing at all to say of one that has ended.
        return self._api.decoded(Stats, answer).value() if answer else Usage()

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
