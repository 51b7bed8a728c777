"""Feeds of what was committed: waiters and readers of one job, and readers of the whole journal.

`Feed` is notified only of commits and of progress, so no reader sees an end that could still be
lost.

`JournalHub` reads events from the store, never from memory alone, so a reader sees the journal
itself: in order, without a gap and without a repeat. While there are readers, one task reads what
is new, once for all of them, and keeps the newest batches. Readers that keep up share those
batches; one that does not reads the journal by itself, from its own cursor.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import contextmanager, suppress
from typing import TypeVar
from weakref import WeakSet

from penstock.control.ledger import Ledger
from penstock.core.errors import InvalidRequest, NotFound
from penstock.core.job import Job
from penstock.core.journal import Stride
from penstock.lifecycles.canonical import TERMINAL, JobState
from penstock.ports.bus import (
    PROGRESS,
    AnyMessage,
    Bus,
    JobLog,
    JobPiece,
    JobProgress,
    Subscription,
)
from penstock.ports.clock import Clock
from penstock.ports.engine_api import EventBatch, JobUpdate, Logged, Moved, Progressed, Streamed
from penstock.ports.store import LogLine

log = logging.getLogger(__name__)

T = TypeVar("T")
Waiters = tuple[Callable[[Job], None], ...]
"""Callbacks at a job's end; a tuple, so that thousands of jobs share one."""

_KEPT_CHARACTERS = 1 << 20
"""Characters of a job's pieces that are kept for readers who come late."""


class Updates(asyncio.Queue[JobUpdate | None]):
    """Updates that one reader has not received yet."""

    has_gap = False
    """Whether it missed a piece of this attempt; then it gets no later ones."""


class StreamedText:
    """What one attempt has said so far."""

    __slots__ = ("attempt", "kept", "n", "room")

    def __init__(self, attempt: int) -> None:
        self.attempt, self.n = attempt, 0
        self.kept: list[Streamed] = []
        """Its first pieces, for late readers."""
        self.room = _KEPT_CHARACTERS

    def add(self, piece: Streamed) -> None:
        self.n += 1
        self.room -= len(piece.text)
        if self.room >= 0:
            self.kept.append(piece)


class JobSet:
    """Jobs that one caller waits for together; a job that is retried ends with its last try."""

    def __init__(self, feed: Feed, count: int, or_failure: bool) -> None:
        """`count` ends are enough, or with `or_failure` one without success."""
        self._feed, self._count, self._or_failure = feed, count, or_failure
        self._waiters: Waiters = (self._tell,)
        self._asked: dict[str, tuple[str, ...]] = {}
        """By the try that is awaited, the ids by which the caller knows the job."""
        self.ended: dict[str, Job] = {}
        """The final records, in the order of their ends for those that ended meanwhile."""
        self._done = asyncio.Event()

    def add(self, job_ids: Sequence[str]) -> None:
        self._asked.update(zip(job_ids, zip(job_ids, strict=True), strict=True))
        self._feed.listen(job_ids, self._waiters)

    def find(self, job: Job) -> str | None:
        """What the store says of a job, read after `add`. Returns the retry to be read next."""
        if not job.is_final or job.job_id not in self._asked:
            return None
        self._feed.forget((job.job_id,), self._waiters)
        self._tell(job)
        return job.successor

    def _tell(self, job: Job) -> None:
        asked = self._asked.pop(job.request.job_id)
        if (retry := job.successor) is not None:
            if retry in self._asked:
                asked += self._asked[retry]
            else:
                self._feed.listen((retry,), self._waiters)
            self._asked[retry] = asked
            return
        for job_id in asked:
            self.ended[job_id] = job
        if (
            not self._asked
            or len(self.ended) >= self._count
            or (self._or_failure and job.state is not JobState.SUCCEEDED)
        ):
            self._done.set()

    async def wait(self, linger: float) -> None:
        """Until enough have ended, and a moment longer for those that end together with them."""
        await self._done.wait()
        if self._asked and linger:
            await asyncio.sleep(linger)

    def close(self) -> None:
        self._feed.forget(self._asked, self._waiters)


