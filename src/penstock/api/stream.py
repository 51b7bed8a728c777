"""What happens, as server-sent events: of all jobs, of one, a job's own words, and a run.

Each stream tells at its start where it begins, and with every event where to resume: a reader
that comes back with that id (`Last-Event-ID`, or `after`) gets what came since, without a gap
and without a repeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Sequence
from contextlib import aclosing, contextmanager
from typing import TypeVar

from penstock.api.frames import (
    EventFilter,
    Written,
    frame_of,
    heartbeat,
    named,
    opening,
    run_frame,
)
from penstock.api.reply import EVENT_STREAM, NOTHING, Reply, StreamReply
from penstock.core.errors import InvalidRequest
from penstock.core.job import Job
from penstock.core.journal import Transition
from penstock.lifecycles.canonical import TERMINAL
from penstock.ports.engine_api import EngineApi, EventBatch, Logged, Moved, Streamed
from penstock.workloads.pipeline.records import PipelineEvent

T = TypeVar("T")
_RETRY = 1.0
"""Seconds after which a reader that was cut off should come back."""
_LARGEST = (1 << 63) - 1


class EventStreams:
    """Opens streams; each answers errors before its first byte."""

    def __init__(self, *, heartbeat: float = 15.0, retry: float = _RETRY) -> None:
        self._heartbeat, self._retry = heartbeat, retry
        self._written = Written()
        self.open = 0
        """How many streams there are now."""
        self.told = 0
        """Events sent since the start, over all readers."""

    # -- the journal --------------------------------------------------------------

    async def journal(
        self, api: EngineApi, wanted: EventFilter, after: int | None = None
    ) -> StreamReply:
        """Everything that happens, from a cursor on or from now on, for ever."""
        batches = api.events(after)
        first = await anext(batches)
        return StreamReply(self._journal(batches, first, wanted), EVENT_STREAM)

    async def _journal(
        self, batches: AsyncIterator[EventBatch], first: EventBatch, wanted: EventFilter
    ) -> AsyncGenerator[bytes, None]:
        everything = wanted.is_empty
        with self._opened() as pulse:
            try:
                yield opening(first.cursor, self._retry)
                async for batch in batches:
                    if everything:
                        frames = self._written.whole(batch)
                        self.told += len(batch.events)
                    else:
                        frames = self._written.matching(batch, wanted)
                        self.told += frames.count(b"\nevent: ")
                    if frames:
                        pulse.beaten()
                        yield frames
                    elif pulse.is_due():
                        yield heartbeat(batch.cursor)
            finally:
                await _end(batches)

    # -- one job ------------------------------------------------------------------

    async def job(self, api: EngineApi, job_id: str, after: int = 0) -> StreamReply:
        """A job's history after entry number `after`, then what happens, until it has ended."""
        batches = api.events()
        await anext(batches)  # nothing that happens from here on is missed
        job = await api.get(job_id)
        past = await api.history(job_id)
        if after > len(past):
            await _end(batches)
            raise InvalidRequest("after", f"the job's history ends at {len(past)}")
        return StreamReply(self._job(batches, job, past, after), EVENT_STREAM)

    async def _job(
        self, batches: AsyncIterator[EventBatch], job: Job, past: Sequence[Transition], after: int
    ) -> AsyncGenerator[bytes, None]:
        tenant, topic = job.request.tenant, job.request.topic
        place = after
        news: Sequence[Transition] = past
        with self._opened() as pulse:
            try:
                yield opening(place, self._retry)
                while True:
                    fresh = [entry for entry in news if entry.n > place]
                    if fresh:
                        place = fresh[-1].n
                        self.told += len(fresh)
                        pulse.beaten()
                        yield b"".join([frame_of(entry, tenant, topic) for entry in fresh])
                    elif pulse.is_due():
                        yield heartbeat(place)
                    if news and (state := news[-1].after) in TERMINAL:
                        yield named("end", {"job_id": job.job_id, "state": state})
                        return
                    try:
                        batch = await anext(batches)
                    except StopAsyncIteration:
                        return
                    news = [e.transition for e in self._written.of_job(batch, job.job_id)]
            finally:
                await _end(batches)

    # -- a job's own words --------------------------------------------------------

    async def updates(
        self, api: EngineApi, job_id: str, after: tuple[int, int] | None = None, after_log: int = 0
    ) -> StreamReply:
        """What a job logs and how it gets on and moves, until it has ended.

        `after` is where an earlier stream of it was: the number of its last move, and of its
        last line.
        """
        job = await api.get(job_id)
        place, line = after or (job.version, min(after_log, _LARGEST))
        missed = []
        if after is not None:
            missed = [entry for entry in await api.history(job_id) if entry.n > place]
        return StreamReply(self._updates(api, job, place, line, missed), EVENT_STREAM)

    async def _updates(
        self, api: EngineApi, job: Job, n: int, line: int, missed: Sequence[Transition]
    ) -> AsyncGenerator[bytes, None]:
        with self._opened():
            yield opening(f"{n}-{line}", self._retry)
            for entry in missed:
                n = entry.n
                yield named("moved", Moved(entry), f"{n}-{line}")
            updates = _with_pauses(api.follow(job.job_id, line), self._heartbeat)
            async with aclosing(updates):
                async for update in updates:
                    if update is None:
                        yield heartbeat(f"{n}-{line}")
                    elif isinstance(update, Moved):
                        for entry in await self._between(api, n, update.transition):
                            n = entry.n
                            yield named("moved", Moved(entry), f"{n}-{line}")
                    elif isinstance(update, Logged):
                        line = update.line.n
                        yield named("log", update, f"{n}-{line}")
                    elif isinstance(update, Streamed):
                        yield named("piece", update, f"{n}-{line}")
                    else:
                        yield named("progress", update, f"{n}-{line}")
            for entry in await api.history(job.job_id):
                if entry.n > n:
                    yield named("moved", Moved(entry), f"{entry.n}-{line}")
            state = (await api.get(job.job_id)).state
            yield named("end", {"job_id": job.job_id, "state": state})

    async def _between(self, api: EngineApi, n: int, entry: Transition) -> list[Transition]:
        """An entry, with those before it that nobody told of; none if it is known already."""
        if entry.n <= n + 1:
            return [entry] if entry.n > n else []
        return [past for past in await api.history(entry.job_id) if n < past.n <= entry.n]

    # -- a run of a pipeline ------------------------------------------------------

    async def run(self, api: EngineApi, job_id: str, after: int = 0) -> StreamReply | Reply:
        """A run's events after one of them, until the last; NOTHING if that was it.

        Their ids are the numbers of the entries in the history of the run's job.
        """
        record = await api.pipelines.get(job_id)
        events = _with_pauses(api.pipelines.stream(job_id, after), self._heartbeat)
        first = None
        if record.is_final and (first := await _first(events)) is None:
            return NOTHING
        return StreamReply(self._run(events, first, after), EVENT_STREAM)

    async def _run(
        self,
        events: AsyncGenerator[PipelineEvent | None, None],
        first: PipelineEvent | None,
        place: int,
    ) -> AsyncGenerator[bytes, None]:
        with self._opened():
            async with aclosing(events):
                yield opening(place, self._retry)
                if first is not None:
                    place = first.id
                    self.told += 1
                    yield run_frame(first)
                async for event in events:
                    if event is None:
                        yield heartbeat(place)
                    else:
                        place = event.id
                        self.told += 1
                        yield run_frame(event)

    @contextmanager
    def _opened(self) -> Generator[Pulse]:
        self.open += 1
        try:
            yield Pulse(self._heartbeat)
        finally:
            self.open -= 1


