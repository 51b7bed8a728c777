"""The journal, live: everything that happens to any job, told to whoever reads along.

What was committed is read from the store, never from memory alone, so a reader sees the
journal itself: in order, without a gap and without a repeat. While there are readers, one
task reads what is new, once for all of them, and keeps the newest batches. Readers that keep
up share those batches; one that does not goes back to reading the journal by itself, from
its own cursor, so it costs its own reads and nobody else anything.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar
from weakref import WeakSet

from penstock.control.ledger import Ledger
from penstock.core.errors import InvalidRequest
from penstock.core.journal import Stride
from penstock.ports.clock import Clock
from penstock.ports.engine_api import EventBatch

log = logging.getLogger(__name__)

T = TypeVar("T")
_LARGEST = 500
"""Events in a batch."""
_READ = _LARGEST - 15
"""Events asked for at once: a move's steps are never parted, so a few more may come."""
_KEPT = 32
"""Batches kept for readers that are a little late."""
_GATHER = 0.02
"""Seconds after a batch in which the next one gathers."""
_EACH = 50e-6
"""Seconds more for each reader, so that a crowd leaves the loop time for its own work."""
_PULSE = 5.0
"""Seconds between the signs of life that readers get while nothing happens for them."""
_RETRY = 1.0
"""Seconds after which a store that failed is asked again."""


