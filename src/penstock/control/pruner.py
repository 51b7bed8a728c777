"""Deletes finished jobs beyond their retention, and unreferenced blobs."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Container, Iterable, Mapping, Sequence
from itertools import chain
from typing import Protocol

from msgspec.structs import replace

from penstock.control.guard import UPLOADS
from penstock.control.ledger import Ledger
from penstock.core.errors import PenstockError, UnreadablePointer
from penstock.core.job import JobRequest
from penstock.lifecycles.canonical import HELD, WAITING
from penstock.ports.blobs import Blobs
from penstock.ports.clock import Clock
from penstock.ports.engine_api import Cleaned
from penstock.ports.store import JobQuery

log = logging.getLogger(__name__)

_CHUNK = 1000
_TRY_AGAIN = 60.0
"""Seconds after which a failed run is retried."""
_OPEN = tuple(WAITING | HELD)
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
        future: Callable[[], Iterable[JobRequest]] = tuple,
        awaited: Container[str] = (),
        named: Mapping[str, Callable[[bytes], Iterable[str]]] | None = None,
        records: Sequence[Records] = (),
    ) -> None:
        """`future`: requests that are no jobs yet, as those of schedules.
        `awaited`: ids of jobs that others wait for, as it is at any time.
        `named`: for a topic, what finds the pointers in an input of its jobs. What an open job's
        input names is kept."""
        self._store, self._blobs, self._clock = store, blobs, clock
        self._retention, self._interval = retention, interval
        self._future, self._awaited = future, awaited
        self._named, self._records = named or {}, records

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
        named = await self._named_in_inputs()
        future = [request.context_ptr for request in self._future()]
        pointers: list[Iterable[str]] = [await self._store.pointers(), future, named]
        for kept in self._records:
            await kept.prune(now - older_than)
            pointers.append(await kept.pointers())
        await self._forget_uploads(now, named)
        blobs = await self._blobs.collect(chain.from_iterable(pointers), now - _BLOB_AGE)
        return Cleaned(jobs, transitions, lines, blobs)

    async def _named_in_inputs(self) -> set[str]:
        """Blobs to which the inputs of open and of future jobs point."""
        found: set[str] = set()
        async for request in self._open_requests():
            if not request.context_ptr.startswith(("data:", "blob:")):
                continue  # not the engine's own: it may take long, or for ever
            try:
                payload = await self._blobs.get(request.context_ptr)
            except UnreadablePointer:
                continue  # the job will fail for want of its input
            found.update(self._named[request.topic](payload))
        return found

    async def _open_requests(self) -> AsyncIterator[JobRequest]:
        """Of the topics whose inputs can name blobs."""
        for request in self._future():
            if request.topic in self._named:
                yield request
        for topic in self._named:
            query = JobQuery(topic=topic, states=_OPEN, tries=True, since=-1, limit=_CHUNK)
            # Oldest first: a retry that is made meanwhile comes after the job that it repeats.
            while jobs := await self._store.find(query):
                for job in jobs:
                    yield job.request
                query = replace(query, since=jobs[-1].seq)

    async def _forget_uploads(self, now: float, named: Container[str]) -> None:
        """The uploader of a blob is kept until a job can refer to it."""
        for name, at in (await self._store.recall_all(UPLOADS)).items():
            uri = name.removeprefix(UPLOADS).partition("/")[2]  # after the tenant
            if float(at) < now - _BLOB_AGE and uri not in named:
                await self._store.forget(name)
