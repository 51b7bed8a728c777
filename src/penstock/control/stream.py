"""One event stream of everything: the journal, log lines of chosen jobs, and current values.

The journal and logs are durable: a reader resumes where it was. Progress, workers, pools and
counts are values: a reader gets those there are, then what changes, at most twice a second. One
task compares them for all readers, and only while there are any. A reader holds a place in the
journal and a version of the values, and nothing is queued for it: one that is slow misses only
values that were replaced by newer ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any
from weakref import WeakSet

from msgspec import Struct

from penstock.control.feed import Feed, JournalHub, JournalReader
from penstock.control.ledger import Ledger
from penstock.control.open_jobs import OpenJobs
from penstock.control.workers import WorkerRecord, pool_view, worker_view
from penstock.core.errors import InvalidRequest
from penstock.lifecycles.canonical import JobState
from penstock.ports.clock import Clock
from penstock.ports.engine_api import (
    JOURNAL_KINDS,
    JobProgressView,
    PoolView,
    Progressed,
    StreamBatch,
    StreamKind,
    StreamQuery,
    stream_kind,
)
from penstock.ports.store import JournalEvent

INTERVAL = 0.5
"""Seconds between two looks at the values."""
_REMEMBERED = 120
"""Looks for which a worker that has gone is remembered: longer than a stalled reader is kept."""
_LINES = 500
"""Log lines of one job in a batch."""


class _Value(Struct, frozen=True):
    """A current value, or that there is none any more (`view` is None)."""

    version: int
    kind: StreamKind
    tenant: str | None
    """Whose it is; None: only for those who see all of them."""
    topic: str
    name: str
    view: Any


class LiveValues:
    """The newest value of each key, in the order of their changes."""

    def __init__(self) -> None:
        self.version = 0
        self._values: dict[tuple[StreamKind, str], _Value] = {}

    def put(
        self, kind: StreamKind, name: str, view: Any, tenant: str | None = None, topic: str = ""
    ) -> None:
        self._values.pop((kind, name), None)
        self._values[kind, name] = _Value(self.version, kind, tenant, topic, name, view)

    def drop(self, kind: StreamKind, name: str) -> None:
        self._values.pop((kind, name), None)

    def forget_gone(self) -> None:
        oldest = self.version - _REMEMBERED
        for key in [k for k, v in self._values.items() if v.view is None and v.version < oldest]:
            del self._values[key]

    def since(self, version: int) -> list[_Value]:
        """What changed after a version, oldest first; with 0, all there is."""
        found: list[_Value] = []
        for value in reversed(self._values.values()):
            if value.version <= version:
                break
            if version or value.view is not None:
                found.append(value)
        return found[::-1]


class EventStream:
    """The source that all readers share."""

    def __init__(
        self,
        store: Ledger,
        hub: JournalHub,
        feed: Feed,
        open_jobs: OpenJobs,
        clock: Clock,
        *,
        interval: float = INTERVAL,
    ) -> None:
        self.store, self.hub, self.feed, self.clock = store, hub, feed, clock
        self._open_jobs, self._interval = open_jobs, interval
        self.values = LiveValues()
        self._readers: WeakSet[StreamReader] = WeakSet()
        self._task: asyncio.Task[None] | None = None
        self._workers: dict[str, tuple[object, ...]] = {}
        self._pools: dict[str, PoolView] = {}
        self._counts: dict[str | None, dict[JobState, int]] = {}
        self._progress: Mapping[str, Progressed] = {}
        self._log_versions: dict[str, int] = {}

    def read(
        self,
        query: StreamQuery,
        after: str | None,
        tenant: str | None,
        kinds: frozenset[StreamKind],
        check: Callable[[str], Awaitable[object]],
    ) -> StreamReader:
        """`kinds` are those that the reader may see; `check` raises NotFound for a job whose log
        it may not read."""
        return StreamReader(self, query, after, tenant, kinds, check)

    async def join(self, reader: StreamReader) -> None:
        self._readers.add(reader)
        self._watch_logs()
        if self._task is None and not self.hub.closed:
            await self._look()
            if self._task is None:
                self._task = asyncio.create_task(self._run(), name="penstock event stream")

    def leave(self, reader: StreamReader) -> None:
        self._readers.discard(reader)

    async def _run(self) -> None:
        try:
            while self._readers and not self.hub.closed:
                await self.clock.sleep(self._interval)
                self._watch_logs()
                has_lines = self.feed.log_versions != self._log_versions
                if await self._look() or has_lines:
                    self._log_versions = dict(self.feed.log_versions)
                    self.hub.wake()
        finally:
            self._task = None
            self._watch_logs()

    def _watch_logs(self) -> None:
        self.feed.watch_logs({job_id for reader in self._readers for job_id in reader.logs})

    # -- what has changed ---------------------------------------------------------

    async def _look(self) -> bool:
        """Compare all values with those of the last look; whether any changed."""
        values = self.values
        values.version += 1
        self._look_at_workers()
        self._look_at_progress()
        await self._look_at_counts()
        values.forget_gone()
        return bool(values.since(values.version - 1))

    def _look_at_workers(self) -> None:
        roster, values = self._open_jobs.roster, self.values
        now = {worker_id: _signature(worker) for worker_id, worker in roster.workers.items()}
        paused = {name for name, pool in self._pools.items() if pool.paused}
        known = self._pools.keys() == roster.pools.keys()
        if now == self._workers and paused == roster.paused and known:
            return
        for worker_id, signature in now.items():
            if signature != self._workers.get(worker_id):
                view = worker_view(roster.workers[worker_id], self.clock.monotonic())
                values.put(StreamKind.WORKER, worker_id, view)
        for worker_id in self._workers.keys() - now.keys():
            values.put(StreamKind.WORKER, worker_id, None)
        self._workers = now
        for name in roster.pools:
            pool = pool_view(roster, name)
            if pool != self._pools.get(name):
                self._pools[name] = pool
                values.put(StreamKind.POOL, name, pool)

    def _look_at_progress(self) -> None:
        now, held = self.feed.progress, self._open_jobs.held
        if not now and not self._progress:
            return
        for job_id in self._progress.keys() - now.keys():
            self.values.drop(StreamKind.PROGRESS, job_id)
        for job_id, told in now.items():
            job = held.get(job_id)
            if job is not None and told is not self._progress.get(job_id):
                tenant, topic = job.request.tenant, job.request.topic
                view = JobProgressView(job_id, tenant, topic, told.fraction, told.message)
                self.values.put(StreamKind.PROGRESS, job_id, view, tenant, topic)
        self._progress = dict(now)

    async def _look_at_counts(self) -> None:
        for tenant in {reader.tenant for reader in self._readers}:
            counts = await self.store.tally(tenant)
            if counts != self._counts.get(tenant):
                self._counts[tenant] = counts
                self.values.put(StreamKind.COUNTS, tenant or "", counts, tenant)


def _signature(worker: WorkerRecord) -> tuple[object, ...]:
    """What makes a worker worth telling of again; not how long it is silent."""
    held = len(worker.held)
    return worker.session, worker.status, held, worker.limit, worker.pool, id(worker.facts)


class StreamReader(AsyncIterator[StreamBatch]):
    """One reader's place.

    The first batch has the values that there are; empty ones come now and then while nothing
    happens. Waiting for a batch may be cancelled and taken up again. A reader that is dropped is
    gone.
    """

    def __init__(
        self,
        source: EventStream,
        query: StreamQuery,
        after: str | None,
        tenant: str | None,
        kinds: frozenset[StreamKind],
        check: Callable[[str], Awaitable[object]],
    ) -> None:
        self._source, self._query, self._kinds, self._check = source, query, kinds, check
        self._hub, self.tenant, self.logs = source.hub, tenant, query.logs
        self._after, self._lines = _parse(after, query.logs)
        self._log_versions: dict[str, int] = {}
        """Up to where each log was read, as the feed counts."""
        self._journal: JournalReader | None = None
        self._ready: deque[StreamBatch] = deque()
        self._version = 0
        self._beat = self._hub.beats
        self._replayed = 0
        self._is_plain = query.is_plain and kinds >= JOURNAL_KINDS
        """Whether it wants every entry of the journal."""

    async def __anext__(self) -> StreamBatch:
        if self._journal is None:
            await self._begin()
        while not self._hub.closed:
            if self._ready:
                self._beat = self._hub.beats
                return self._ready.popleft()
            news = self._hub.news
            more = await self._take_entries()
            self._take_values()
            more = await self._take_lines() or more
            if self._ready:
                continue
            if self._beat != self._hub.beats:
                self._beat = self._hub.beats
                return StreamBatch(self._place)
            if not more:
                await news.wait()
        raise StopAsyncIteration

    async def _begin(self) -> None:
        for job_id in self.logs:
            await self._check(job_id)
        await self._source.join(self)
        try:
            self._journal = await self._opened(self._after)
            gap = ""
        except InvalidRequest as error:
            self._journal = await self._opened(None)
            gap = f"resuming was not possible: {error.message}"
        self._ready.append(StreamBatch(self._place, gap=gap))
        self._take_values()

    async def _opened(self, after: int | None) -> JournalReader:
        reader = self._hub.events(after, self.tenant)
        await anext(reader)
        return reader

    @property
    def _place(self) -> str:
        assert self._journal is not None
        return "-".join(map(str, (self._journal.cursor, *self._lines.values())))

    # -- what there is ------------------------------------------------------------

    async def _take_entries(self) -> bool:
        """Whether there may be more."""
        journal = self._journal
        assert journal is not None
        if self._kinds.isdisjoint(JOURNAL_KINDS):
            journal.skip()
            return False
        most = self._query.replay
        if most is not None and self._replayed > most and journal.cursor < journal.began_before:
            self._journal = await self._opened(None)
            await journal.aclose()
            gap = f"more than {most} entries of the journal were missed"
            self._ready.append(StreamBatch(self._place, gap=gap))
            return True
        batch = await journal.poll()
        if batch is None:
            return False
        self._replayed += len(batch.events)
        entries = batch.events
        if not self._is_plain:
            entries = tuple(filter(self._wants, entries))
        if entries:
            self._ready.append(StreamBatch(self._place, entries))
        return True

    def _wants(self, event: JournalEvent) -> bool:
        query, transition = self._query, event.transition
        return (
            stream_kind(event) in self._kinds
            and (not query.job_ids or transition.job_id in query.job_ids)
            and (not query.states or transition.after in query.states)
            and (not query.events or transition.event in query.events)
            and self._is_of(event.tenant, event.topic)
        )

    def _is_of(self, tenant: str, topic: str) -> bool:
        query = self._query
        return query.tenant in (None, tenant) and (
            query.topic is None or fnmatchcase(topic, query.topic)
        )

    def _take_values(self) -> None:
        values = self._source.values
        if values.version == self._version:
            return
        found = [value for value in values.since(self._version) if self._sees(value)]
        self._version = values.version
        if found:
            self._ready.append(_batch(self._place, found))

    def _sees(self, value: _Value) -> bool:
        if value.kind not in self._kinds:
            return False
        if value.kind is StreamKind.COUNTS:
            return value.tenant == self.tenant
        if value.kind is not StreamKind.PROGRESS:
            return True
        query, tenant = self._query, value.tenant or ""
        mine = self.tenant in (None, tenant) and self._is_of(tenant, value.topic)
        return mine and (not query.job_ids or value.name in query.job_ids)

    async def _take_lines(self) -> bool:
        """Whether there may be more."""
        more = False
        for job_id in self.logs:
            version = self._source.feed.log_versions.get(job_id, 0)
            if version == self._log_versions.get(job_id):
                continue
            await self._source.store.apply([])  # lines ride with a commit: see this one through
            lines = await self._source.store.read_log(job_id, self._lines[job_id], _LINES)
            if len(lines) < _LINES:
                self._log_versions[job_id] = version
            if lines:
                more = True
                self._lines[job_id] = lines[-1].n
                self._ready.append(StreamBatch(self._place, lines=tuple(lines)))
        return more

    async def aclose(self) -> None:
        self._source.leave(self)
        if self._journal is not None:
            await self._journal.aclose()


def _batch(place: str, found: list[_Value]) -> StreamBatch:
    def views(kind: StreamKind) -> tuple[Any, ...]:
        return tuple(v.view for v in found if v.kind is kind and v.view is not None)

    counts = views(StreamKind.COUNTS)
    return StreamBatch(
        place,
        progress=views(StreamKind.PROGRESS),
        workers=views(StreamKind.WORKER),
        pools=views(StreamKind.POOL),
        gone_workers=tuple(v.name for v in found if v.view is None),
        counts=counts[-1] if counts else None,
    )


def _parse(after: str | None, logs: tuple[str, ...]) -> tuple[int | None, dict[str, int]]:
    """A place as a cursor of the journal and the last line of each log. Raises InvalidRequest."""
    if after is None:
        return None, dict.fromkeys(logs, 0)
    numbers = after.split("-")
    if not all(n.isascii() and n.isdecimal() and len(n) < 19 for n in numbers) or len(
        numbers
    ) not in (1, 1 + len(logs)):
        raise InvalidRequest(
            "after", "is not an id that this stream gave", hint="give one that it did, or none"
        )
    cursor, *lines = map(int, numbers)
    return cursor, dict(zip(logs, lines or [0] * len(logs), strict=True))
