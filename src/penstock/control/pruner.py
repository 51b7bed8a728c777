"""Forgets what is old: finished jobs beyond their retention, and blobs nobody points to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable
from itertools import chain

from penstock.control.batches import BatchKeeper
from penstock.control.uploads import PREFIX
from penstock.core.errors import PenstockError
from penstock.ports.blobs import Blobs
from penstock.ports.clock import Clock
from penstock.ports.desk import Cleaned
from penstock.ports.pipelines import PipelineStore
from penstock.ports.store import Store

log = logging.getLogger(__name__)

_CHUNK = 1000
_TRY_AGAIN = 60.0
"""Seconds after which a clean-up that failed is tried again."""
_BLOB_AGE = 3600.0
"""Blobs younger than this are left alone: their job may be about to be accepted."""


class Pruner:
    """A service that looks once an hour, and does the same on request."""

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        clock: Clock,
        *,
        retention: float | None,
        interval: float = 3600.0,
        needed: Callable[[], Iterable[str]] = tuple,
        awaited: Container[str] = (),
        runs: PipelineStore | None = None,
        batches: BatchKeeper | None = None,
    ) -> None:
        """`needed`: pointers that no job has yet, as those of schedules.
        `awaited`: ids of jobs that others wait for, as it is at any time."""
        self._store, self._blobs, self._clock = store, blobs, clock
        self._retention, self._interval = retention, interval
        self._needed, self._awaited = needed, awaited
        self._runs, self._batches = runs, batches

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
            # In small commits, so that nobody waits long behind one.
            before = self._spared(now - older_than)
            pruned = await self._store.prune(before, _CHUNK, self._awaited)
            jobs += pruned.jobs
            transitions += pruned.transitions
            lines += pruned.log_lines
            if pruned.jobs < _CHUNK:
                break
        if self._batches is not None:
            await self._batches.prune(now - older_than)
        await self._forget_uploads(now)
        keep = chain(
            await self._store.pointers(), self._needed(), await self._prune_runs(now - older_than)
        )
        blobs = await self._blobs.collect(keep, now - _BLOB_AGE)
        return Cleaned(jobs, transitions, lines, blobs)

    def _spared(self, finished_before: float) -> float:
        """A batch that has not ended will tell what came of its jobs: they stay until then."""
        if self._batches is None:
            return finished_before
        return min(finished_before, self._batches.needs_since())

    async def _prune_runs(self, finished_before: float) -> list[str]:
        """Forget the records of runs; returns the blobs that others still need."""
        if self._runs is None:
            return []
        while await self._runs.prune(finished_before, _CHUNK) >= _CHUNK:
            pass
        return await self._runs.pointers()

    async def _forget_uploads(self, now: float) -> None:
        """Who brought a blob matters until a job refers to it, or it is gone."""
        for name, at in (await self._store.recall_all(PREFIX)).items():
            if float(at) < now - _BLOB_AGE:
                await self._store.forget(name)
