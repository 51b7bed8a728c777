"""What went lately, read from the journal at start, so that rates hold over a restart."""

from __future__ import annotations

from penstock.control.limiter import Limiter
from penstock.lifecycles.canonical import JobEvent
from penstock.ports.store import JournalEvent, Store

_ROWS = 5000
"""Rows of the journal that are read at once, from its end."""
_STEPS = 16
"""Cursors that belong to one row."""
_MOST = 100_000
"""Dispatches that are recalled at most; the newest count."""


async def recall_rates(store: Store, limiter: Limiter, since: float) -> int:
    """Count what was given to workers since a time and has ended; returns how many did."""
    gone = await _dispatched(store, since)
    counted = 0
    for event in reversed(gone):
        job = await store.get(event.transition.job_id)
        if job is not None and job.is_final:  # others are counted as what is held
            limiter.recall(job, event.transition.at)
            counted += 1
    return counted


async def _dispatched(store: Store, since: float) -> list[JournalEvent]:
    """Dispatches since a time, newest first. A repeat of one takes no second place."""
    found: list[JournalEvent] = []
    end = await store.last_event()
    while end > 0 and len(found) < _MOST:
        start = max(0, end - _ROWS * _STEPS)
        page = [event for event in await store.events(start, _ROWS * 4) if event.cursor <= end]
        found.extend(
            event
            for event in reversed(page)
            if event.transition.event is JobEvent.DISPATCH and event.transition.at >= since
        )
        if page and page[0].transition.at < since:
            break
        end = start
    return found[:_MOST]