class Feed:
    """Waiters and readers, by job."""

    def __init__(self, store: Ledger, is_held: Callable[[str], bool] = lambda job_id: True) -> None:
        self._store = store
        self._is_held = is_held
        """Whether a worker has this job: what one says of another comes too late."""
        self._waiters: dict[str, Waiters] = {}
        self._readers: dict[str, list[Updates]] = defaultdict(list)
        self._progress: dict[str, Progressed] = {}
        self._streamed: dict[str, StreamedText] = {}
        self.log_versions: dict[str, int] = {}
        """Jobs whose logs are watched, and how often each has grown since."""

    def hear(self, strides: Sequence[Stride]) -> None:
        """After a commit."""
        if not (self._waiters or self._readers or self._progress or self._streamed):
            return
        for stride in strides:
            ends = stride.path.after in TERMINAL
            if self._readers:
                self._tell_moves(stride, ends)
            if ends:
                self._end(stride.jobs)

    def _tell_moves(self, stride: Stride, ends: bool) -> None:
        for job in stride.jobs:
            job_id = job.request.job_id
            if job_id in self._readers:
                for entry in stride.transitions(job):
                    self._tell(job_id, Moved(entry))
                if ends:
                    self._tell(job_id, None)

    def _end(self, jobs: Sequence[Job]) -> None:
        waiters, progress, streamed = self._waiters, self._progress, self._streamed
        for job in jobs:
            job_id = job.request.job_id
            if progress:
                progress.pop(job_id, None)
            if streamed:
                streamed.pop(job_id, None)
            for tell in waiters.pop(job_id, ()):
                tell(job)

    def _tell(self, job_id: str, update: JobUpdate | None) -> None:
        for reader in self._readers[job_id]:
            reader.put_nowait(update)

    def subscribe(self, bus: Bus) -> Subscription:
        return bus.subscribe(PROGRESS, self._take_in)

    async def _take_in(self, messages: list[AnyMessage]) -> None:
        lines: list[LogLine] = []
        for message in messages:
            match message:
                case JobProgress(job_id, _, fraction, said) if self._is_held(job_id):
                    progress = Progressed(job_id, fraction, said)
                    self._progress[job_id] = progress
                    if job_id in self._readers:
                        self._tell(job_id, progress)
                case JobLog(job_id, attempt, at, level, text):
                    line = LogLine(job_id, attempt, at, level, text)
                    lines.append(line)
                    if job_id in self.log_versions:
                        self.log_versions[job_id] += 1
                    if job_id in self._readers:
                        self._tell(job_id, Logged(line))
                case JobPiece(job_id, attempt, n, text) if self._is_held(job_id):
                    self._take_piece(Streamed(job_id, attempt, n, text))
        if lines:
            self._store.write_log(lines)

    def _take_piece(self, piece: Streamed) -> None:
        told = self._streamed.get(piece.job_id)
        readers = self._readers.get(piece.job_id, ())
        if piece.n == 1 and (told is None or piece.attempt > told.attempt):
            told = self._streamed[piece.job_id] = StreamedText(piece.attempt)
            for reader in readers:
                reader.has_gap = False
        if told is None or (piece.attempt, piece.n) != (told.attempt, told.n + 1):
            return  # of an attempt that is over, told before, or after one that was lost
        told.add(piece)
        for reader in readers:
            if not reader.has_gap:
                reader.put_nowait(piece)

    def progress_of(self, job_id: str) -> Progressed | None:
        return self._progress.get(job_id)

    @property
    def progress(self) -> Mapping[str, Progressed]:
        """The latest of each job that has told any."""
        return self._progress

    def watch_logs(self, job_ids: Iterable[str]) -> None:
        """Count from now on whenever the log of one of these jobs grows."""
        self.log_versions = {job_id: self.log_versions.get(job_id, 0) for job_id in job_ids}

    async def ended(self, job_id: str) -> Job:
        """The final record of a job, once it has ended; its retries are others. Raises NotFound."""
        end: asyncio.Future[Job] = asyncio.get_running_loop().create_future()

        def tell(job: Job) -> None:
            if not end.done():
                end.set_result(job)

        self.listen((job_id,), (tell,))
        try:
            # Read after registering: the job may end while the store is read.
            job = await self._store.get(job_id)
            if job is None and not end.done():
                raise NotFound(f"no job {job_id!r}", hint="'penstock ps' lists the jobs there are")
            return job if job is not None and job.is_final else await end
        finally:
            self.forget((job_id,), (tell,))

    def listen(self, job_ids: Sequence[str], waiters: Waiters) -> None:
        """Call `waiters` with the final record of each job, once, when it ends after this."""
        before = self._waiters
        if before.keys().isdisjoint(job_ids):
            before.update(dict.fromkeys(job_ids, waiters))
        else:
            for job_id in job_ids:
                before[job_id] = before.get(job_id, ()) + waiters

    def forget(self, job_ids: Iterable[str], waiters: Waiters) -> None:
        for job_id in job_ids:
            known = self._waiters.get(job_id, ())
            if known == waiters:
                del self._waiters[job_id]
            elif known:
                self._waiters[job_id] = tuple(one for one in known if one not in waiters)

    async def follow(
        self, job_id: str, after_log: int | None = 0, after_move: int | None = None
    ) -> AsyncGenerator[JobUpdate, None]:
        """What happens to a job until its end; see `EngineApi.follow`."""
        with self.reading(job_id) as updates:
            # The store is read after the reader is registered: nothing falls between.
            job = await self._store.get(job_id)
            ended = job is None or job.is_final
            known = 0
            if after_move is not None:
                known = after_move
                for entry in await self._store.history(job_id):
                    if entry.n > known:
                        known = entry.n
                        yield Moved(entry)
            update: JobUpdate | None = None
            while True:
                if update is None or isinstance(update, Logged):
                    if after_log is not None:
                        async for line in self._new_lines(job_id, after_log):
                            after_log = line.n
                            yield Logged(line)
                elif not (isinstance(update, Moved) and update.transition.n <= known):
                    yield update
                if ended:
                    return
                update = await updates.get()
                ended = update is None

    async def _new_lines(self, job_id: str, after: int) -> AsyncIterator[LogLine]:
        await self._store.apply([])  # lines ride with a commit: see this one through
        while lines := await self._store.read_log(job_id, after):
            for line in lines:
                yield line
            after = lines[-1].n

    @contextmanager
    def reading(self, job_id: str) -> Generator[asyncio.Queue[JobUpdate | None]]:
        """A queue of what happens to a job from now on; None when it has ended."""
        queue = Updates()
        self._readers[job_id].append(queue)
        if (progress := self._progress.get(job_id)) is not None:
            queue.put_nowait(progress)
        if (told := self._streamed.get(job_id)) is not None:
            queue.has_gap = told.room < 0
            for piece in told.kept:
                queue.put_nowait(piece)
        try:
            yield queue
        finally:
            self._readers[job_id].remove(queue)
            if not self._readers[job_id]:
                del self._readers[job_id]


