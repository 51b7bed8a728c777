"""Deletes finished jobs beyond their retention, and unreferenced blobs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import chain
from typing import Protocol

from penstock.control.guard import UPLOADS
from penstock.control.ledger import Ledger
from penstock.core.errors import PenstockError
from penstock.ports.blobs import Blobs
from penstock.ports.clock import Clock
from penstock.ports.engine_api import Cleaned

log = logging.getLogger(__name__)

_CHUNK = 1000
_TRY_AGAIN = 60.0
"""Seconds after which a failed run is retried."""
_BLOB_AGE = 3600.0
"""Blobs younger than this are left alone: their job may be about to be accepted."""


class Records(Protocol):
    """Records that a workload keeps beside its jobs, and that are deleted with them."""

    def needs_since(self) -> float:
        """Jobs that ended from this time on are still needed."""

    async def prune(self, before: float) -> object:
        """Delete the records of what ended before a time."""

    async def pointers(self) -> list[str]:
        """Blobs that the records refer to."""


class Pruner:
    """A service that prunes once an hour, and on request."""

    def __init__(
        self,
        store: Ledger,
        blobs: Blobs,
        clock: Clock,
        *,
        retention: float | None,
        interval: float = 3600.0,
        needed: Callable[[], Iterable[str]] = tuple,
        awaited: Container[str] = (),
        records: Sequence[Records] = (),
    ) -> None:
        """`needed`: pointers that no job has yet, as those of schedules.
        `awaited`: ids of jobs that others wait for, as it is at any time."""
        self._store, self._blobs, self._clock = store, blobs, clock
        self._retention, self._interval = retention, interval
        self._needed, self._awaited = needed, awaited
        self._records = records

    async def run(self) -> None:
        pause = self._interval
        while True:
            await self._clock.sleep(pause)
            pause = self._interval
            if self._retention is not None:
                try:
                    cleaned = await self.prune(self._retention)
                except (PenstockError, OSError) as error:
                    log.error("can't prune: %s", error)
                    pause = min(pause, _TRY_AGAIN)
                else:
                    log.info("pruned %d jobs and %d blobs", cleaned.jobs, cleaned.blobs)

    async def prune(self, older_than: float) -> Cleaned:
        now = self._clock.now()
        jobs = transitions = lines = 0
        while True:
            # In small commits, so that other writes do not wait long.
            before = min((kept.needs_since() for kept in self._records), default=float("inf"))
            before = min(before, now - older_than)
            pruned = await self._store.prune(before, _CHUNK, self._awaited)
            jobs += pruned.jobs
            transitions += pruned.transitions
            lines += pruned.log_lines
            if pruned.jobs < _CHUNK and not pruned.steps:
                break
        pointers = [await self._store.pointers(), self._needed()]
        for kept in self._records:
            await kept.prune(now - older_than)
            pointers.append(await kept.pointers())
        await self._forget_uploads(now)
        blobs = await self._blobs.collect(chain.from_iterable(pointers), now - _BLOB_AGE)
        return Cleaned(jobs, transitions, lines, blobs)

    async def _forget_uploads(self, now: float) -> None:
        """The uploader of a blob is kept until a job can refer to it."""
        for name, at in (await self._store.recall_all(UPLOADS)).items():
            if float(at) < now - _BLOB_AGE:
                await self._store.forget(name)
