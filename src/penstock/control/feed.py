"""Tells whoever waits: callers of `wait`, and readers of a job's updates.

It hears only what was committed (and what workers say of progress), so nobody learns of
an end that could still be lost.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from penstock.core.errors import NotFound
from penstock.core.job import Job
from penstock.core.transition import Answer
from penstock.ports.bus import (
    PROGRESS,
    AnyMessage,
    Bus,
    JobLog,
    JobPiece,
    JobProgress,
    Subscription,
)
from penstock.ports.desk import JobUpdate, Logged, Moved, Progressed, Streamed
from penstock.ports.store import LogLine, Store

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


class Feed:
    """Waiters and readers, by job."""

    def __init__(self, store: Store, is_held: Callable[[str], bool] = lambda job_id: True) -> None:
        self._store = store
        self._is_held = is_held
        """Whether a worker has this job: what one says of another comes too late."""
        self._waiters: dict[str, list[asyncio.Future[Job]]] = defaultdict(list)
        self._readers: dict[str, list[Updates]] = defaultdict(list)
        self._progress: dict[str, Progressed] = {}
        self._told: dict[str, Told] = {}

    def hear(self, moved: Sequence[Answer]) -> None:
        """After a commit."""
        if not (self._waiters or self._readers or self._progress or self._told):
            return
        for answer in moved:
            job = answer.job
            assert job is not None
            job_id = job.request.job_id
            if self._readers and job_id in self._readers:
                for entry in answer.transitions:
                    self._tell(job_id, Moved(entry))
                if job.finished_at is not None:
                    self._tell(job_id, None)
            if job.finished_at is not None:
                self._progress.pop(job_id, None)
                self._told.pop(job_id, None)
                for waiter in self._waiters.pop(job_id, ()):
                    if not waiter.done():
                        waiter.set_result(job)

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
        """The final record of a job, once it has ended. Raises NotFound."""
        waiter: asyncio.Future[Job] = asyncio.get_running_loop().create_future()
        waiters = self._waiters[job_id]
        waiters.append(waiter)
        try:
            # Read after registering: the job may end while the store is read.
            job = await self._store.get(job_id)
            if job is None and not waiter.done():
                raise NotFound(f"no job {job_id!r}", hint="'penstock ps' lists the jobs there are")
            return job if job is not None and job.is_final else await waiter
        finally:
            if waiter in waiters:
                waiters.remove(waiter)
            if not waiters:
                self._waiters.pop(job_id, None)

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
