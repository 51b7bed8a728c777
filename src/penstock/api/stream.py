"""Event streams (server-sent events): everything that happens, one job, and a run of a pipeline.

Each stream tells at its start where it begins, and with every event where to resume: a reader
that comes back with that id (`Last-Event-ID`, or `after`) gets what came since, without a gap
and without a repeat. A frame with an id and no data tells how far a reader is without giving it
an event; browsers treat it so, too.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Generator,
    Iterator,
    Sequence,
)
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import asdict

from penstock.api.operation import Pace, route
from penstock.api.reply import EVENT_STREAM, NOTHING, Reply, StreamReply, encode
from penstock.core.errors import InvalidRequest
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports.engine_api import (
    EngineApi,
    JobUpdate,
    Logged,
    Moved,
    Progressed,
    StreamBatch,
    StreamKind,
    StreamQuery,
    stream_kind,
)
from penstock.ports.store import JournalEvent
from penstock.workloads.pipeline.records import PipelineEvent
from penstock.workloads.pipes.status import status_of

if TYPE_CHECKING:
    from penstock.api.call import Call

T = TypeVar("T")
_RETRY = 1.0
"""Seconds after which a disconnected reader should reconnect."""
_LARGEST = (1 << 63) - 1
NODES = "nodes"
"""A kind that only HTTP has: models that are split over nodes, as workers report them."""
_NODES_AGE = 0.4
"""Seconds for which that is cached: less than between two changes in the stream."""
_KEPT = 64
"""Batches whose frames are kept for further readers."""


# -- frames -----------------------------------------------------------------------


class EventData(Struct, frozen=True, gc=False):
    """One transition of one job."""

    job_id: str
    tenant: str
    topic: str
    n: int
    """Its number in the job's history."""
    before: JobState | None
    event: JobEvent
    after: JobState
    attempt: int
    actor: str
    at: float
    reason: str
    worker_id: str | None
    cursor: int
    """Its place in the journal."""


def entry_frame(event: JournalEvent, logs: str = "") -> bytes:
    """An entry of the journal; `logs` are the places in the logs that belong to its id."""
    transition = event.transition
    data = EventData(
        transition.job_id,
        event.tenant,
        event.topic,
        transition.n,
        transition.before,
        transition.event,
        transition.after,
        transition.attempt,
        transition.actor,
        transition.at,
        transition.reason,
        transition.worker_id,
        event.cursor,
    )
    return named(stream_kind(event), data, f"{event.cursor}{logs}")


def named(event: str, data: object, place: str = "") -> bytes:
    at = f"id: {place}\n" if place else ""
    return b"%bevent: %b\ndata: %b\n\n" % (at.encode(), event.encode(), encode(data))


def opening(place: object, retry: float = _RETRY) -> bytes:
    """First frame: start cursor and reconnection time."""
    return b"retry: %d\nid: %b\n\n" % (round(retry * 1000), str(place).encode())


def heartbeat(place: object) -> bytes:
    return b": still here\nid: %b\n\n" % str(place).encode()


class BatchFrames:
    """Writes batches of the event stream; entries that readers share are written once."""

    def __init__(self) -> None:
        self._written: OrderedDict[int, tuple[Sequence[JournalEvent], bytes]] = OrderedDict()
        """By the identity of the entries, which are kept with it for as long."""

    def of(self, batch: StreamBatch, *, workers: bool = True) -> bytes:
        parts: list[bytes] = []
        if batch.gap:
            parts.append(named("gap", {"reason": batch.gap}, batch.place))
        if batch.entries:
            parts.append(self._entries(batch))
        parts += _values(batch, workers)
        parts += [named("log", line) for line in batch.lines[:-1]]
        parts += [named("log", line, batch.place) for line in batch.lines[-1:]]
        return b"".join(parts)

    def _entries(self, batch: StreamBatch) -> bytes:
        _, dash, lines = batch.place.partition("-")
        if dash:
            return b"".join([entry_frame(event, dash + lines) for event in batch.entries])
        key = id(batch.entries)
        found = self._written.get(key)
        if found is None:
            written = b"".join([entry_frame(event) for event in batch.entries])
            found = self._written[key] = (batch.entries, written)
            if len(self._written) > _KEPT:
                self._written.popitem(last=False)
        return found[1]


def _values(batch: StreamBatch, workers: bool) -> Iterator[bytes]:
    for progress in batch.progress:
        yield named("progress", progress)
    if workers:
        for worker in batch.workers:
            yield named("worker", worker)
        for worker_id in batch.gone_workers:
            yield named("worker_gone", {"worker_id": worker_id})
    for pool in batch.pools:
        yield named("pool", pool)
    if batch.counts is not None:
        yield named("counts", batch.counts)


# -- streams ----------------------------------------------------------------------

Written = tuple[bytes, str]
"""The frame of an item, and where to resume after it."""


