"""What a job wrote, by offset: a page at a time, waiting for more, as a stream, or as it is."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncGenerator
from contextlib import nullcontext
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal, cast

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import asdict

from penstock.api.container.facade import ContainerFacade
from penstock.api.container.following import ENDED, Following, place_of
from penstock.api.container.views import Absent, Wait, absent, answer, patience
from penstock.api.operation import Operation
from penstock.api.reply import EVENT_STREAM, NO_STORE, NOTHING, AnyReply, StreamReply
from penstock.core.errors import InvalidRequest
from penstock.workloads.container.job import Stream

if TYPE_CHECKING:
    from penstock.api.call import Call

_PART = 256 << 10
_FAR = 1 << 53

Offset = Annotated[int, Meta(ge=-_FAR, le=_FAR)]


class Encoding(StrEnum):
    TEXT = "text"
    BASE64 = "base64"


class LogQuery(Struct, frozen=True, kw_only=True):
    stream: Stream | None = None
    """`stdout` or `stderr`; without it both are answered, each for itself."""
    offset: Offset | None = None
    """Of the first byte wanted, with `stream`; negative: so many bytes before the end."""
    stdout_offset: Offset = 0
    """The same without `stream`."""
    stderr_offset: Offset = 0
    limit: Annotated[int, Meta(ge=4, le=1 << 20)] = 64 << 10
    """Bytes of a stream to answer with at most."""
    wait: Wait = 0.0
    """Seconds to wait for the next byte, at most 300."""
    encoding: Encoding = Encoding.TEXT
    """`text` never cuts a character in two; `base64` has the bytes as they are."""
    follow: Literal["sse"] | None = None
    """`sse`: as server-sent events until the job's end, as `Accept: text/event-stream` asks."""
    raw: Literal["", "true", "1", "false", "0"] = "false"
    """The bytes themselves, as far as they are kept, from `offset` on; needs `stream`."""

    @property
    def is_raw(self) -> bool:
        return self.raw in ("", "true", "1")

    def offset_of(self, stream: Stream) -> int:
        if stream is self.stream and self.offset is not None:
            return self.offset
        return self.stdout_offset if stream is Stream.STDOUT else self.stderr_offset


class Piece(Struct, frozen=True, kw_only=True):
    """Some of a stream."""

    offset: int
    """Of its first byte, counted from the first that the container wrote."""
    next: int
    """The offset to ask for next."""
    skipped: int
    """Bytes before it that were asked for and are not kept."""
    end: bool
    """Nothing will come after `next`."""
    text: str | UnsetType = UNSET
    base64: str | UnsetType = UNSET


class Logs(Struct, frozen=True, kw_only=True):
    """With `stream`: the fields of a piece. Without: a piece of each."""

    job_id: str
    stream: Stream | UnsetType = UNSET
    offset: int | UnsetType = UNSET
    next: int | UnsetType = UNSET
    skipped: int | UnsetType = UNSET
    stdout: Piece | UnsetType = UNSET
    stderr: Piece | UnsetType = UNSET
    end: bool
    """Nothing more will come."""
    text: str | UnsetType = UNSET
    base64: str | UnsetType = UNSET


class LogReading:
    def __init__(self, facade: ContainerFacade) -> None:
        self._facade = facade

    async def get_logs(self, call: Call) -> AnyReply:
        query, job_id = call.query(LogQuery), call.params["job_id"]
        if query.stream is None and (query.offset is not None or query.is_raw):
            field = "raw" if query.is_raw else "offset"
            raise InvalidRequest(field, "needs to know which stream", hint="add stream=stdout")
        is_head = call.scope["method"] == "HEAD"
        follows = _wants_events(call, query) and not is_head
        if not (follows or query.is_raw):
            return await self._page(call, job_id, query)
        if await self._facade.get(job_id) is None:
            return absent(job_id)
        if query.stream is not None and query.is_raw:
            return self._raw(job_id, query.stream, query.offset_of(query.stream), is_head)
        return self._follow(call, job_id, query)

    # -- pages --------------------------------------------------------------------

    async def _page(self, call: Call, job_id: str, query: LogQuery) -> AnyReply:
        if query.stream is None:
            if query.wait > 0:
                with call.waiting():
                    await self._something(job_id, query)
            pieces = [await self._piece(job_id, query, stream) for stream in Stream]
            if None in pieces:
                return absent(job_id)
            stdout, stderr = cast("list[Piece]", pieces)
            end = stdout.end and stderr.end
            return answer(Logs(job_id=job_id, stdout=stdout, stderr=stderr, end=end))
        with call.waiting() if query.wait > 0 else nullcontext():
            piece = await self._piece(job_id, query, query.stream, patience(query.wait))
        if piece is None:
            return absent(job_id)
        return answer(Logs(job_id=job_id, stream=query.stream, **asdict(piece)))

    async def _something(self, job_id: str, query: LogQuery) -> None:
        """Until one of the streams has something, or both are at their end, or the time is over."""
        seconds = patience(query.wait)
        waits = {
            asyncio.ensure_future(self._piece(job_id, query, stream, seconds)) for stream in Stream
        }
        try:
            while waits:
                ready, waits = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                found = [one.result() for one in ready]
                if any(piece is None or piece.text or piece.base64 for piece in found):
                    return
        finally:
            for one in waits:
                one.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    async def _piece(
        self, job_id: str, query: LogQuery, stream: Stream, wait: float = 0
    ) -> Piece | None:
        is_text = query.encoding is Encoding.TEXT
        page = await self._facade.logs(
            job_id, stream, query.offset_of(stream), limit=query.limit, wait=wait, text=is_text
        )
        if page is None:
            return None
        return Piece(
            offset=page.offset,
            next=page.next,
            skipped=page.skipped,
            end=page.end,
            text=page.text if is_text else UNSET,
            base64=UNSET if is_text else b64encode(page.data).decode("ascii"),
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
        offsets = {stream: query.offset_of(stream) for stream in streams}
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
