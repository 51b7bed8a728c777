"""What a job wrote, by offset: a page at a time, waiting for more, as a stream, or as it is.

As server-sent events, the id of an event is how far both streams were told, `stdout-stderr` in
bytes. Each reader draws from what is kept at its own pace: a slow one holds up nobody, and nothing
piles up for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct

from penstock.api.container.facade import ContainerFacade
from penstock.api.container.views import Absent, Wait, absent, answer, patience
from penstock.api.operation import route
from penstock.api.reply import EVENT_STREAM, NO_STORE, NOTHING, AnyReply, StreamReply
from penstock.api.stream import Pulse, cursor_of, heartbeat, named, opening
from penstock.lifecycles.container import ContainerJobState
from penstock.workloads.container.files.output import LogPage
from penstock.workloads.container.job import JobError, Stream

if TYPE_CHECKING:
    from penstock.api.call import Call

_PART = 256 << 10
_FAR = 1 << 53

ENDED = "-end"
"""After the id of the last event of all."""
_RETRY = 1.0
"""Seconds after which a reader that was cut off should come back."""
_LIMIT = 64 << 10
"""Bytes of one event."""

_BREATH = 0.02
"""Seconds after an answer without news: a worker that stops gives it at once."""

Awaited = asyncio.Task[LogPage | None]

Offset = Annotated[int, Meta(ge=-_FAR, le=_FAR)]


class LogQuery(Struct, frozen=True, kw_only=True):
    stream: Stream | None = None
    """`stdout` or `stderr`; without it, events are of both, and anything else of `stdout`."""
    offset: Offset = 0
    """Of the first byte wanted; negative: so many bytes before the end."""
    limit: Annotated[int, Meta(ge=4, le=1 << 20)] = 64 << 10
    """Bytes of a stream to answer with at most."""
    wait: Wait = 0.0
    """Seconds to wait for the next byte, at most 300."""
    follow: Literal["sse"] | None = None
    """`sse`: as server-sent events until the job's end, as `Accept: text/event-stream` asks."""
    raw: Literal["", "true", "1", "false", "0"] = "false"
    """The bytes themselves, as far as they are kept, from `offset` on."""

    @property
    def is_raw(self) -> bool:
        return self.raw in ("", "true", "1")


class Logs(Struct, frozen=True, kw_only=True):
    """Some of a stream."""

    job_id: str
    stream: Stream
    offset: int
    """Of its first byte, counted from the first that the container wrote."""
    next: int
    """The offset to ask for next."""
    skipped: int
    """Bytes before it that were asked for and are not kept."""
    end: bool
    """Nothing will come after `next`."""
    text: str
    """No character is cut in two."""


class LogReading:
    def __init__(self, facade: ContainerFacade) -> None:
        self._facade = facade

    @route(
        "GET /jobs/{job_id}/logs",
        query=LogQuery,
        answer=Logs,
        other_types=("text/event-stream", "application/octet-stream"),
        others={204: None, 404: Absent},
        refusals=(400, 429),
    )
    async def get_logs(self, call: Call) -> AnyReply:
        """Read what a job writes, while it writes it.

        Ask again with `next` as the offset; `wait` answers as soon as there is more. As server-sent
        events: `stdout` and `stderr` with `offset`, `next`, `skipped` and `text`, then `end` with
        the job's `state`, `exit_code` and `error`; a reader that comes back with the last id
        (`Last-Event-ID`) goes on without a gap or a repeat. With `raw`, the bytes themselves
        (`application/octet-stream`). Beyond `limits.max_log_bytes` the middle is not kept, and
        counted in `skipped`.
        """
        query, job_id = call.query(LogQuery), call.params["job_id"]
        stream = query.stream or Stream.STDOUT
        is_head = call.scope["method"] == "HEAD"
        follows = _wants_events(call, query) and not is_head
        if not (follows or query.is_raw):
            return await self._page(call, job_id, query, stream)
        if await self._facade.get(job_id) is None:
            return absent(job_id)
        if query.is_raw:
            return self._raw(job_id, stream, query.offset, is_head)
        return self._follow(call, job_id, query)

    async def _page(self, call: Call, job_id: str, query: LogQuery, stream: Stream) -> AnyReply:
        with call.waiting() if query.wait > 0 else nullcontext():
            page = await self._facade.logs(
                job_id,
                stream,
                query.offset,
                limit=query.limit,
                wait=patience(query.wait),
                text=True,
            )
        if page is None:
            return absent(job_id)
        return answer(
            Logs(
                job_id=job_id,
                stream=stream,
                offset=page.offset,
                next=page.next,
                skipped=page.skipped,
                end=page.end,
                text=page.text,
            )
        )

    # -- as it is -----------------------------------------------------------------

    def _raw(self, job_id: str, stream: Stream, offset: int, is_head: bool) -> StreamReply:
        headers = (
            (b"content-type", b"application/octet-stream"),
            (b"content-disposition", b'attachment; filename="%b.log"' % stream.encode()),
            (b"content-security-policy", b"default-src 'none'; sandbox"),
            NO_STORE,
        )
        return StreamReply(self._bytes(job_id, stream, _FAR if is_head else offset), headers)

    async def _bytes(self, job_id: str, stream: Stream, at: int) -> AsyncGenerator[bytes, None]:
        """Up to where the stream is now: a job that goes on writing would never let it end."""
        last = await self._facade.logs(job_id, stream, -1, limit=1)
        stop = 0 if last is None else last.next
        while at < stop:
            page = await self._facade.logs(job_id, stream, at, limit=_PART)
            if page is None or not page.data or page.offset >= stop:
                return
            at = page.next
            yield page.data[: stop - page.offset]

    # -- as events ----------------------------------------------------------------

    def _follow(self, call: Call, job_id: str, query: LogQuery) -> AnyReply:
        streams = tuple(Stream) if query.stream is None else (query.stream,)
        offsets = dict.fromkeys(streams, query.offset)
        place = call.header(b"last-event-id")
        if place.endswith(ENDED):
            return NOTHING  # by which a browser knows that there is no more
        if place:
            offsets |= {one: at for one, at in place_of(place).items() if one in offsets}
        following = Following(self._facade, job_id, offsets)
        frames = following.frames(call.services.options.heartbeat)
        return StreamReply(frames, EVENT_STREAM, counted=True)


# -- as events ----------------------------------------------------------------------------------


class LogPart(Struct, frozen=True):
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
                    told = LogPart(page.offset, page.next, page.text, page.skipped)
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


def _wants_events(call: Call, query: LogQuery) -> bool:
    return query.follow is not None or "text/event-stream" in call.header(b"accept")
