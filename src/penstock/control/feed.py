"""Tells whoever waits: callers of `wait`, and readers of a job's updates.

It hears only what was committed (and what workers say of progress), so nobody learns of
an end that could still be lost.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager

from penstock.control.ledger import Ledger
from penstock.core.errors import NotFound
from penstock.core.job import Job
from penstock.core.journal import Stride
from penstock.lifecycles.canonical import TERMINAL
from penstock.ports.bus import (
    PROGRESS,
    AnyMessage,
    Bus,
    JobLog,
    JobPiece,
    JobProgress,
    Subscription,
)
from penstock.ports.engine_api import JobUpdate, Logged, Moved, Progressed, Streamed
from penstock.ports.store import LogLine

_KEPT = 1 << 20
"""Characters of a job's pieces that are kept for readers who come late."""


class Updates(asyncio.Queue[JobUpdate | None]):
    """What one reader has yet to be told."""

    has_gap = False
    """Whether it came too late for a piece of this attempt; then it is told none after that."""


class Told:
    """What one attempt has said so far."""

    __slots__ = ("attempt", "kept", "n", "room")

    def __init__(self, attempt: int) -> None:
        self.attempt, self.n = attempt, 0
        self.kept: list[Streamed] = []
        """Its first pieces, for who comes late."""
        self.room = _KEPT

    def add(self, piece: Streamed) -> None:
        self.n += 1
        self.room -= len(piece.text)
        if self.room >= 0:
            self.kept.append(piece)


class JobSet:
    """Jobs that one caller waits for together; a job that is retried ends with its last try."""

    def __init__(self, feed: Feed, enough: Callable[[dict[str, Job]], bool]) -> None:
        self._feed, self._enough = feed, enough
        self._asked: dict[str, str] = {}
        """By the try that is awaited, the id under which the caller knows the job."""
        self.ended: dict[str, Job] = {}
        """The final records, in the order of their ends for those that ended meanwhile."""
        self._done = asyncio.Event()

    def add(self, job_ids: Iterable[str]) -> None:
        for job_id in job_ids:
            self._await(job_id, job_id)

    def _await(self, job_id: str, asked: str) -> None:
        self._asked[job_id] = asked
        self._feed.listen(job_id, self._tell)

    def find(self, job: Job) -> str | None:
        """What the store says of a job, read after `add`. Returns the retry to be read next."""
        if not job.is_final or job.job_id not in self._asked:
            return None
        self._feed.forget(job.job_id, self._tell)
        self._tell(job)
        return job.successor

    def _tell(self, job: Job) -> None:
        asked = self._asked.pop(job.job_id)
        if job.successor is not None:
            self._await(job.successor, asked)
            return
        self.ended[asked] = job
        if not self._asked or self._enough(self.ended):
            self._done.set()

    async def wait(self, linger: float) -> None:
        """Until enough have ended, and a moment longer for those that end together with them."""
        await self._done.wait()
        if self._asked and linger:
            await asyncio.sleep(linger)

    def close(self) -> None:
        for job_id in self._asked:
            self._feed.forget(job_id, self._tell)


class Feed:
    """Waiters and readers, by job."""

    def __init__(self, store: Ledger, is_held: Callable[[str], bool] = lambda job_id: True) -> None:
        self._store = store
        self._is_held = is_held
        """Whether a worker has this job: what one says of another comes too late."""
        self._waiters: dict[str, list[Callable[[Job], None]]] = defaultdict(list)
        self._readers: dict[str, list[Updates]] = defaultdict(list)
        self._progress: dict[str, Progressed] = {}
        self._told: dict[str, Told] = {}

    def hear(self, strides: Sequence[Stride]) -> None:
        """After a commit."""
        if not (self._waiters or self._readers or self._progress or self._told):
            return
        for stride in strides:
            ends = stride.path.after in TERMINAL
            if not (ends or self._readers):
                continue
            for job in stride.jobs:
                job_id = job.request.job_id
                if self._readers and job_id in self._readers:
                    for entry in stride.transitions(job):
                        self._tell(job_id, Moved(entry))
                    if ends:
                        self._tell(job_id, None)
                if ends:
                    self._end(job)

    def _end(self, job: Job) -> None:
        job_id = job.request.job_id
        self._progress.pop(job_id, None)
        self._told.pop(job_id, None)
        for tell in self._waiters.pop(job_id, ()):
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
                    if job_id in self._readers:
                        self._tell(job_id, Logged(line))
                case JobPiece(job_id, attempt, n, text) if self._is_held(job_id):
                    self._take_piece(Streamed(job_id, attempt, n, text))
        if lines:
            self._store.write_log(lines)

    def _take_piece(self, piece: Streamed) -> None:
        told = self._told.get(piece.job_id)
        readers = self._readers.get(piece.job_id, ())
        if piece.n == 1 and (told is None or piece.attempt > told.attempt):
            told = self._told[piece.job_id] = Told(piece.attempt)
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

    async def ended(self, job_id: str) -> Job:
        """The final record of a job, once it has ended; its retries are others. Raises NotFound."""
        end: asyncio.Future[Job] = asyncio.get_running_loop().create_future()

        def tell(job: Job) -> None:
            if not end.done():
                end.set_result(job)

        self.listen(job_id, tell)
        try:
            # Read after registering: the job may end while the store is read.
            job = await self._store.get(job_id)
            if job is None and not end.done():
                raise NotFound(f"no job {job_id!r}", hint="'penstock ps' lists the jobs there are")
            return job if job is not None and job.is_final else await end
        finally:
            self.forget(job_id, tell)

    def listen(self, job_id: str, tell: Callable[[Job], None]) -> None:
        """Call `tell` with the final record of a job, once, when it ends after this."""
        self._waiters[job_id].append(tell)

    def forget(self, job_id: str, tell: Callable[[Job], None]) -> None:
        waiters = self._waiters.get(job_id)
        if waiters is not None:
            if tell in waiters:
                waiters.remove(tell)
            if not waiters:
                del self._waiters[job_id]

    @contextmanager
    def reading(self, job_id: str) -> Generator[asyncio.Queue[JobUpdate | None]]:
        """A queue of what happens to a job from now on; None when it has ended."""
        queue = Updates()
        self._readers[job_id].append(queue)
        if (progress := self._progress.get(job_id)) is not None:
            queue.put_nowait(progress)
        if (told := self._told.get(job_id)) is not None:
            queue.has_gap = told.room < 0
            for piece in told.kept:
                queue.put_nowait(piece)
        try:
            yield queue
        finally:
            self._readers[job_id].remove(queue)
            if not self._readers[job_id]:
                del self._readers[job_id]
