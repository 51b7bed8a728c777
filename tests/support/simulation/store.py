"""Storage that can be slow, fail to read or to write, and outlive the engine that uses it."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from tests.support.simulation.history import Committed, History, StepsCommitted

from penstock.adapters.memory.store import MemoryBackend
from penstock.adapters.sqlite.store import SqliteBackend
from penstock.control.ledger import Ledger
from penstock.core.errors import StoreFailed, Unstorable
from penstock.core.job import Job
from penstock.core.ledger import Commit, Known, Wanted
from penstock.lifecycles.canonical import JobState
from penstock.ports.clock import Clock
from penstock.ports.store import (
    Backend,
    Durability,
    Extras,
    JobQuery,
    Opened,
    StepCount,
    StepPage,
    StepQuery,
)

P = ParamSpec("P")
T = TypeVar("T")

UNSTORABLE = "half a character"
"""An error code that stands for what no database can hold."""
_ALL = 1 << 30


class SimLedger(Ledger):
    """In an event loop that makes up its time, what takes a thread is done here."""

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        return work(*args, **kwargs)


class FaultyStore(ABC):
    """The storage of simulated engines: fails on demand, tells the history of every commit."""

    def __init__(self, clock: Clock, chance: random.Random, history: History) -> None:
        self.clock, self.chance, self.history = clock, chance, history
        self.failing = False
        """Whether writes fail."""
        self.slowness = 0.0
        """Seconds that a commit, and the answer after it, take at most."""
        self.unreadable = 0.0
        """How likely a read is to fail."""
        self.read_slowness = 0.0
        """Seconds that a read, and the answer after it, take at most."""
        self._max_records = chance.choice([0, 2, 1000])
        """Open jobs that a ledger holds: of the others it must read the rows."""
        self.backend = FaultyBackend(self, self.storage())
        self.ledger: Ledger = SimLedger(self.backend, max_records=self._max_records)

    @abstractmethod
    def storage(self) -> Backend:
        """What the next engine finds."""

    async def dawdle(self, most: float) -> None:
        if most:
            await self.clock.sleep(most * self.chance.random())

    def mend(self) -> None:
        """From now on nothing is slow and nothing fails."""
        self.failing = False
        self.slowness = self.unreadable = self.read_slowness = 0.0

    def crash(self) -> None:
        """As by SIGKILL: only what was committed stays."""
        self.backend.die()
        if (committing := self.ledger._committing) is not None:
            committing.cancel()
        self.backend = FaultyBackend(self, self.storage())
        self.ledger = SimLedger(self.backend, max_records=self._max_records)

    async def close_history(self) -> None:
        """Write down what is held now, and see that the store agrees with itself."""
        ledger = self.ledger
        jobs = await ledger.find(JobQuery(tries=True, limit=_ALL, oldest_first=True))
        self.history.records = {job.job_id: job for job in jobs}
        self.history.logs = {job.job_id: tuple(await ledger.history(job.job_id)) for job in jobs}
        self.history.steps = {
            job.job_id: (await ledger.read_steps(job.job_id)).steps for job in jobs
        }
        tenants = sorted({job.request.tenant for job in jobs})
        self.history.counts = {tenant: await ledger.tally(tenant) for tenant in tenants}
        parents = sorted({job.request.child_of for job in jobs if job.request.child_of})
        self.history.child_counts = {
            parent: await ledger.count_children(parent) for parent in parents
        }
        self.history.mismatches = (await ledger.verify()).mismatches

    async def close(self) -> None:
        await self.ledger.close()


class FaultyBackend:
    """One engine's use of the storage; after a crash of that engine it does nothing more.

    What an answer was read from may have changed by the time at which it arrives.
    """

    def __init__(self, store: FaultyStore, inner: Backend) -> None:
        self._store, self._inner = store, inner
        self.durability = inner.durability
        self._is_dead = False

    def __getattr__(self, name: str) -> Any:
        """What is not slow and does not fail."""
        return getattr(self._inner, name)

    def die(self) -> None:
        self._is_dead = True

    async def _alive(self) -> None:
        if self._is_dead:
            await asyncio.get_running_loop().create_future()

    async def write(self, commit: Commit, extras: Extras, epoch: int) -> None:
        store = self._store
        if any(map(_is_unstorable, commit.changed)):
            raise Unstorable("job", "holds a value that the simulated store can't hold")
        await store.dawdle(store.slowness)
        await self._alive()
        if store.failing:
            raise StoreFailed("the simulated disk refuses to write")
        if any(step.key == UNSTORABLE for _, step in commit.steps):
            raise Unstorable("rows", "hold a value that the simulated store can't hold")
        await self._inner.write(commit, extras, epoch)
        for seq, step in commit.steps:
            job_id = store.ledger.by_seq[seq].job_id
            store.history.events.append(StepsCommitted(job_id, step.attempt))
        at = store.clock.monotonic()
        for stride in commit.strides:
            for job in stride.jobs:
                entries = stride.transitions(job)
                store.history.events.extend(Committed(entry, at) for entry in entries)
        await store.dawdle(store.slowness)
        await self._alive()

    async def open(self, *, own: bool = True) -> Opened:
        return await self._read(lambda: self._inner.open(own=own))

    async def load(self, wanted: Wanted) -> Known:
        return await self._read(lambda: self._inner.load(wanted))

    async def fetch(self, seqs: Sequence[int]) -> list[Job]:
        return await self._read(lambda: self._inner.fetch(seqs))

    async def find(self, query: JobQuery, skip: Collection[int] = ()) -> list[Job]:
        return await self._read(lambda: self._inner.find(query, skip))

    async def read_steps(self, job_id: str, query: StepQuery) -> StepPage:
        return await self._read(lambda: self._inner.read_steps(job_id, query))

    async def count_steps(self, job_id: str) -> list[StepCount]:
        return await self._read(lambda: self._inner.count_steps(job_id))

    async def count_children(
        self, first_try: str, tenant: str | None, skip: Collection[int]
    ) -> dict[JobState, int]:
        return await self._read(lambda: self._inner.count_children(first_try, tenant, skip))

    async def facts(self, prefix: str) -> dict[str, bytes]:
        return await self._read(lambda: self._inner.facts(prefix))

    async def _read(self, read: Callable[[], Awaitable[T]]) -> T:
        store = self._store
        await store.dawdle(store.read_slowness)
        await self._alive()
        if store.unreadable and store.chance.random() < store.unreadable:
            raise StoreFailed("the simulated disk refuses to read")
        answer = await read()
        await store.dawdle(store.read_slowness)
        await self._alive()
        return answer


def _is_unstorable(job: Job) -> bool:
    return job.result is not None and job.result.error_code == UNSTORABLE


class FaultyMemoryStore(FaultyStore):
    def __init__(self, clock: Clock, chance: random.Random, history: History) -> None:
        self.memory = MemoryBackend()
        super().__init__(clock, chance, history)

    def storage(self) -> Backend:
        return self.memory


class FaultySqliteStore(FaultyStore):
    """In a crash, only its file stays."""

    def __init__(self, clock: Clock, chance: random.Random, history: History, folder: Path) -> None:
        self._folder = folder
        self._sqlite: _ThreadlessBackend | None = None
        super().__init__(clock, chance, history)

    def storage(self) -> Backend:
        if self._sqlite is not None:
            self._sqlite.crash()
        is_slow = self.chance.random() < 0.5
        path = self._folder / "penstock.db"
        self._sqlite = _ThreadlessBackend(path, self._wait_for_disk, is_slow=is_slow)
        return self._sqlite

    async def _wait_for_disk(self) -> None:
        await self.dawdle(self.slowness)


class _ThreadlessBackend(SqliteBackend):
    """In an event loop that makes up its time, what takes a thread takes made-up time."""

    def __init__(
        self, path: Path, wait_for_disk: Callable[[], Awaitable[None]], *, is_slow: bool
    ) -> None:
        super().__init__(path, durability=Durability.MEMORY, slow_disk=is_slow)
        self._wait_for_disk = wait_for_disk
        self._is_dead = False
        pool = self._pool

        async def read_here(work: Callable[..., T]) -> T:
            return pool._run(work)

        pool.run = read_here  # type: ignore[method-assign]

    async def _in_thread(self, work: Callable[[], T]) -> T:
        await self._wait_for_disk()
        if self._is_dead:
            await asyncio.get_running_loop().create_future()
        return work()

    def crash(self) -> None:
        """As by SIGKILL: what is not committed is gone."""
        self._is_dead = True
        if self._writer is not None and self._writer.in_transaction:
            self._writer.execute("ROLLBACK")
        self._release()