# -- the whole journal ---------------------------------------------------------

_LARGEST = 500
"""Events in a batch."""
_READ = _LARGEST - 15
"""Events asked for at once: a move's steps are never parted, so a few more may come."""
_KEPT = 32
"""Batches kept for readers that are a little late."""
_GATHER = 0.02
"""Seconds after a batch in which the next one gathers."""
_EACH = 50e-6
"""Seconds more for each reader, so that a crowd leaves the loop time for its own work."""
_PULSE = 5.0
"""Seconds between the signs of life that readers get while nothing happens for them."""
_RETRY = 1.0
"""Seconds after which a store that failed is asked again."""


class JournalHub:
    """Tells readers what happens, from any place in the journal on."""

    def __init__(
        self, store: Ledger, clock: Clock, *, kept: int = _KEPT, pulse: float = _PULSE
    ) -> None:
        self._store, self._clock, self._pulse = store, clock, pulse
        self._readers: WeakSet[JournalReader] = WeakSet()
        self._ring: deque[_KeptBatch] = deque(maxlen=kept)
        self.head = 0
        """Up to where the shared reading has come."""
        self._task: asyncio.Task[None] | None = None
        self._moved = asyncio.Event()
        self.news = asyncio.Event()
        """Set when there is something for readers that have seen everything."""
        self.beats = 0
        """Counts the signs of life."""
        self.closed = False

    @property
    def readers(self) -> int:
        return len(self._readers)

    def hear(self, strides: Sequence[Stride]) -> None:
        """After a commit."""
        if self._task is not None:
            self._moved.set()

    def events(self, after: int | None = None, tenant: str | None = None) -> JournalReader:
        """What was committed after a cursor (None: from now on), then what is; until closed.

        With a tenant, only its events are told, while the cursor moves past the others.
        """
        return JournalReader(self, after, tenant)

    async def close(self) -> None:
        """End every reader's stream."""
        self.closed = True
        self.news.set()
        if (task := self._task) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    # -- once for all -------------------------------------------------------------

    async def join(self, reader: JournalReader) -> int:
        """From now on, read along for this reader, too. Returns where the journal ends."""
        last = await self._retried(self._store.last_event)
        self._readers.add(reader)
        if self._task is None and not self.closed:
            self.head = last
            self._task = asyncio.create_task(self._read_along(), name="penstock journal")
        return last

    def leave(self, reader: JournalReader) -> None:
        self._readers.discard(reader)
        self._moved.set()

    async def _read_along(self) -> None:
        due = self._clock.monotonic() + self._pulse
        try:
            while self._readers:
                self._moved.clear()
                batch = await self._read(self.head)
                if batch.events:
                    self._ring.append(_KeptBatch(self.head, batch))
                    self.head = batch.cursor
                if is_due := self._clock.monotonic() >= due:
                    self.beats += 1
                    due = self._clock.monotonic() + self._pulse
                if batch.events or is_due:
                    self.wake()
                await self._pause(len(batch.events), due)
        finally:
            self._ring.clear()
            self._task = None

    async def _pause(self, read: int, due: float) -> None:
        """Let others work and more gather, or wait until something happens or is due."""
        if read:
            gather = 0 if read >= _READ else _GATHER
            await self._clock.sleep(self.readers * _EACH + gather)
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, due - self._clock.monotonic())):
                await self._moved.wait()

    def wake(self) -> None:
        """There is something new for readers."""
        told, self.news = self.news, asyncio.Event()
        told.set()

    # -- each for itself ----------------------------------------------------------

    async def after(self, cursor: int) -> _KeptBatch | None:
        """What comes next after a cursor; None while nothing does."""
        ring = self._ring
        start = ring[0].after if ring else self.head
        if cursor < start:
            batch = await self._read(cursor)
            if not batch.events:  # all of it up to `start` has been pruned
                batch = EventBatch((), start)
            return _KeptBatch(cursor, batch)
        if not ring or ring[-1].batch.cursor <= cursor:
            return None
        kept = ring[-1]
        if kept.after > cursor:
            kept = ring[bisect_right(ring, cursor, key=_KeptBatch.end)]
        return kept if kept.after == cursor else kept.rest(cursor)

    async def _read(self, after: int) -> EventBatch:
        events = await self._retried(lambda: self._store.events(after, _READ))
        return EventBatch(tuple(events), events[-1].cursor if events else after)

    async def _retried(self, ask: Callable[[], Awaitable[T]]) -> T:
        while True:
            try:
                return await ask()
            except Exception:
                if self.closed:
                    raise
                log.exception("the journal can't be read; trying again in %g s", _RETRY)
                await self._clock.sleep(_RETRY)


