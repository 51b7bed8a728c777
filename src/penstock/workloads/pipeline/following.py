"""Waiting for what happens to a run: woken by its store, with a slow look of one's own.

A store tells of what was written through it. What another process writes is seen at the
next look.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress

from penstock.core.errors import NotFound, WaitTimedOut
from penstock.lifecycles.pipeline import PIPELINE
from penstock.workloads.pipeline.records import PipelineEvent, PipelineEventKind, PipelineRecord
from penstock.workloads.pipeline.store import PipelineStore

LOOK_EVERY = 1.0
"""Seconds until another process's write is seen."""


class Followers:
    """Those who wait for news of runs."""

    def __init__(self, store: PipelineStore) -> None:
        self._store = store
        self._waiting: dict[str, set[asyncio.Event]] = {}

    def hear(self, job_ids: Sequence[str]) -> None:
        """The store's listener."""
        for job_id in job_ids:
            for event in self._waiting.get(job_id, ()):
                event.set()

    async def record(self, job_id: str) -> PipelineRecord:
        record = await self._store.get(job_id)
        if record is None:
            raise _unknown(job_id)
        return record

    async def _has_ended(self, job_id: str) -> bool:
        seen = await self._store.glance(job_id)
        if seen is None:
            raise _unknown(job_id)
        return PIPELINE.is_final(seen.status)

    async def end_of(self, job_id: str, timeout: float | None) -> PipelineRecord:
        """Its record when it has ended. NotFound, WaitTimedOut."""
        with self._news_of(job_id) as news:
            try:
                async with asyncio.timeout(timeout):
                    while True:
                        news.clear()
                        if await self._has_ended(job_id):
                            return await self.record(job_id)
                        await _woken(news)
            except TimeoutError:
                raise WaitTimedOut(
                    f"job {job_id} has not ended within {timeout:g} s", hint="it goes on"
                ) from None

    async def events(self, job_id: str, after: int) -> AsyncIterator[PipelineEvent]:
        """Its events from an id on, as they come, until the last."""
        with self._news_of(job_id) as news:
            while True:
                news.clear()
                # First the record: when that has ended, all of its events are there.
                ended = await self._has_ended(job_id)
                batch = await self._store.events(job_id, after)
                for event in batch:
                    yield event
                    if event.kind is PipelineEventKind.JOB_COMPLETE:
                        return
                    after = event.id
                if not batch:
                    if ended:
                        return
                    await _woken(news)

    @contextmanager
    def _news_of(self, job_id: str) -> Iterator[asyncio.Event]:
        news = asyncio.Event()
        self._waiting.setdefault(job_id, set()).add(news)
        try:
            yield news
        finally:
            self._waiting[job_id].discard(news)
            if not self._waiting[job_id]:
                del self._waiting[job_id]


def _unknown(job_id: str) -> NotFound:
    return NotFound(f"no pipeline job {job_id!r}", hint="list_jobs() has those there are")


async def _woken(news: asyncio.Event) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(LOOK_EVERY):
            await news.wait()