class EventStreams:
    """Opens streams; each answers errors before its first byte."""

    def __init__(self, *, heartbeat: float = 15.0, retry: float = _RETRY) -> None:
        self._heartbeat, self._retry = heartbeat, retry
        self._frames = BatchFrames()
        self._nodes, self._nodes_at = b"", float("-inf")
        self.open = 0
        """Number of open streams."""
        self.told = 0
        """Events sent since the start, over all readers."""

    # -- everything ---------------------------------------------------------------

    async def everything(
        self, api: EngineApi, query: StreamQuery, after: str | None, kinds: Collection[str]
    ) -> StreamReply:
        """What happens, from a place on or from now on, for ever. `kinds` may have `nodes`, too."""
        batches = api.stream(query, after)
        first = await anext(batches)
        return StreamReply(self._everything(api, batches, first, frozenset(kinds)), EVENT_STREAM)

    async def _everything(
        self,
        api: EngineApi,
        batches: AsyncIterator[StreamBatch],
        first: StreamBatch,
        kinds: frozenset[str],
    ) -> AsyncGenerator[bytes, None]:
        wants_workers = not kinds or StreamKind.WORKER in kinds
        wants_nodes = not kinds or NODES in kinds
        with self._opened() as pulse:
            try:
                yield opening(first.place, self._retry)
                nodes, batch = b"", first
                while True:
                    frames = self._frames.of(batch, workers=wants_workers)
                    if wants_nodes and (batch.workers or batch.gone_workers):
                        told, nodes = nodes, await self._nodes_of(api)
                        frames += nodes if nodes != told else b""
                    if frames:
                        self.told += frames.count(b"\nevent: ") + frames.startswith(b"event: ")
                        pulse.beaten()
                        yield frames
                    elif pulse.is_due():
                        yield heartbeat(batch.place)
                    try:
                        batch = await anext(batches)
                    except StopAsyncIteration:
                        return
            finally:
                await _end(batches)

    async def _nodes_of(self, api: EngineApi) -> bytes:
        """Models that are split over nodes; found out once for all readers of a change."""
        now = asyncio.get_running_loop().time()
        if now - self._nodes_at > _NODES_AGE:
            self._nodes_at = now
            view = status_of(await api.workers())
            self._nodes = named(NODES, view) if view.nodes or self._nodes else b""
        return self._nodes

    # -- one job, or one run: until it has ended -----------------------------------

    async def updates(
        self, api: EngineApi, job_id: str, after: tuple[int, int] | None = None, after_log: int = 0
    ) -> StreamReply:
        """What a job logs and how it gets on and moves.

        `after` is where an earlier stream of it was: the number of its last move, and of its
        last line.
        """
        job = await api.get(job_id)
        n, line = after or (job.version, min(after_log, _LARGEST))

        def write(update: JobUpdate) -> Written:
            nonlocal n, line
            kind = "piece"
            match update:
                case Moved(transition):
                    kind, n = "moved", transition.n
                case Logged(said):
                    kind, line = "log", said.n
                case Progressed():
                    kind = "progress"
            place = f"{n}-{line}"
            return named(kind, update, place), place

        async def end() -> bytes:
            return named("end", {"job_id": job_id, "state": (await api.get(job_id)).state})

        items = api.follow(job_id, line, n)
        return StreamReply(self._followed(items, write, f"{n}-{line}", end), EVENT_STREAM)

    async def run(self, api: EngineApi, job_id: str, after: int = 0) -> StreamReply | Reply:
        """A run's events after one of them, until the last; NOTHING if that was it.

        Their ids are the numbers of the entries in the history of the run's job.
        """
        record = await api.pipelines.get(job_id)
        events = api.pipelines.stream(job_id, after)
        if record.is_final:
            first = await anext(events, None)
            if first is None:
                return NOTHING
            events = _chained(first, events)
        return StreamReply(self._followed(events, _run_frame, str(after)), EVENT_STREAM)

    async def _followed(
        self,
        items: AsyncIterator[T],
        write: Callable[[T], Written],
        place: str,
        end: Callable[[], Awaitable[bytes]] | None = None,
    ) -> AsyncGenerator[bytes, None]:
        with self._opened():
            async with aclosing(with_pauses(items, self._heartbeat)) as paused:
                yield opening(place, self._retry)
                async for item in paused:
                    if item is None:
                        yield heartbeat(place)
                    else:
                        frame, written = write(item)
                        place = written or place
                        self.told += 1
                        yield frame
            if end is not None:
                yield await end()

    @contextmanager
    def _opened(self) -> Generator[Pulse]:
        self.open += 1
        try:
            yield Pulse(self._heartbeat)
        finally:
            self.open -= 1