class Pulse:
    """When a stream has been silent for so long that it must give a sign of life.

    An EngineApi's readers wake now and then by themselves, so that no stream needs a timer.
    """

    __slots__ = ("_last", "_longest", "_now")

    def __init__(self, longest: float) -> None:
        self._longest, self._now = 0.8 * longest, asyncio.get_running_loop().time
        self._last = self._now()

    def beaten(self) -> None:
        self._last = self._now()

    def is_due(self) -> bool:
        if self._now() - self._last < self._longest:
            return False
        self.beaten()
        return True


async def _with_pauses(items: AsyncIterator[T], pause: float) -> AsyncGenerator[T | None, None]:
    """The items, with a None whenever none came for so long."""
    waiting: asyncio.Task[T] | None = None
    try:
        while True:
            waiting = waiting or asyncio.create_task(_one(items))
            await asyncio.wait({waiting}, timeout=pause)
            if not waiting.done():
                yield None
                continue
            try:
                item = waiting.result()
            except StopAsyncIteration:
                return
            waiting = None
            yield item
    finally:
        if waiting is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await _end(items)


async def _first(items: AsyncIterator[T | None]) -> T | None:
    async for item in items:
        if item is not None:
            return item
    return None


async def _one(items: AsyncIterator[T]) -> T:
    return await anext(items)


async def _end(items: AsyncIterator[T]) -> None:
    close = getattr(items, "aclose", None)
    if close is not None:
        await close()


def cursor_of(text: str, field: str) -> int:
    """A place in a stream, as a reader that comes back gives it. Raises InvalidRequest."""
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= _LARGEST):
        raise InvalidRequest(
            field, "is no id that this stream gave", hint="give one that it did, or none"
        )
    return int(text)


def place_of(text: str, field: str) -> tuple[int, int]:
    """The same for a job's updates: the last move and the last line."""
    n, _, line = text.partition("-")
    return cursor_of(n, field), cursor_of(line, field)
