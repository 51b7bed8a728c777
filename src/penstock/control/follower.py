"""A ledger of a store that another engine owns: it reads along, and changes nothing.

Rows of jobs that are with a worker may lag behind the journal. A follower keeps the records of
those, and brings them up to date before each read, so a read sees all that was committed before.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from penstock.control.engine_api import ReadingEngineApi, how_it_ended
from penstock.control.guard import Guard, Uploads
from penstock.control.ledger import Facts, Ledger
from penstock.core.errors import PenstockError
from penstock.core.job import Job
from penstock.core.journal import catch_up
from penstock.core.ledger import Wanted
from penstock.core.shards import Shard
from penstock.lifecycles.canonical import JobState
from penstock.ports.blobs import Blobs, BlobStat
from penstock.ports.clock import Clock
from penstock.ports.engine_api import Caller, JobCounts
from penstock.ports.store import Backend, FollowedBackend

T = TypeVar("T")


class ReadableBackend(Backend, FollowedBackend, Protocol):
    """A backend that can be read along."""


class Follower(Ledger):
    """The reading part of a Ledger."""

    def __init__(
        self, backend: ReadableBackend, *, shard: Shard | None = None, home: Facts | None = None
    ) -> None:
        super().__init__(backend, own=False, shard=shard, home=home)
        self._backend = backend
        self._epoch_seen = self._page = 0
        self._begun = self._finished = 0
        """Numbers of the looks at the journal."""

    async def open(self) -> None:
        """Take in what is new. Callers that wait for a look share the next one."""
        came = self._begun
        async with self._opening:
            if self._finished > came:
                return
            self._begun += 1
            await self._look()
            self._finished = self._begun

    async def _look(self) -> None:
        newer = await self._backend.newer(self._epoch_seen, self._page)
        if newer.epoch != self._epoch_seen:
            self.lagging.clear()  # an owner whose database went back in time is another one
            self._page = 0
        records = {}
        for seq, job in newer.open_jobs.items():
            known = self.lagging.get(seq)
            records[seq] = job if known is None or known.version <= job.version else known
        catch_up(records, newer.pages)
        for _, strides in newer.pages:
            for seq in {seq for stride in strides for seq in stride.seqs} - records.keys():
                self.lagging.pop(seq, None)  # it has ended
        for seq, job in records.items():
            if job.version > newer.open_jobs[seq].version:
                self.lagging[seq] = job
            else:
                self.lagging.pop(seq, None)
        current = [seq for seq, job in self.lagging.items() if job.pages[-1] <= newer.replayed]
        for seq in current:
            del self.lagging[seq]
        self._epoch_seen = newer.epoch
        self._page = max(self._page, newer.replayed, newer.pages[-1][0] if newer.pages else 0)

    async def get(self, job_id: str) -> Job | None:
        return (await self.get_many([job_id])).get(job_id)

    async def get_many(self, job_ids: Sequence[str]) -> dict[str, Job]:
        await self.open()
        known = (await self.backend.load(Wanted({*job_ids}, set(), set()))).jobs
        return {job_id: self._newest(job) for job_id, job in known.items()}

    async def fetch(self, seqs: Sequence[int]) -> list[Job]:
        await self.open()
        return [self._newest(job) for job in await self.backend.fetch(seqs)]

    def _newest(self, job: Job) -> Job:
        lagging = self.lagging.get(job.seq)
        return job if lagging is None or lagging.version <= job.version else lagging

    async def tally(self, tenant: str | None = None) -> dict[JobState, int]:
        by_topic = await self.open_by_topic(tenant)
        counts = sum((Counter(states) for states in by_topic.values()), Counter[JobState]())
        for (whose, state), count in (await self._backend.count_ended()).items():
            if state is not None and tenant in (None, whose):
                counts[state] += count
        return {state: counts[state] for state in JobState if counts[state]}

    async def retried(self, tenant: str | None = None) -> int:
        ended = await self._backend.count_ended()
        return sum(
            n for (whose, state), n in ended.items() if not state and tenant in (None, whose)
        )

    async def open_by_topic(self, tenant: str | None) -> dict[str, dict[JobState, int]]:
        """The jobs that have not ended."""
        await self.open()
        lagging = [*self.lagging.values()]
        counted = await self._backend.count_open([job.seq for job in lagging])
        counted += [(job.request.tenant, job.request.topic, job.state, 1) for job in lagging]
        found: dict[str, Counter[JobState]] = defaultdict(Counter)
        for whose, topic, state, count in counted:
            if tenant in (None, whose):
                found[topic][state] += count
        return {
            topic: {state: counts[state] for state in JobState if counts[state]}
            for topic, counts in sorted(found.items())
        }

    async def close(self) -> None:
        await self.backend.close()


class OwnerNeeded(Exception):
    """Only the engine that owns the store can answer this."""


class FollowingEngineApi(ReadingEngineApi):
    """The part of an EngineApi that an engine can answer which does not own the store."""

    def __init__(self, store: Follower, blobs: Blobs, caller: Caller, clock: Clock) -> None:
        super().__init__(store, Guard(caller, store, clock))
        self._follower, self._blobs = store, blobs
        self._uploads = Uploads(store, clock, caller.tenant)

    async def counts(self) -> JobCounts:
        tenant, store = self._guard.caller.tenant, self._follower
        return JobCounts(await store.tally(tenant), await store.open_by_topic(tenant))

    async def why(self, job_id: str) -> str:
        """Raises OwnerNeeded for a job that goes on."""
        job = await self.get(job_id)
        if not job.is_final or job.successor is not None:
            raise OwnerNeeded
        return how_it_ended(job)

    async def wait(self, job_id: str, timeout: float | None = None) -> Job:
        """The final record. Raises OwnerNeeded for a job that goes on."""
        job = await self.get(job_id)
        while job.successor is not None:
            job = await self.get(job.successor)
        if not job.is_final:
            raise OwnerNeeded
        return job

    async def get_blob(self, uri: str) -> bytes:
        """Blobs are named by their content: what is found here is right. Raises OwnerNeeded."""
        return await self._found(uri, self._blobs.get, uri)

    async def stat_blob(self, uri: str, *, job_id: str | None = None) -> BlobStat:
        if job_id is not None:
            raise OwnerNeeded
        return await self._found(uri, self._blobs.stat, uri)

    async def read_blob(self, uri: str, start: int, length: int) -> bytes:
        return await self._found(uri, self._blobs.read, uri, start, length)

    async def _found(self, uri: str, read: Callable[..., Awaitable[T]], *args: Any) -> T:
        try:
            await self._uploads.check(uri)
            return await read(*args)
        except PenstockError:
            raise OwnerNeeded from None
