"""What a job wrote, by offset: a page at a time, waiting for more, as a stream, or as it is."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta, Struct

from penstock.api.container.facade import ContainerFacade
from penstock.api.container.following import ENDED, Following, place_of
from penstock.api.container.views import Absent, Wait, absent, answer, patience
from penstock.api.operation import Operation
from penstock.api.reply import EVENT_STREAM, NO_STORE, NOTHING, AnyReply, StreamReply
from penstock.workloads.container.job import Stream

if TYPE_CHECKING:
    from penstock.api.call import Call

_PART = 256 << 10
_FAR = 1 << 53

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

    async def get_logs(self, call: Call) -> AnyReply:
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


def _wants_events(call: Call, query: LogQuery) -> bool:
    return query.follow is not None or "text/event-stream" in call.header(b"accept")


def operations(facade: ContainerFacade) -> tuple[Operation, ...]:
    these = LogReading(facade)
    return (
        Operation(
            "GET",
            "/jobs/{job_id}/logs",
            these.get_logs,
            query=LogQuery,
            answer=Logs,
            other_types=("text/event-stream", "application/octet-stream"),
            others={204: None, 404: Absent},
            refusals=(400, 429),
            summary="Read what a job writes, while it writes it",
            description=(
                "Ask again with `next` as the offset; `wait` answers as soon as there is more. As "
                "server-sent events: `stdout` and `stderr` with `offset`, `next`, `skipped` and "
                "`text`, then `end` with the job's `state`, `exit_code` and `error`; a reader that "
                "comes back with the last id (`Last-Event-ID`) goes on without a gap or a repeat. "
                "With `raw`, the bytes themselves (`application/octet-stream`). Beyond "
                "`limits.max_log_bytes` the middle is not kept, and counted in `skipped`."
            ),
        ),
    )