class JournalReader(AsyncIterator[EventBatch]):
    """One reader's place in the journal.

    The first batch is empty and says where reading begins; more empty ones come now and then
    while nothing happens that this reader may see. Waiting for a batch may be cancelled and
    taken up again: nothing is lost by it. A reader that is dropped is gone.
    """

    def __init__(self, hub: JournalHub, after: int | None, tenant: str | None) -> None:
        self._hub, self._after, self._tenant = hub, after, tenant
        self.cursor = -1
        self.began_before = 0
        """The end of the journal when reading began."""
        self._beat = hub.beats

    async def __anext__(self) -> EventBatch:
        hub = self._hub
        if self.cursor < 0:
            return await self._begin()
        while not hub.closed:
            batch = await self.poll()
            if batch is not None and batch.events:
                self._beat = hub.beats
                return batch
            if self._beat != hub.beats:
                self._beat = hub.beats
                return EventBatch((), self.cursor)
            if batch is None:
                await hub.news.wait()
        raise StopAsyncIteration

    async def poll(self) -> EventBatch | None:
        """What comes next, perhaps nothing that this reader may see; None while nothing does."""
        kept = await self._hub.after(self.cursor)
        if kept is None:
            return None
        self.cursor = kept.batch.cursor
        return kept.seen_by(self._tenant)

    def skip(self) -> None:
        """Go on with what is committed from now on."""
        self.cursor = max(self.cursor, self._hub.head)

    async def _begin(self) -> EventBatch:
        last = self.began_before = await self._hub.join(self)
        try:
            self.cursor = last if self._after is None else _checked(self._after, last)
        except InvalidRequest:
            await self.aclose()
            raise
        return EventBatch((), self.cursor)

    async def aclose(self) -> None:
        self._hub.leave(self)


class _KeptBatch:
    """A batch, where it begins, and what each tenant sees of it."""

    __slots__ = ("_seen", "after", "batch")

    def __init__(self, after: int, batch: EventBatch) -> None:
        self.after, self.batch = after, batch
        self._seen: dict[str, EventBatch] = {}

    def end(self) -> int:
        return self.batch.cursor

    def rest(self, cursor: int) -> _KeptBatch:
        """Only what comes after a cursor that lies within."""
        events = tuple(event for event in self.batch.events if event.cursor > cursor)
        return _KeptBatch(cursor, EventBatch(events, self.batch.cursor))

    def seen_by(self, tenant: str | None) -> EventBatch:
        if tenant is None:
            return self.batch
        seen = self._seen.get(tenant)
        if seen is None:
            events = tuple(event for event in self.batch.events if event.tenant == tenant)
            seen = self._seen[tenant] = EventBatch(events, self.batch.cursor)
        return seen


def _checked(after: int, last: int) -> int:
    if not 0 <= after <= last:
        raise InvalidRequest(
            "after",
            f"{after} is not in this engine's journal, which ends at {last}",
            hint="give a cursor that this engine gave, or 0 for everything it has",
        )
    return after
