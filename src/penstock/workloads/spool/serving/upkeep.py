"""Keeps a workspace from growing for ever: old jobs, and what killed programs left behind."""

from __future__ import annotations

import logging

from penstock.core.errors import PenstockError
from penstock.ports.clock import Clock
from penstock.workloads.spool.config import ServerConfig
from penstock.workloads.spool.ending import clean
from penstock.workloads.spool.serving.threads import Threads
from penstock.workloads.spool.workspace import Workspace

log = logging.getLogger(__name__)

EVERY = 60.0


class Upkeep:
    """A duty of every server; two that do it at once don't disturb each other."""

    def __init__(
        self, config: ServerConfig, workspace: Workspace, clock: Clock, threads: Threads
    ) -> None:
        self._config, self._workspace = config, workspace
        self._clock, self._threads = clock, threads

    async def run(self) -> None:
        while True:
            await self.look()
            await self._clock.sleep(EVERY)

    async def look(self) -> list[str]:
        """The jobs that were taken away."""
        try:
            return await self._threads.do(self._clean)
        except (OSError, PenstockError) as error:
            log.warning("upkeep: %s", error)
            return []

    def _clean(self) -> list[str]:
        older_than = self._config.keep_seconds or None
        keep = self._config.keep_jobs or None
        return clean(self._workspace, older_than, keep, clock=self._clock)
