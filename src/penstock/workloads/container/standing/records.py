"""Writes to the records of jobs, told to whoever listens once they are durable."""

from __future__ import annotations

import logging
from collections.abc import Callable

from penstock.core.errors import IllegalMove, NotFound
from penstock.lifecycles.container import ContainerJobEvent, ContainerJobState
from penstock.ports.clock import Clock
from penstock.workloads.container.job import Code, ContainerRecord, End
from penstock.workloads.container.store import Change, ContainerStore

log = logging.getLogger(__name__)

_SOONEST, _LATEST = 0.05, 5.0
"""Seconds between two tries to write."""


class Records:
    def __init__(
        self, store: ContainerStore, clock: Clock, heard: Callable[[ContainerRecord], None]
    ) -> None:
        self._store, self._clock, self._heard = store, clock, heard
        self.trouble = ""
        """Why the last write failed; empty when it did not."""

    async def add(self, record: ContainerRecord, *, most_waiting: int) -> ContainerRecord:
        record = await self._store.add(record, most_waiting=most_waiting)
        self.trouble = ""
        self._heard(record)
        return record

    async def change(self, change: Change) -> ContainerRecord:
        record = await self._store.change(change)
        self.trouble = ""
        if change.event is not None:
            self._heard(record)
        return record

    async def insist(self, change: Change) -> ContainerRecord:
        """Try until it is written. Raises IllegalMove and NotFound: no try would help."""
        delay = _SOONEST
        while True:
            try:
                return await self.change(change)
            except (IllegalMove, NotFound):
                raise
            except Exception as error:
                self.trouble = f"records can't be written: {error}"
                log.error("job %s: can't record %s: %s", change.job_id, change.event, error)
            await self._clock.sleep(delay)
            delay = min(delay * 2, _LATEST)


def event_of(end: End) -> ContainerJobEvent:
    if end.state is ContainerJobState.FINISHED:
        return ContainerJobEvent.FINISH
    cancelled = end.error is not None and end.error.code == Code.CANCELLED
    return ContainerJobEvent.CANCEL if cancelled else ContainerJobEvent.FAIL
