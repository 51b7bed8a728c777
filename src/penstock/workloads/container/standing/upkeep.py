"""Forgets what is old, and removes what is nobody's.

* Records beyond their retention, with their folders.
* Containers, built images and folders that no job needs: a worker that was killed, or an engine
  that did not answer, may have left them.
* Images that this worker pulled and no job has used for long.

Each look does a little of each; what fails is tried again at the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from penstock.core.errors import PenstockError
from penstock.ports.clock import Clock
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.engine import Engine, EngineError
from penstock.workloads.container.files.sandbox import Sandboxes
from penstock.workloads.container.running.patience import Late, within
from penstock.workloads.container.standing.images import PulledImages
from penstock.workloads.container.standing.machine import disk_of
from penstock.workloads.container.standing.sweeping import Busy, Sweeper
from penstock.workloads.container.store import ContainerStore, RecordQuery

log = logging.getLogger(__name__)

EVERY = 60.0
_FOLDERS_EVERY = 86_400.0
_PAGE = 500
_PATIENCE = 300.0
"""Seconds for one duty, so that an engine that hangs does not keep others from being done."""


class Upkeep:
    """A service that looks once a minute."""

    def __init__(
        self,
        config: WorkerConfig,
        store: ContainerStore,
        engine: Engine,
        sandboxes: Sandboxes,
        images: PulledImages,
        clock: Clock,
        *,
        sweeper: Sweeper,
        busy: Callable[[], Busy],
    ) -> None:
        self._config, self._store, self._engine = config, store, engine
        self._sandboxes, self._images, self._clock = sandboxes, images, clock
        self._sweeper, self._busy = sweeper, busy
        self._folders_at = -_FOLDERS_EVERY

    async def run(self) -> None:
        while True:
            await self.look()
            await self._clock.sleep(EVERY)

    async def look(self) -> None:
        duties: tuple[Callable[[], Coroutine[Any, Any, Any]], ...] = (
            self.forget,
            self._sweeper.sweep_containers,
            self._sweeper.sweep_built_images,
            self.sweep_pulled_images,
            self._sweep_folders_sometimes,
        )
        for duty in duties:
            try:
                await within(self._clock, _PATIENCE, duty())
            except (EngineError, Late) as error:
                log.debug("upkeep: the engine did not help: %r", error)
            except (PenstockError, OSError) as error:
                log.error("upkeep: %s", error)

    async def forget(self) -> int:
        """Delete records that are too old or too many, and their folders; returns how many."""
        retention, keep = self._config.retention, self._config.max_records
        before = self._clock.now() - retention if retention else 0.0
        forgotten = 0
        while (retention or keep) and (gone := await self._store.prune(before, keep=keep)):
            for job_id in gone:
                try:
                    await self._sandboxes.of(job_id).delete()
                except OSError as error:
                    log.warning("the folder of job %s is still there: %s", job_id, error)
            forgotten += len(gone)
        return forgotten

    async def sweep_pulled_images(self) -> int:
        seconds = self._config.image_retention
        if not seconds:
            return 0
        return await self._images.remove_unused(self._engine, seconds, self._busy().images)

    async def sweep_folders(self) -> list[str]:
        """Delete folders that belong to no record; returns their names."""
        # Folders first: a record is there before its folder is.
        names = set(await asyncio.to_thread(self._sandboxes.names))
        before: int | None = None
        while names:
            page = await self._store.find(RecordQuery(before=before, limit=_PAGE))
            names.difference_update(self._sandboxes.of(one.job_id).folder.name for one in page)
            if len(page) < _PAGE:
                break
            before = page[-1].seq
        for name in sorted(names):
            try:
                await asyncio.to_thread(self._sandboxes.discard, name)
            except OSError as error:
                log.warning("the folder %s, which is no job's, is still there: %s", name, error)
                names.discard(name)
        return sorted(names)

    async def _sweep_folders_sometimes(self) -> None:
        now = self._clock.monotonic()
        if now - self._folders_at >= _FOLDERS_EVERY:
            await self.sweep_folders()
            self._folders_at = now


def low_disk(config: WorkerConfig) -> str:
    """Why no job can be taken, in a sentence; empty while there is space, or nobody can tell."""
    available = disk_of(config.jobs_dir).available_mb
    if available is None or available >= config.disk_low_mb:
        return ""
    return (
        f"only {available} MB are free where jobs have their files, "
        f"and {config.disk_low_mb:g} MB must be (disk_low_mb)"
    )
