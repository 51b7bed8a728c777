"""Tells whoever waits that a job's record has changed; it hears only what is durable."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

from penstock.workloads.container.job import ContainerRecord

MOST_BEHIND = 10_000
"""Jobs that a reader may lag behind; then its stream ends, and it has to look for itself."""


class Feed:
    def __init__(self) -> None:
        self._waiters: dict[str, set[asyncio.Future[None]]] = defaultdict(set)
        self._readers: WeakSet[Changes] = WeakSet()
        self.closed = False
        """Nothing more comes."""

    def hear(self, record: ContainerRecord) -> None:
        for waiter in self._waiters.pop(record.job_id, ()):
            if not waiter.done():
                waiter.set_result(None)
        for reader in list(self._readers):
            reader.hear(record.job_id)

    @contextmanager
    def next_change(self, job_id: str) -> Iterator[asyncio.Future[None]]:
        """Is done when the job's record changes the next time, or at the end of everything."""
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.closed:
            change.set_result(None)
        waiters = self._waiters[job_id]
        waiters.add(change)
        try:
            yield change
        finally:
            change.cancel()
            waiters.discard(change)
            if not waiters and self._waiters.get(job_id) is waiters:
                del self._waiters[job_id]

    def changes(self) -> Changes:
        reader = Changes()
        if self.closed:
            reader.close()
        self._readers.add(reader)
        return reader

    def close(self) -> None:
        """Nothing more comes: nobody waits any longer."""
        self.closed = True
        for waiters in self._waiters.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
        self._waiters.clear()
        for reader in list(self._readers):
            reader.close()


class Changes:
    """The ids of jobs whose record changed since this was made, each once however often it did
    before it was read."""

    def __init__(self) -> None:
        self._ids: dict[str, None] = {}
        self._came = asyncio.Event()
        self._closed = False

    def hear(self, job_id: str) -> None:
        self._ids[job_id] = None
        if len(self._ids) > MOST_BEHIND:
            self._ids.clear()
            self.close()
        self._came.set()

    def close(self) -> None:
        self._closed = True
        self._came.set()

    def __aiter__(self) -> Changes:
        return self

    async def __anext__(self) -> str:
        while not self._ids:
            if self._closed:
                raise StopAsyncIteration
            self._came.clear()
            await self._came.wait()
        job_id = next(iter(self._ids))
        del self._ids[job_id]
        return job_id

    async def aclose(self) -> None:
        self.close()
