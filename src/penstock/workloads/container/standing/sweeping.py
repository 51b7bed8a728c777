"""Removes containers and built images that no job needs.

A worker that was killed, or an engine that did not answer, may have left them. The upkeep looks
for them once a minute; who could not remove something asks for it sooner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any

from msgspec import Struct

from penstock.ports.clock import Clock
from penstock.workloads.container.engine import JOB_LABEL, OWNER_LABEL, Engine, EngineError
from penstock.workloads.container.running.patience import Late, within

log = logging.getLogger(__name__)

PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before each try to remove what was left; after the last, the upkeep's looks remain."""
_PATIENCE = 60.0
"""Seconds for one removal, so that one that hangs does not keep others from being done."""


class Busy(Struct, frozen=True):
    """What is in use."""

    jobs: Collection[str]
    """Those that run, or whose container is not removed yet."""
    images: Collection[str] = ()
    """Their names and ids."""


class Sweeper:
    """A service that sleeps until something was left."""

    def __init__(
        self, engine: Engine, clock: Clock, *, owner: str, busy: Callable[[], Busy]
    ) -> None:
        self._engine, self._clock, self._owner, self._busy = engine, clock, owner, busy
        self._left = asyncio.Event()

    def again(self) -> None:
        """Something could not be removed; its job will not be busy for much longer."""
        self._left.set()

    async def run(self) -> None:
        while True:
            await self._left.wait()
            await self._insist()

    async def _insist(self) -> None:
        for pause in PAUSES:
            await self._clock.sleep(pause)
            self._left.clear()
            try:
                await self.sweep_containers()
                await self.sweep_built_images()
            except (EngineError, Late, OSError) as error:
                log.debug("something is still there: %r", error)
            else:
                return

    async def sweep_containers(self) -> list[str]:
        """Remove those of ours that no job needs; returns their names. Raises EngineError or Late
        if one is still there, after all were tried."""
        mine = {OWNER_LABEL: self._owner}
        found = await within(self._clock, _PATIENCE, self._engine.find(mine))
        jobs = {one.name: one.labels.get(JOB_LABEL, "") for one in found}
        return await self._sweep(jobs, self._engine.remove)

    async def sweep_built_images(self) -> list[str]:
        """The same with images that were built for jobs."""
        mine = {OWNER_LABEL: self._owner}
        found = await within(self._clock, _PATIENCE, self._engine.images(mine))
        jobs = {one.id: one.labels.get(JOB_LABEL, "") for one in found}
        return await self._sweep(jobs, self._engine.remove_image)

    async def _sweep(
        self, jobs: Mapping[str, str], remove: Callable[[str], Coroutine[Any, Any, None]]
    ) -> list[str]:
        swept: list[str] = []
        failed: EngineError | Late | None = None
        for name, job_id in jobs.items():
            # Asked anew for each: others start and end while one is removed. A job counts as
            # busy before its container is made.
            if job_id in self._busy().jobs:
                continue
            try:
                await within(self._clock, _PATIENCE, remove(name))
                swept.append(name)
            except (EngineError, Late) as error:
                failed = error
        if failed is not None:
            raise failed
        return swept
