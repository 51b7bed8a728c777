"""A database that can be slow, fail to read or to write, and outlive the engine that uses it."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from penstock.adapters.memory.store import MemoryStore
from penstock.adapters.sqlite.store import SqliteStore
from penstock.core.errors import StoreFailed, Unstorable
from penstock.core.job import Job
from penstock.core.transition import Answer, Change, Move
from penstock.ports.clock import Clock
from penstock.ports.store import Durability, JobQuery, Listener
from penstock.testing.history import Committed, History

T = TypeVar("T")

UNSTORABLE = "half a character"
"""An error code that stands for what no database can hold."""
_ALL = 1 << 30


def _is_unstorable(change: Change) -> bool:
    result = change.result if isinstance(change, Move) else None
    return result is not None and result.error_code == UNSTORABLE


class FaultyStore(ABC):
    """The Store of a simulated engine: fails on demand, tells the history of every commit.

    What an answer was read from may have changed by the time at which it arrives.
    """

    def __init__(self, clock: Clock, chance: random.Random, history: History) -> None:
        self._clock, self._chance, self._history = clock, chance, history
        self.failing = False
        """Whether writes fail."""
        self.slowness = 0.0
        """Seconds that a commit, and the answer after it, take at most."""
        self.unreadable = 0.0
        """How likely a read is to fail."""
        self.read_slowness = 0.0
        """Seconds that a read, and the answer after it, take at most."""
        self.inner = self._open()
        self.inner.listen(self._note)

    @abstractmethod
    def _open(self) -> MemoryStore | SqliteStore: ...

    def __getattr__(self, name: str) -> Any:
        """What is not slow and does not fail."""
        return getattr(self.inner, name)

    def _note(self, moved: Sequence[Answer]) -> None:
        for answer in moved:
            self._history.events.extend(map(Committed, answer.transitions))

    def listen(self, listener: Listener) -> Callable[[], None]:
        return self.inner.listen(listener)

    # -- writing ------------------------------------------------------------------

    async def apply(self, changes: Sequence[Change]) -> list[Answer]:
        if any(map(_is_unstorable, changes)):
            raise Unstorable("job", "holds a value that the simulated store can't hold")
        return await self._write(lambda: self.inner.apply(changes))

    async def remember(self, name: str, value: bytes) -> None:
        await self._write(lambda: self.inner.remember(name, value))

    async def forget(self, name: str) -> bool:
        return await self._write(lambda: self.inner.forget(name))

    async def _write(self, write: Callable[[], Awaitable[T]]) -> T:
        await self._dawdle(self.slowness)
        if self.failing:
            raise StoreFailed("the simulated disk refuses to write")
        answer = await write()
        await self._dawdle(self.slowness)
        return answer

    # -- reading ------------------------------------------------------------------

    async def get(self, job_id: str) -> Job | None:
        return await self._read(lambda: self.inner.get(job_id))

    async def fetch(self, seqs: Sequence[int]) -> list[Job]:
        return await self._read(lambda: self.inner.fetch(seqs))

    async def find(self, query: JobQuery) -> list[Job]:
        return await self._read(lambda: self.inner.find(query))

    async def unfinished(self) -> list[Job]:
        return await self._read(lambda: self.inner.unfinished())

    async def recall(self, name: str) -> bytes | None:
        return await self._read(lambda: self.inner.recall(name))

    async def _read(self, read: Callable[[], Awaitable[T]]) -> T:
        await self._dawdle(self.read_slowness)
        if self.unreadable and self._chance.random() < self.unreadable:
            raise StoreFailed("the simulated disk refuses to read")
        answer = await read()
        await self._dawdle(self.read_slowness)
        return answer

    async def _dawdle(self, most: float) -> None:
        if most:
            await self._clock.sleep(most * self._chance.random())

    # -- its own life -------------------------------------------------------------

    def mend(self) -> None:
        """From now on nothing is slow and nothing fails."""
        self.failing = False
        self.slowness = self.unreadable = self.read_slowness = 0.0

    def crash(self) -> None:
        """Whoever listened is gone; what was committed stays."""
        self.inner.listeners.clear()
        self.inner.listen(self._note)

    async def close_history(self) -> None:
        """Write down what is held now, and see that the store agrees with itself."""
        jobs = await self.inner.find(JobQuery(limit=_ALL, oldest_first=True))
        self._history.records = {job.job_id: job for job in jobs}
        self._history.logs = {
            job.job_id: tuple(await self.inner.history(job.job_id)) for job in jobs
        }
        self._history.mismatches = (await self.inner.verify()).mismatches

    async def close(self) -> None:
        await self.inner.close()


class FaultyMemoryStore(FaultyStore):
    inner: MemoryStore

    def _open(self) -> MemoryStore:
        return MemoryStore()


class FaultySqliteStore(FaultyStore):
    """In a crash, only its file stays."""

    inner: _ThreadlessStore

    def __init__(self, clock: Clock, chance: random.Random, history: History, folder: Path) -> None:
        self._folder = folder
        super().__init__(clock, chance, history)

    def _open(self) -> _ThreadlessStore:
        return _ThreadlessStore(
            self._folder / "penstock.db", self._wait_for_disk, is_slow=self._chance.random() < 0.5
        )

    async def _wait_for_disk(self) -> None:
        await self._dawdle(self.slowness)

    def crash(self) -> None:
        self.inner.crash()
        self.inner = self._open()
        self.inner.listen(self._note)


class _ThreadlessStore(SqliteStore):
    """In an event loop that makes up its time, what takes a thread takes made-up time."""

    def __init__(
        self, path: Path, wait_for_disk: Callable[[], Awaitable[None]], *, is_slow: bool
    ) -> None:
        super().__init__(path, durability=Durability.MEMORY, slow_disk=is_slow)
        self._wait_for_disk = wait_for_disk
        reading = self._reader._aside

        async def read_here(work: Callable[..., T]) -> T:
            return reading._run(work)

        reading.run = read_here  # type: ignore[method-assign]

    async def _in_thread(self, work: Callable[[], None]) -> None:
        await self._wait_for_disk()
        work()

    def crash(self) -> None:
        """As by SIGKILL: what is not committed is gone."""
        self._closed = True
        if self._committing is not None:
            self._committing.cancel()
        if self._writer.in_transaction:
            self._writer.execute("ROLLBACK")
        self._release()

    def _release(self) -> None:
        self._thread.shutdown()
        self._reader.close()
        self._writer.close()
        self._lock.close()