class Pulse:
    """Tells when a keep-alive comment is due.

    An EngineApi's readers wake regularly, so that no stream needs a timer.
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


_AHEAD = 64
"""Items that are read before the reader of a stream takes them."""


async def with_pauses(items: AsyncIterator[T], pause: float) -> AsyncGenerator[T | None, None]:
    """The items, with a None whenever a keep-alive is due. Closes `items`."""
    ahead: deque[T] = deque()
    news, room = asyncio.Event(), asyncio.Event()

    async def read() -> None:
        try:
            async for item in items:
                ahead.append(item)
                news.set()
                if len(ahead) >= _AHEAD:
                    room.clear()
                    await room.wait()
        finally:
            await _end(items)

    call_later = asyncio.get_running_loop().call_later
    reading = asyncio.create_task(read())
    reading.add_done_callback(lambda _: news.set())
    try:
        while True:
            while ahead:
                yield ahead.popleft()
            if reading.done():
                reading.result()
                return
            room.set()
            news.clear()
            timer = call_later(pause, news.set)
            await news.wait()
            timer.cancel()
            if not (ahead or reading.done()):
                yield None
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _chained(first: T, rest: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    try:
        yield first
        async for item in rest:
            yield item
    finally:
        await _end(rest)


def _run_frame(event: PipelineEvent) -> Written:
    """Progress is not stored, so it has no id to resume after."""
    place = "" if event.id is None else str(event.id)
    return named(event.kind, asdict(event), place), place


async def _end(items: AsyncIterator[T]) -> None:
    close = getattr(items, "aclose", None)
    if close is not None:
        await close()


def cursor_of(text: str, field: str) -> int:
    """The cursor that a reconnecting reader sends. Raises InvalidRequest."""
    if not (text.isascii() and text.isdecimal() and len(text) < 20 and int(text) <= _LARGEST):
        raise InvalidRequest(
            field,
            "is not an event id of this stream",
            hint="pass the id of an event that you received, or none",
        )
    return int(text)


def place_of(text: str, field: str) -> tuple[int, int]:
    """The same for a job's updates: the last move and the last line."""
    n, _, line = text.partition("-")
    return cursor_of(n, field), cursor_of(line, field)


# -- operations -------------------------------------------------------------------

STREAMS: dict[str, Any] = {
    "answer": bytes,
    "answer_type": "text/event-stream",
    "pace": Pace.STREAMS,
}


Kind = Literal["job", "approval", "note", "progress", "log", "worker", "pool", "counts", "nodes"]


class StreamListing(Struct, frozen=True, kw_only=True):
    """What to tell; all conditions must hold. Those of lists may come several times."""

    after: str | None = None
    """The id of an event: what came after it is sent first. Last-Event-ID wins."""
    kind: tuple[Kind, ...] = ()
    """Without one, all that this key may see."""
    topic: str | None = None
    """A glob, as in `job.text.*`."""
    tenant: str | None = None
    state: tuple[JobState, ...] = ()
    """Only moves into one of these."""
    event: tuple[JobEvent, ...] = ()
    job_id: tuple[str, ...] = ()
    log: tuple[str, ...] = ()
    """Jobs whose log lines are wanted, at most 20."""
    replay: Annotated[int, Meta(ge=0)] | None = None
    """Maximum number of missed entries to send; beyond it `gap` is sent. None: all of them."""


@route("GET /v1/stream", query=StreamListing, refusals=(403, 404, 422, 429), **STREAMS)
async def stream_everything(call: Call) -> StreamReply:
    """Follow everything that happens.

    Entries of the journal (`job`, `approval`, `note`) have their place as `id`: a reader that
    comes back with the last id it saw gets what came since, without gap or repeat. So do lines
    of the chosen logs (`log`). Of `progress`, `worker` (and `worker_gone`), `pool`, `nodes` and
    `counts` it gets the current values, then their changes. `gap` tells that entries are
    missing.
    """
    given = call.query(StreamListing)
    kinds = [StreamKind(kind) for kind in given.kind if kind != NODES]
    if NODES in given.kind and StreamKind.WORKER not in kinds:
        kinds.append(StreamKind.WORKER)
    query = StreamQuery(
        kinds=tuple(kinds),
        topic=given.topic,
        tenant=given.tenant,
        states=given.state,
        events=given.event,
        job_ids=given.job_id,
        logs=tuple(dict.fromkeys(given.log)),
        replay=given.replay,
    )
    return await call.services.events.everything(
        call.api, query, resumed(call, given.after), given.kind
    )


class UpdateQuery(Struct, frozen=True):
    after: str | None = None
    """The id of an update: what came after it is sent first. Last-Event-ID wins."""
    after_log: int = 0
    """The `n` of the last log line that is known, for a first call."""


@route("GET /v1/jobs/{job_id}/updates", query=UpdateQuery, refusals=(404, 422, 429), **STREAMS)
async def stream_updates(call: Call) -> StreamReply:
    """Follow the updates of a job.

    Its log lines so far, then `log`, `progress`, `piece` and `moved` until its `end`.
    """
    query = call.query(UpdateQuery)
    place = resumed(call, query.after)
    after = None if place is None else place_of(place, "after")
    return await call.services.events.updates(
        call.api, call.params["job_id"], after, max(0, query.after_log)
    )


def resumed(call: Call, after: str | None) -> str | None:
    """The cursor to resume from; browsers send it as Last-Event-ID."""
    return call.header(b"last-event-id") or after
