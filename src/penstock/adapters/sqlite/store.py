"""The default store: one SQLite file, one writer, many changes a commit.

While a commit is under way, changes gather; the next commit takes them all. At low load a
commit carries one change and costs one flush, at high load it carries a thousand for the
same price. Nothing waits on a timer.

Statements run in the event loop itself. So does the flush of a small commit, because that is
soonest done; the flush of a large one, or any on a slow disk, is waited for in a thread,
and the engine goes on meanwhile. The statements of a very large one run there as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import apsw

from penstock.adapters.sqlite import upkeep
from penstock.adapters.sqlite.commit import Commit, Counts
from penstock.adapters.sqlite.database import WriterLock, open_writer, transaction
from penstock.adapters.sqlite.reader import SqliteReader
from penstock.adapters.sqlite.riders import Riders, number_lines
from penstock.adapters.sqlite.sharing import to_the_end
from penstock.core.errors import StoreFailed, Unavailable, Unstorable
from penstock.core.job import Job
from penstock.core.transition import Answer, Change, Transition
from penstock.lifecycles.canonical import JobState
from penstock.ports.failpoint import failpoint
from penstock.ports.listeners import Listeners
from penstock.ports.store import (
    AuditEntry,
    AuditQuery,
    Durability,
    JobQuery,
    JournalEvent,
    Listener,
    LogLine,
    Pruned,
    Verified,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
Waiting = list[tuple[Sequence[Change], asyncio.Future[list[Answer]]]]

_CACHED = 20_000
"""How many unfinished jobs are kept at hand; others are read when they are needed."""
_FEW = 8
"""Callers up to which a commit does not look whether more are coming."""
_SHORT = 64
"""Changes up to which a commit is waited for in the event loop."""
_LONG = 5000
"""Changes beyond which a commit is decided and written in a thread, too."""
_MOST_KEPT = 100_000
"""Log lines, and audit entries, kept while the disk refuses them."""


class SqliteStore:
    """See the module and `penstock.ports.store.Store`."""

    def __init__(
        self,
        path: Path,
        *,
        durability: Durability = Durability.DISK,
        slow_disk: bool = False,
        max_log_lines: int = 10_000,
    ) -> None:
        self.path = path
        self.durability = durability
        self._lock = WriterLock(path.with_suffix(".lock"))
        try:
            self._writer = open_writer(path, durability)
            self._reader = SqliteReader(path)
        except BaseException:
            self._lock.close()
            raise
        self._thread = ThreadPoolExecutor(1, "penstock-store")
        self._sql, self._codec = self._reader.sql, self._reader.codec
        self._next_seq: int = self._writer.execute(self._sql["last_seq"]).get + 1
        self._next_row: int = self._writer.execute(self._sql["last_row"]).get + 1
        self._tally = self._reader.load_tally()
        # Ordered, because a plain dict searches for its oldest key past all that were removed.
        self._cache: OrderedDict[str, Job] = OrderedDict()
        self._by_seq: dict[int, Job] = {}
        self.listeners: Listeners[Sequence[Answer]] = Listeners()
        self._waiting: Waiting = []
        self._apart: deque[tuple[Waiting, Riders]] = deque()
        self._riders = Riders()
        self._line_counts: dict[int, int] = {}
        self._max_log_lines = max_log_lines
        self._committing: asyncio.Handle | asyncio.Task[None] | None = None
        self._crowd = 0
        """How many waited when a commit was last put off for more."""
        self._slow_disk = slow_disk
        self._closed = False

    # -- changing -----------------------------------------------------------------

    async def apply(self, changes: Sequence[Change]) -> list[Answer]:
        if self._closed:
            raise Unavailable("the store is closed")
        future: asyncio.Future[list[Answer]] = asyncio.get_running_loop().create_future()
        self._waiting.append((changes, future))
        self._commit_soon()
        return await future

    def listen(self, listener: Listener) -> Callable[[], None]:
        return self.listeners.add(listener)

    def write_log(self, lines: Sequence[LogLine]) -> None:
        self._riders.lines.extend(lines)
        self._commit_soon()

    def write_audit(self, entries: Sequence[AuditEntry]) -> None:
        self._riders.audit.extend(entries)
        self._commit_soon()

    def _commit_soon(self) -> None:
        if self._committing is None:
            self._committing = asyncio.get_running_loop().call_soon(self._commit)

    def _commit(self) -> None:
        """Write what has gathered; wait for the disk here if that is short, else aside."""
        self._committing = None
        if _FEW < len(self._waiting) > self._crowd:
            # Many come at once, and some are still on their way through this very loop.
            self._crowd = len(self._waiting)
            self._commit_soon()
            return
        self._crowd = 0
        waiting, riders = self._gather()
        commit = Commit(
            self._writer,
            self.path,
            self._sql,
            self._codec,
            self._cache,
            self._next_seq,
            self._next_row,
        )
        groups = [changes for changes, _ in waiting]
        lines = number_lines(riders.lines, self._line_counts, self._max_log_lines)
        stage = partial(commit.stage, groups, lines, riders.audit)
        is_long = sum(map(len, groups)) > _LONG
        try:
            if not is_long:
                stage()
            if is_long or self._slow_disk or len(commit.moved) > _SHORT:
                steps = (stage, commit.seal) if is_long else (commit.seal,)
                self._go_aside(partial(_run, steps), commit, waiting, riders)
                return
            commit.seal()
        except Exception as error:
            self._give_up(waiting, riders, error)
        else:
            self._adopt(commit, waiting)

    def _go_aside(
        self, work: Callable[[], None], commit: Commit, waiting: Waiting, riders: Riders
    ) -> None:
        sealing = self._seal_aside(work, commit, waiting, riders)
        self._committing = task = asyncio.get_running_loop().create_task(sealing)

        def finish(task: asyncio.Task[None]) -> None:
            if self._committing is not task:
                return
            self._committing = None  # it was cancelled before it began: do its work here
            try:
                work()
            except Exception as error:
                self._give_up(waiting, riders, error)
            else:
                self._adopt(commit, waiting)

        task.add_done_callback(finish)

    async def _seal_aside(
        self,
        work: Callable[[], None],
        commit: Commit,
        waiting: Waiting,
        riders: Riders,
    ) -> None:
        try:
            await self._in_thread(work)
        except Exception as error:
            self._committing = None
            self._give_up(waiting, riders, error)
        else:
            self._committing = None
            self._adopt(commit, waiting)

    async def _in_thread(self, work: Callable[[], None]) -> None:
        await to_the_end(asyncio.get_running_loop().run_in_executor(self._thread, work))

    def _gather(self) -> tuple[Waiting, Riders]:
        """What the next commit is to carry."""
        if self._apart:
            return self._apart.popleft()
        waiting, self._waiting = self._waiting, []
        riders, self._riders = self._riders, Riders()
        return waiting, riders

    def _give_up(self, waiting: Waiting, riders: Riders, error: Exception) -> None:
        """Nothing was written: callers hear why, and riders go with the next commit.

        If it failed for what was to be written and not for the disk, each caller's is tried
        again alone, so that only the one whose change it is hears of it. Riders are halved
        until the one is found that can't be written: it is dropped.
        """
        if _is_unwritable(error):
            parts: list[tuple[Waiting, Riders]] = [([one], Riders()) for one in waiting]
            parts.extend(([], part) for part in riders.apart())
            if len(parts) > 1:
                self._apart.extendleft(reversed(parts))
                self._commit_soon()
                return
            if riders:
                log.error("%s can't be stored and are dropped: %s", riders, error)
        else:
            self._riders.lines[:0] = riders.lines[-_MOST_KEPT:]
            self._riders.audit[:0] = riders.audit[-_MOST_KEPT:]
        for _, future in waiting:
            if not future.done():
                future.set_exception(_translated(error))
        if self._apart or self._waiting:
            self._commit_soon()

    def _adopt(self, commit: Commit, waiting: Waiting) -> None:
        """What was committed is now true: tell the listeners, then the callers."""
        failpoint("after-commit")
        self._next_seq, self._next_row = commit.next_seq, commit.next_row
        self._tally.add(commit.counts)
        self._cache_heads(commit.heads)
        for seq, count in commit.line_counts.items():
            if seq in self._by_seq:
                self._line_counts[seq] = count
        if commit.moved:
            self.listeners.tell(commit.moved)
        for (_, future), answers in zip(waiting, commit.answers, strict=True):
            if not future.done():
                future.set_result(answers)
        if self._apart or self._waiting or self._riders:
            self._commit_soon()

    def _cache_heads(self, heads: dict[str, Job]) -> None:
        cache, by_seq = self._cache, self._by_seq
        for job_id, job in heads.items():
            if job.finished_at is None:
                cache[job_id] = by_seq[job.seq] = job
            else:
                cache.pop(job_id, None)
                by_seq.pop(job.seq, None)
                self._line_counts.pop(job.seq, None)
        while len(cache) > _CACHED:
            by_seq.pop(cache.popitem(last=False)[1].seq, None)

    # -- reading ------------------------------------------------------------------

    async def get(self, job_id: str) -> Job | None:
        return self._cache.get(job_id) or await self._reader.get(job_id)

    async def fetch(self, seqs: Sequence[int]) -> list[Job]:
        found = {seq: job for seq in seqs if (job := self._by_seq.get(seq)) is not None}
        if len(found) < len(seqs):
            missing = [seq for seq in seqs if seq not in found]
            # The writer knows the newest pages; a reader would have to read them again.
            writer = None if isinstance(self._committing, asyncio.Task) else self._writer
            for job in await self._reader.fetch(missing, writer):
                found[job.seq] = job
                if job.finished_at is None:  # it was asked for to be changed
                    self._cache[job.job_id] = self._by_seq[job.seq] = job
        return [found[seq] for seq in seqs if seq in found]

    async def find(self, query: JobQuery) -> list[Job]:
        return await self._reader.find(query)

    async def unfinished(self) -> list[Job]:
        return await self._reader.unfinished()

    async def history(self, job_id: str) -> list[Transition]:
        return await self._reader.history(job_id)

    async def events(self, after: int, limit: int = 1000) -> list[JournalEvent]:
        return await self._reader.events(after, limit)

    async def last_event(self) -> int:
        return await self._reader.last_event()

    async def tally(self, tenant: str | None = None) -> dict[JobState, int]:
        return self._tally.of(tenant)

    async def read_log(self, job_id: str, after: int = 0, limit: int = 1000) -> list[LogLine]:
        return await self._reader.read_log(job_id, after, limit)

    async def recall(self, name: str) -> bytes | None:
        return await self._reader.recall(name)

    async def recall_all(self, prefix: str) -> dict[str, bytes]:
        return await self._reader.recall_all(prefix)

    async def read_audit(self, query: AuditQuery) -> list[AuditEntry]:
        return await self._reader.read_audit(query)

    async def refers(self, tenant: str, pointer: str) -> bool:
        return await self._reader.refers(tenant, pointer)

    async def pointers(self) -> Iterable[str]:
        return await self._reader.pointers()

    async def verify(self) -> Verified:
        return await self._reader.verify()

    # -- upkeep -------------------------------------------------------------------

    async def prune(
        self, finished_before: float, limit: int, awaited: Container[str] = ()
    ) -> Pruned:
        found = await self._reader.prunable(finished_before, limit, awaited)

        def delete() -> tuple[Pruned, Counts]:
            # Somebody may have begun to wait for one of them while they were looked for.
            seqs = [seq for job_id, seq in found.items() if job_id not in awaited]
            return upkeep.delete(self._writer, self._sql, seqs)

        pruned, gone = await self._alone(delete)
        self._tally.add(gone)
        return pruned

    async def remember(self, name: str, value: bytes) -> None:
        await self._alone(lambda: self._writer.execute(self._sql["remember"], (name, value)))

    async def forget(self, name: str) -> bool:
        def forget() -> bool:
            self._writer.execute(self._sql["forget"], (name,))
            return self._writer.changes() > 0

        return await self._alone(forget)

    async def _alone(self, work: Callable[[], T]) -> T:
        """Write something else than changes, in a transaction of its own."""
        await self._quiet()
        with transaction(self._writer, self.path):
            return work()

    async def _quiet(self) -> None:
        """Wait until no transaction is open."""
        while isinstance(self._committing, asyncio.Task):
            await asyncio.wait((self._committing,))

    async def close(self) -> None:
        """Finish what is under way, then let go of the file."""
        if self._closed:
            return
        self._closed = True
        while self._committing is not None:
            await self._quiet()
            if isinstance(self._committing, asyncio.Handle):
                self._committing.cancel()
                self._commit()
        self._thread.shutdown()
        self._reader.close()
        self._writer.close()
        self._lock.close()


def _run(steps: Iterable[Callable[[], None]]) -> None:
    for step in steps:
        step()


def _is_unwritable(error: Exception) -> bool:
    """Whether no disk could ever take it: a text that is no text, a broken constraint."""
    if isinstance(error, StoreFailed):
        return isinstance(error.__cause__, apsw.ConstraintError)
    return True


def _translated(error: Exception) -> Exception:
    """What a caller is told: to try again makes no sense for what is unwritable."""
    cause = error.__cause__ if isinstance(error, StoreFailed) else error
    if not isinstance(cause, apsw.ConstraintError | ValueError | TypeError | OverflowError):
        return error
    unstorable = Unstorable("job", f"holds a value that can't be stored: {cause}")
    unstorable.__cause__ = cause
    return unstorable
