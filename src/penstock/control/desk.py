"""The engine's own Desk: what the gateway, the board and the store can tell a caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from penstock.control.backlog import Lane
from penstock.control.board import Board
from penstock.control.feed import Feed
from penstock.control.gateway import Gateway, check_batch
from penstock.control.placement import why_waiting
from penstock.control.pruner import Pruner
from penstock.control.safety import SafetyKernel
from penstock.core.errors import WaitTimedOut
from penstock.core.job import Job, JobRequest
from penstock.core.policy import ready_at
from penstock.core.transition import Transition
from penstock.lifecycles.canonical import JobState
from penstock.ports.blobs import Blobs
from penstock.ports.clock import Clock
from penstock.ports.desk import (
    Cancellation,
    Cleaned,
    EngineStatus,
    JobUpdate,
    Logged,
    PoolView,
    WorkerView,
)
from penstock.ports.store import JobQuery, LogLine, Store, Verified

_BATCH = 100_000


class EngineDesk:
    """See `penstock.ports.desk.Desk`."""

    def __init__(
        self,
        store: Store,
        blobs: Blobs,
        board: Board,
        gateway: Gateway,
        feed: Feed,
        pruner: Pruner,
        kernel: SafetyKernel,
        clock: Clock,
        about: EngineStatus,
    ) -> None:
        self._store, self._blobs, self._board = store, blobs, board
        self._gateway, self._feed, self._pruner = gateway, feed, pruner
        self._kernel, self._clock, self._about = kernel, clock, about

    async def submit(self, requests: Sequence[JobRequest]) -> list[Job]:
        check_batch(requests, _BATCH)
        return await self._gateway.submit(requests)

    async def get(self, job_id: str) -> Job:
        return await self._gateway.find(job_id)

    async def find(self, query: JobQuery) -> list[Job]:
        return await self._store.find(query)

    async def history(self, job_id: str) -> list[Transition]:
        return await self._store.history(job_id)

    async def why(self, job_id: str) -> str:
        job = await self.get(job_id)
        match job.state:
            case JobState.PENDING | JobState.SCHEDULED:
                return self._why_waiting(job)
            case JobState.DISPATCHED | JobState.RUNNING:
                return self._what_happens(job)
            case _:
                return _how_it_ended(job)

    def _why_waiting(self, job: Job) -> str:
        if (doubt := self._board.doubtful.get(job.seq)) is not None:
            return f"it is parked: {doubt}"
        start = ready_at(job.request, job.accepted_at)
        if start > (now := self._clock.now()):
            kind = "its retry is backed off" if job.request.retry_number else "it is delayed"
            return f"{kind}: it may start in {start - now:.1f} s"
        roster = self._board.roster
        return why_waiting(Lane.of(job), roster.workers.values(), roster.pools)

    def _what_happens(self, job: Job) -> str:
        if (lost := self._board.adrift.get(job.job_id)) is not None:
            roster = self._board.roster
            next_up = why_waiting(Lane.of(job), roster.workers.values(), roster.pools)
            return f"{lost}; attempt {job.attempt + 1} waits: {next_up}"
        doing = "runs it" if job.state is JobState.RUNNING else "has it and is about to start it"
        said = f"worker {job.worker_id} {doing} (attempt {job.attempt})"
        if (progress := self._feed.progress_of(job.job_id)) is not None:
            share = "" if progress.fraction is None else f"{progress.fraction:.0%} "
            said += f": {share}{progress.message}".rstrip()
        return said + ("; it was asked to end" if job.cancel_requested else "")

    async def wait(self, job_id: str, timeout: float | None = None) -> Job:
        try:
            async with asyncio.timeout(timeout):
                return await self._final(job_id)
        except TimeoutError:
            job = await self.get(job_id)
            raise WaitTimedOut(
                f"job {job_id} is still {job.state} after {timeout:g} s",
                hint="it goes on; ask again later, or cancel it",
            ) from None

    async def _final(self, job_id: str) -> Job:
        job = await self.get(job_id)
        while True:
            if not job.is_final:
                job = await self._feed.ended(job.job_id)
            if job.successor is None:
                return job
            job = await self.get(job.successor)

    async def read_log(self, job_id: str, after: int = 0, limit: int = 1000) -> list[LogLine]:
        await self.get(job_id)
        return await self._store.read_log(job_id, after, limit)

    async def follow(self, job_id: str, after_log: int = 0) -> AsyncIterator[JobUpdate]:
        with self._feed.reading(job_id) as updates:
            ended = (await self.get(job_id)).is_final
            update: JobUpdate | None = None
            while True:
                if update is None or isinstance(update, Logged):
                    async for line in self._new_lines(job_id, after_log):
                        after_log = line.n
                        yield Logged(line)
                else:
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

    async def cancel(
        self, job_id: str, *, reason: str = "", children: bool = False, timeout: float = 10.0
    ) -> Cancellation:
        job = await self._gateway.cancel(job_id, reason=reason, children=children)
        if not job.is_final and timeout > 0:
            try:
                async with asyncio.timeout(timeout):
                    job = await self._feed.ended(job.job_id)
            except TimeoutError:
                job = await self.get(job.job_id)
        return Cancellation(job, job.is_final)

    async def retry(self, job_id: str) -> Job:
        return await self._gateway.retry(job_id)

    async def workers(self) -> list[WorkerView]:
        monotonic = self._clock.monotonic()
        return [
            WorkerView(
                worker_id=w.worker_id,
                pool=w.pool,
                topics=w.topics,
                slots=w.slots,
                limit=w.limit,
                held=len(w.held),
                labels=w.labels,
                host=w.host,
                pid=w.pid,
                local=w.local,
                status=w.status,
                silent_for=0.0 if w.local else max(0.0, monotonic - w.heard_at),
            )
            for w in self._board.roster.workers.values()
        ]

    async def pools(self) -> list[PoolView]:
        workers = self._board.roster.workers.values()
        views = []
        for pool in self._board.roster.pools.values():
            members = [w for w in workers if w.pool == pool.name]
            topics = pool.topics or tuple(sorted({t for w in members for t in w.topics}))
            views.append(
                PoolView(
                    name=pool.name,
                    topics=topics,
                    capacity=pool.capacity,
                    held=sum(len(w.held) for w in members),
                    workers=len(members),
                    labels=pool.labels,
                )
            )
        return views

    async def status(self) -> EngineStatus:
        about = self._about
        return EngineStatus(
            version=about.version,
            pid=about.pid,
            started_at=about.started_at,
            durability=about.durability,
            data_dir=about.data_dir,
            rules=self._kernel.rules.snapshot,
            tally=await self._store.tally(),
            waiting=len(self._board.backlog) + len(self._board.unjudged),
            held=len(self._board.held),
            workers=len(self._board.roster.workers),
            finished=self._board.finished,
        )

    async def verify(self) -> Verified:
        return await self._store.verify()

    async def prune(self, older_than: float) -> Cleaned:
        return await self._pruner.prune(older_than)

    async def put_blob(self, data: bytes, media_type: str = "application/json") -> str:
        return await self._blobs.put(data, media_type)

    async def get_blob(self, uri: str) -> bytes:
        return await self._blobs.get(uri)


def _how_it_ended(job: Job) -> str:
    said = f"it ended {job.state}"
    if job.result is not None and job.result.error_message:
        said += f": {job.result.error_message}"
    if job.successor is not None:
        said += f"; retried as {job.successor}"
    return said
