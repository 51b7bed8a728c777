"""Whether a submission is taken: checked in the protocol's order, durable before it is answered.

An id that is taken is answered as such whatever else stands against the job, so that who asks
again after a lost answer learns that it is there.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from penstock.core.errors import Conflict, TooMany
from penstock.ports.clock import Clock
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.job import Code, ContainerJob, ContainerRecord, Mode, Rejected
from penstock.workloads.container.protocol.submission import Accepted, read_job
from penstock.workloads.container.standing.queue import Need, Queue, Waiting, need_of
from penstock.workloads.container.standing.records import Records
from penstock.workloads.container.standing.telemetry import Telemetry
from penstock.workloads.container.standing.upkeep import low_disk
from penstock.workloads.container.standing.watch import EngineWatch
from penstock.workloads.container.store import ContainerStore, Receipt

_LARGE = 256 << 10
"""Bytes of a submission that is read in a thread, so that nobody waits behind it."""
_SOONEST, _LATEST = 1.0, 60.0
_DISK_RETRY = 60.0


class Admission:
    def __init__(
        self,
        config: WorkerConfig,
        store: ContainerStore,
        records: Records,
        queue: Queue,
        watch: EngineWatch,
        clock: Clock,
    ) -> None:
        self._config, self._store, self._records = config, store, records
        self._queue, self._watch, self._clock = queue, watch, clock
        self.telemetry: Telemetry
        self.open = False
        """Whether the worker runs."""
        self.draining = False
        self.unsure = False
        """A write failed, and what it was to store may be there all the same."""

    async def submit(self, body: bytes, key: str) -> Receipt:
        """It is durable, and in line, when this returns. Raises Rejected."""
        try:
            return await self._submit(await self._read(body), key)
        except Rejected as refused:
            self.telemetry.refused(refused.error.code)
            raise

    def closed(self, job_id: Any = None) -> Rejected | None:
        """Why no job at all is taken now."""
        if self.draining or not self.open:
            why = "takes no new jobs (it is draining)" if self.draining else "is not running"
            return Rejected(Code.DRAINING, f"this worker {why}", job_id=job_id, status=503)
        if low := low_disk(self._config):
            return Rejected(Code.DISK_LOW, low, job_id=job_id, status=503, retry_after=_DISK_RETRY)
        return None

    @property
    def full(self) -> bool:
        return len(self._queue) >= self._config.max_queued_jobs

    async def _read(self, body: bytes) -> Accepted:
        facts = self._watch.facts
        read = partial(
            read_job,
            body,
            self._config,
            # Of an engine that has never answered nothing is known; its jobs are read again
            # before they start.
            can_build=facts is None or facts.can_build,
            runtimes=() if facts is None else facts.runtimes,
        )
        return read() if len(body) < _LARGE else await asyncio.to_thread(read)

    async def _submit(self, accepted: Accepted, key: str) -> Receipt:
        job = accepted.job
        if (repeated := await self._repeated(accepted, key)) is not None:
            return repeated
        if (refused := self._too_large(job) or self.closed(job.job_id)) is not None:
            if await self._store.get(job.job_id, body=False) is not None:
                raise _taken(job)
            raise refused
        try:
            record = await self._records.add(
                self._record(accepted, key), most_waiting=self._config.max_queued_jobs
            )
        except Conflict:
            if (repeated := await self._repeated(accepted, key)) is not None:
                return repeated
            raise _taken(job) from None
        except TooMany:
            raise self._full(job) from None
        except Exception:
            self.unsure = True
            raise
        self._queue.add(Waiting.of(record))
        return Receipt(record.job_id, record.state)

    async def _repeated(self, accepted: Accepted, key: str) -> Receipt | None:
        """The answer to a submission that was made under this key before."""
        known = await self._store.by_key(key) if key else None
        if known is None:
            return None
        if known.body != accepted.body:
            raise Rejected(
                Code.IDEMPOTENCY_KEY_REUSED,
                f"the idempotency key was used for another submission, of job {known.job_id}",
                job_id=accepted.job.job_id,
                status=409,
            )
        return Receipt(known.job_id, known.state, repeated=True)

    def _record(self, accepted: Accepted, key: str) -> ContainerRecord:
        job = accepted.job
        need = need_of(job, self._config)
        return ContainerRecord(
            job_id=job.job_id,
            created_at=self._clock.now(),
            priority=job.priority,
            body=accepted.body,
            image=job.image,
            memory_mb=need.memory_mb,
            cpus=need.cpus,
            labels=job.labels,
            key=key,
        )

    def _too_large(self, job: ContainerJob) -> Rejected | None:
        """A job that could never start."""
        found = self._queue.room.too_small(need_of(job, self._config))
        if found is None:
            return None
        field, why = found
        if job.mode is Mode.BUILD and self._queue.room.too_small(_without_build(job)) is None:
            field, why = "runtime.mode", f"for its build {why}"
        return Rejected(Code.NOT_ALLOWED, f"{field}: {why}", field=field, job_id=job.job_id)

    def _full(self, job: ContainerJob) -> Rejected:
        """A place is free when the next job starts: when one of those that run has ended."""
        soon = self.telemetry.usual_run / self._queue.room.jobs
        return Rejected(
            Code.QUEUE_FULL,
            f"{self._config.max_queued_jobs} jobs wait already, and no more may",
            job_id=job.job_id,
            status=429,
            retry_after=round(min(max(soon, _SOONEST), _LATEST), 1),
        )


def _without_build(job: ContainerJob) -> Need:
    return Need(job.limits.memory_mb, job.limits.cpus)


def _taken(job: ContainerJob) -> Rejected:
    return Rejected(
        Code.JOB_ID_ALREADY_EXISTS,
        f"there is a job {job.job_id} already; give the new one another job_id",
        job_id=job.job_id,
        status=409,
    )
