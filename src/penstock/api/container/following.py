"""A job's output as server-sent events, until its end.

The id of an event is how far both streams were told, `stdout-stderr` in bytes. Each reader
draws from what is kept at its own pace: a slow one holds up nobody, and nothing piles up for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping

from msgspec import Struct

from penstock.api.container.facade import ContainerFacade
from penstock.api.stream import Pulse, cursor_of, heartbeat, named, opening
from penstock.lifecycles.container import ContainerJobState
from penstock.workloads.container.files.output import LogPage
from penstock.workloads.container.job import JobError, Stream

ENDED = "-end"
"""After the id of the last event of all."""
_RETRY = 1.0
"""Seconds after which a reader that was cut off should come back."""
_LIMIT = 64 << 10
"""Bytes of one event."""

_BREATH = 0.02
"""Seconds after an answer without news: a worker that stops gives it at once."""

Awaited = asyncio.Task[LogPage | None]


class Told(Struct, frozen=True):
    """One piece of a stream."""

    offset: int
    next: int
    text: str
    skipped: int


class End(Struct, frozen=True):
    """How the job ended."""

    job_id: str
    state: ContainerJobState
    exit_code: int | None = None
    error: JobError | None = None


class Following:
    """One reader of one job."""

    def __init__(self, facade: ContainerFacade, job_id: str, offsets: Mapping[Stream, int]) -> None:
        self._facade, self._job_id = facade, job_id
        self._offsets = dict(offsets)
        """Up to where each stream was told; negative: so many bytes before its end."""
        self._ended: set[Stream] = set()

    async def frames(self, silence: float) -> AsyncGenerator[bytes, None]:
        """At least a sign of life in so many seconds."""
        yield opening(self._place, _RETRY)
        pulse = Pulse(silence)
        awaited: dict[Stream, Awaited] = {}
        try:
            while self._ask(awaited, silence):
                await asyncio.wait(awaited.values(), return_when=asyncio.FIRST_COMPLETED)
                frames = b"".join(self._take(awaited))
                if frames:
                    pulse.beaten()
                    yield frames
                    continue
                if pulse.is_due():
                    yield heartbeat(self._place)
                await asyncio.sleep(_BREATH)
        finally:
            for task in awaited.values():
                task.cancel()
            await asyncio.gather(*awaited.values(), return_exceptions=True)
        while (end := await self._end(silence)) is None:
            if pulse.is_due():
                yield heartbeat(self._place)
            await asyncio.sleep(_BREATH)
        yield named("end", end, self._place + ENDED)

    @property
    def _place(self) -> str:
        return "-".join(f"{max(0, self._offsets.get(stream, 0))}" for stream in Stream)

    def _ask(self, awaited: dict[Stream, Awaited], silence: float) -> bool:
        """Whether there is a stream that may have more; it is being asked for then."""
        for stream, offset in self._offsets.items():
            if stream not in self._ended and stream not in awaited:
                wait = 0.8 * silence if offset >= 0 else 0  # first of all, where the end is
                asked = self._facade.logs(
                    self._job_id, stream, offset, limit=_LIMIT, wait=wait, text=True
                )
                awaited[stream] = asyncio.ensure_future(asked)
        return bool(awaited)

    def _take(self, awaited: dict[Stream, Awaited]) -> Iterator[bytes]:
        for stream, task in [*awaited.items()]:
            if not task.done():
                continue
            del awaited[stream]
            page = task.result()
            if page is None or page.end:  # the job was removed, or that was all
                self._ended.add(stream)
            if page is not None:
                self._offsets[stream] = page.next
                if page.data or page.skipped:
                    told = Told(page.offset, page.next, page.text, page.skipped)
                    yield named(stream, told, self._place)

    async def _end(self, silence: float) -> End | None:
        """The end is stored a moment after the last byte."""
        record = await self._facade.wait(self._job_id, 0.8 * silence)
        if record is None:
            return End(self._job_id, ContainerJobState.NOT_FOUND)
        if not record.is_final:
            return None
        return End(self._job_id, record.state, record.exit_code, record.error)


def place_of(text: str) -> dict[Stream, int]:
    """How far a reader that comes back was. Raises InvalidRequest."""
    stdout, _, stderr = text.partition("-")
    return {
        Stream.STDOUT: cursor_of(stdout, "Last-Event-ID"),
        Stream.STDERR: cursor_of(stderr, "Last-Event-ID"),
    }
