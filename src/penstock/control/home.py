"""What belongs to all tenants, in a database of several shards: keys, limits, pools, credentials.

Its home is shard 0, where it is changed. The owners of the other shards read it there, and follow
its changes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import NoReturn

from penstock.control.credentials import CredentialRegistry
from penstock.control.engine_api import PAUSED_POOLS
from penstock.control.guard import KeyRegistry
from penstock.control.ledger import Facts
from penstock.control.limits import LIMITS, read_limits
from penstock.control.open_jobs import OpenJobs
from penstock.core.errors import Conflict, StoreFailed
from penstock.ports.clock import Clock

log = logging.getLogger(__name__)

PERIOD = 0.5
"""Seconds between two looks."""


class HomeFacts:
    """The facts of shard 0, for another shard: it may read them. See `Facts`."""

    def __init__(self, read: Callable[[str], Awaitable[dict[str, bytes]]]) -> None:
        self._read = read

    async def recall_all(self, prefix: str) -> dict[str, bytes]:
        return await self._read(prefix)

    async def remember(self, name: str, value: bytes) -> None:
        self._refuse()

    async def remember_all(self, facts: Mapping[str, bytes]) -> None:
        self._refuse()

    async def forget(self, name: str) -> bool:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise Conflict(
            "keys, limits, pools and credentials are of all tenants, and are changed in shard 0",
            hint="connect to the addresses of shard 0",
        )


class HomeFollower:
    """Keeps what an engine uses as it is in shard 0. `run` does that until cancelled."""

    def __init__(
        self,
        home: Facts,
        keys: KeyRegistry,
        credentials: CredentialRegistry,
        open_jobs: OpenJobs,
        nudge: Callable[[], None],
        clock: Clock,
    ) -> None:
        self._home, self._keys, self._credentials = home, keys, credentials
        self._limiter, self._roster = open_jobs.limiter, open_jobs.roster
        self._nudge, self._clock = nudge, clock
        self._trouble = ""

    async def run(self) -> None:
        while True:
            await self._clock.sleep(PERIOD)
            try:
                await self.look()
                self._trouble = ""
            except StoreFailed as error:
                if self._trouble != error.message:
                    log.warning("can't read keys, limits and pools: %s", error.message)
                self._trouble = error.message

    async def look(self) -> None:
        """Raises StoreFailed."""
        await self._keys.load_keys()
        if await self._credentials.load():
            self._credentials.on_revoked()
        limits = {limit.name: limit for limit in read_limits(await self._home.recall_all(LIMITS))}
        if limits != self._limiter.limits:
            self._limiter.use(limits.values())
            self._nudge()
        facts = await self._home.recall_all(PAUSED_POOLS)
        paused = {name.removeprefix(PAUSED_POOLS) for name in facts}
        if changed := paused ^ self._roster.paused:
            for name in changed:
                (self._roster.pause if name in paused else self._roster.resume)(name)
            self._nudge()
