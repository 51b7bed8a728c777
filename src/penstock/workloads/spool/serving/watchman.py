"""What a server looks at again and again, whether anything happened or not."""

from __future__ import annotations

import logging

from penstock.core.errors import PenstockError
from penstock.ports.clock import Clock
from penstock.workloads.spool.config import ServerConfig
from penstock.workloads.spool.serving.cancelling import Cancelling
from penstock.workloads.spool.serving.claims import Claims
from penstock.workloads.spool.serving.health import Health
from penstock.workloads.spool.serving.pool import Pool
from penstock.workloads.spool.serving.queue import Queue
from penstock.workloads.spool.serving.recovery import Recovered, Recovery
from penstock.workloads.spool.serving.threads import Threads

log = logging.getLogger(__name__)

_TICK = 0.25
_TOUCHES = 10
"""Signs of life in the time of a lease."""


class Watchman:
    """Orphans, vanished folders, missed notes, passed deadlines, and its own sign of life."""

    def __init__(
        self,
        config: ServerConfig,
        claims: Claims,
        recovery: Recovery,
        pool: Pool,
        cancelling: Cancelling,
        clock: Clock,
        threads: Threads,
        health: Health,
    ) -> None:
        self._config, self._claims, self._recovery = config, claims, recovery
        self._pool, self._cancelling = pool, cancelling
        self._clock, self._threads, self._health = clock, threads, health

    async def live(self) -> None:
        """Tell other machines that it is alive, until cancelled."""
        while True:
            await self._clock.sleep(self._config.lease / _TOUCHES)
            try:
                if not await self._threads.do(self._claims.touch):
                    log.error("this server was taken for dead; it goes on under a new claim")
                    await self._threads.do(self._claims.enter)
                self._health.over("sign of life")
            except (OSError, PenstockError) as error:
                self._health.trouble("sign of life", str(error))

    async def look(self) -> None:
        """At the jobs in `processing`, until cancelled."""
        while True:
            await self._clock.sleep(self._config.scan)
            self._pool.let_go()
            self._cancelling.look()
            await self.recover()

    async def recover(self) -> Recovered:
        try:
            found = await self._threads.do(self._recovery.look)
            self._health.over("recovery")
        except (OSError, PenstockError) as error:
            self._health.trouble("recovery", str(error))
            return Recovered()
        for job_id in found.queued:
            log.warning("job %s had lost its server; it is queued again", job_id)
        for job_id in found.failed:
            log.error("job %s has lost its server too often; it has failed", job_id)
        return found

    async def expire(self, queue: Queue) -> None:
        """Have queued jobs fail whose deadline is over, until cancelled."""
        while True:
            for job_id in queue.late(self._clock.now()):
                try:
                    self._pool.start(job_id)
                except (OSError, PenstockError) as error:
                    self._health.trouble("claiming", str(error))
            await self._clock.sleep(_TICK)