class JournalHub:
    """Tells readers what happens, from any place in the journal on."""

    def __init__(
        self, store: Ledger, clock: Clock, *, kept: int = _KEPT, pulse: float = _PULSE
    ) -> None:
        self._store, self._clock, self._pulse = store, clock, pulse
        self._readers: WeakSet[JournalReader] = WeakSet()
        self._ring: deque[_Kept] = deque(maxlen=kept)
        self._head = 0
        """Up to where the shared reading has come."""
        self._task: asyncio.Task[None] | None = None
        self._moved = asyncio.Event()
        self.news = asyncio.Event()
        """Set when there is something for readers that have seen everything."""
        self.beats = 0
        """Counts the signs of life."""
        self.closed = False

    @property
    def readers(self) -> int:
        return len(self._readers)

    def hear(self, strides: Sequence[Stride]) -> None:
        """After a commit."""
        if self._task is not None:
            self._moved.set()

    def events(self, after: int | None = None, tenant: str | None = None) -> JournalReader:
        """What was committed after a cursor (None: from now on), then what is; until closed.

        With a tenant, only its events are told, while the cursor moves past the others.
        """
        return JournalReader(self, after, tenant)

    async def close(self) -> None:
        """End every reader's stream."""
        self.closed = True
        self.news.set()
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # -- once for all -------------------------------------------------------------

    async def join(self, reader: JournalReader) -> int:
        """From now on, read along for this reader, too. Returns where the journal ends."""
        last = await self._insist(self._store.last_event)
        self._readers.add(reader)
        if self._task is None and not self.closed:
            self._head = last
            self._task = asyncio.create_task(self._read_along(), name="penstock journal")
        return last

    def leave(self, reader: JournalReader) -> None:
        self._readers.discard(reader)
        self._moved.set()

    async def _read_along(self) -> None:
        due = self._clock.monotonic() + self._pulse
        try:
            while self._readers:
                self._moved.clear()
                batch = await self._read(self._head)
                if batch.events:
                    self._ring.append(_Kept(self._head, batch))
                    self._head = batch.cursor
                if is_due := self._clock.monotonic() >= due:
                    self.beats += 1
                    due = self._clock.monotonic() + self._pulse
                if batch.events or is_due:
                    self._tell()
                await self._pause(len(batch.events), due)
        finally:
            self._ring.clear()
            self._task = None

    async def _pause(self, read: int, due: float) -> None:
        """Let others work and more gather, or wait until something happens or is due."""
        if read:
            gather = 0 if read >= _READ else _GATHER
            await self._clock.sleep(self.readers * _EACH + gather)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, due - self._clock.monotonic())):
                await self._moved.wait()

    def _tell(self) -> None:
        told, self.news = self.news, asyncio.Event()
        told.set()

    # -- each for itself ----------------------------------------------------------

    async def after(self, cursor: int) -> _Kept | None:
        """What comes next after a cursor; None while nothing does."""
        ring = self._ring
        start = ring[0].after if ring else self._head
        if cursor < start:
            batch = await self._read(cursor)
            if not batch.events:  # all of it up to `start` has been pruned
                batch = EventBatch((), start)
            return _Kept(cursor, batch)
        if not ring or ring[-1].batch.cursor <= cursor:
            return None
        kept = ring[-1]
        if kept.after > cursor:
            kept = ring[bisect_right(ring, cursor, key=_Kept.end)]
        return kept if kept.after == cursor else kept.rest(cursor)

    async def _read(self, after: int) -> EventBatch:
        events = await self._insist(lambda: self._store.events(after, _READ))
        return EventBatch(tuple(events), events[-1].cursor if events else after)

    async def _insist(self, ask: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await ask()
            except Exception:
                if self.closed:
                    raise
                log.exception("the journal can't be read; trying again in %g s", _RETRY)
                await self._clock.sleep(_RETRY)


class JournalReader(AsyncIterator[EventBatch]):
    """One reader's place in the journal.

    The first batch is empty and says where reading begins; more empty ones come now and then
    while nothing happens that this reader may see. Waiting for a batch may be cancelled and
    taken up again: nothing is lost by it. A reader that is dropped is gone.
    """

    def __init__(self, hub: JournalHub, after: int | None, tenant: str | None) -> None:
        self._hub, self._after, self._tenant = hub, after, tenant
        self._cursor = -1
        self._beat = hub.beats

    async def __anext__(self) -> EventBatch:
        hub = self._hub
        if self._cursor < 0:
            return await self._begin()
        while not hub.closed:
            kept = await hub.after(self._cursor)
            if kept is not None:
                self._cursor = kept.batch.cursor
                batch = kept.seen_by(self._tenant)
                if batch.events:
                    self._beat = hub.beats
                    return batch
            if self._beat != hub.beats:
                self._beat = hub.beats
                return EventBatch((), self._cursor)
            if kept is None:
                await hub.news.wait()
        raise StopAsyncIteration

    async def _begin(self) -> EventBatch:
        last = await self._hub.join(self)
        try:
            self._cursor = last if self._after is None else _checked(self._after, last)
        except InvalidRequest:
            await self.aclose()
            raise
        return EventBatch((), self._cursor)

    async def aclose(self) -> None:
        self._hub.leave(self)


class _Kept:
    """A batch, where it begins, and what each tenant sees of it."""

    __slots__ = ("_seen", "after", "batch")

    def __init__(self, after: int, batch: EventBatch) -> None:
        self.after, self.batch = after, batch
        self._seen: dict[str, EventBatch] = {}

    def end(self) -> int:
        return self.batch.cursor

    def rest(self, cursor: int) -> _Kept:
        """Only what comes after a cursor that lies within."""
        events = tuple(event for event in self.batch.events if event.cursor > cursor)
        return _Kept(cursor, EventBatch(events, self.batch.cursor))

    def seen_by(self, tenant: str | None) -> EventBatch:
        if tenant is None:
            return self.batch
        seen = self._seen.get(tenant)
        if seen is None:
            events = tuple(event for event in self.batch.events if event.tenant == tenant)
            seen = self._seen[tenant] = EventBatch(events, self.batch.cursor)
        return seen


def _checked(after: int, last: int) -> int:
    if not 0 <= after <= last:
        raise InvalidRequest(
            "after",
            f"{after} is not in this engine's journal, which ends at {last}",
            hint="give a cursor that this engine gave, or 0 for everything it has",
        )
    return after
