"""The worker of seed 003: takes jobs, runs them in containers, and keeps their records.

It implements `penstock.workloads.container.store.ContainerApi` for the HTTP API. A job is durable
before it is acknowledged; `Scheduler` starts it, `Attempt` sees it through, `Upkeep` forgets it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any, BinaryIO, TypeVar, cast

from penstock.core.errors import IllegalMove, NotFound
from penstock.lifecycles.container import ContainerJobEvent, ContainerJobState
from penstock.ports.clock import Clock
from penstock.workloads.container.config import OnRestart, WorkerConfig
from penstock.workloads.container.engine import Engine
from penstock.workloads.container.files.sandbox import Sandboxes
from penstock.workloads.container.job import (
    Artifact,
    Code,
    ContainerRecord,
    End,
    JobError,
    Stream,
)
from penstock.workloads.container.running.patience import done_within, drop
from penstock.workloads.container.running.runner import Runner
from penstock.workloads.container.running.stopping import KILL_WAITS
from penstock.workloads.container.standing.admission import Admission
from penstock.workloads.container.standing.attempt import Parts
from penstock.workloads.container.standing.feed import Feed
from penstock.workloads.container.standing.images import Noting, PulledImages
from penstock.workloads.container.standing.leavings import Leavings
from penstock.workloads.container.standing.machine import Machine
from penstock.workloads.container.standing.queue import Queue, Room, Waiting
from penstock.workloads.container.standing.records import Records
from penstock.workloads.container.standing.recovery import owner_of
from penstock.workloads.container.standing.scheduler import Scheduler
from penstock.workloads.container.standing.status import Standing
from penstock.workloads.container.standing.sweeping import Busy, Sweeper
from penstock.workloads.container.standing.telemetry import Telemetry
from penstock.workloads.container.standing.upkeep import Upkeep, low_disk
from penstock.workloads.container.standing.watch import EngineWatch
from penstock.workloads.container.store import (
    Cancelled,
    Change,
    ContainerStore,
    LogPage,
    Receipt,
    RecordQuery,
    WorkerHealth,
    WorkerInfo,
)

log = logging.getLogger(__name__)

T = TypeVar("T")

_LAST_WRITES = 10.0
"""Seconds in which jobs that have ended get their end recorded when a worker stops."""


class Worker:
    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        store: ContainerStore,
        sandboxes: Sandboxes,
        clock: Clock,
    ) -> None:
        self._config, self._store, self._clock = config, store, clock
        self.owner = owner_of(config.jobs_dir)
        """What its containers are known by."""
        machine = Machine()
        self._images = PulledImages(config.jobs_dir / "pulled-images.json", clock)
        engine = cast(Engine, Noting(engine, self._images))
        self._queue = Queue(Room.of(config, machine.memory().total_mb))
        self._feed = Feed()
        self._watch = EngineWatch(engine, clock, self._looked)
        self._records = Records(store, clock, self._hear)
        runner = Runner(engine, config, clock, self.owner)
        self._sweeper = Sweeper(engine, clock, owner=self.owner, busy=self._busy)
        parts = Parts(
            config,
            engine,
            store,
            self._records,
            sandboxes,
            runner,
            self._watch,
            clock,
            self._sweeper.again,
        )
        self._scheduler = Scheduler(parts, self.owner, self._queue, self._obstacle)
        self._leavings = Leavings(
            config, store, sandboxes, self._feed, self._scheduler.attempts, clock
        )
        self._admission = Admission(config, store, self._records, self._queue, self._watch, clock)
        self._standing = Standing(
            config, machine, self._watch, self._queue, self._admission, self._records, clock
        )
        self._telemetry = Telemetry(self._standing.figures)
        self._admission.telemetry = self._telemetry
        self._upkeep = Upkeep(
            config,
            store,
            engine,
            sandboxes,
            self._images,
            clock,
            sweeper=self._sweeper,
            busy=self._busy,
        )
        self._services: list[asyncio.Task[None]] = []
        self._sweeping: list[asyncio.Task[None]] = []
        """Those services that remove what no job needs."""
        self._writes: set[asyncio.Task[Any]] = set()
        self._stopped = False

    # -- life -------------------------------------------------------------------------------

    async def start(self) -> None:
        """Take up what an earlier worker left, then take jobs. If the engine does not answer,
        that waits until it does."""
        self._scheduler.load(await self._store.unfinished())
        await self._watch.look()
        self._sweeping = [
            asyncio.ensure_future(self._upkeep.run()),
            asyncio.ensure_future(self._sweeper.run()),
        ]
        self._services = [
            asyncio.ensure_future(self._scheduler.run()),
            asyncio.ensure_future(self._watch.run()),
            *self._sweeping,
        ]
        for service in self._services:
            service.add_done_callback(self._service_ended)
        looked = asyncio.ensure_future(self._scheduler.looked.wait())
        try:
            await asyncio.wait((looked, *self._services), return_when=asyncio.FIRST_COMPLETED)
        finally:
            await drop(looked)
        self._admission.open = True

    async def stop(self, *, grace: float | None = None) -> None:
        """Take nothing more and start nothing more. Running jobs have `grace` seconds to end;
        then their containers are left to the next worker, or ended, as configured."""
        self._stopped = True
        self._admission.open = False
        self._scheduler.close()
        await asyncio.gather(*self._writes, return_exceptions=True)
        if grace:
            await self._scheduler.idle(grace)
        # A container that was let go of would look like one that no job needs.
        await drop(*self._sweeping)
        for attempt in list(self._scheduler.attempts.values()):
            if self._config.on_restart is OnRestart.ADOPT or not attempt.started:
                attempt.let_go()
            else:
                attempt.end("the worker was stopped while the job ran")
        ends = self._config.on_restart is OnRestart.END
        kills = self._config.stop_grace + sum(KILL_WAITS) if ends else 0.0
        await self._scheduler.idle(kills + _LAST_WRITES)
        await drop(*self._services)
        await self._scheduler.abandon()
        self._images.save()
        self._feed.close()

    def _service_ended(self, service: asyncio.Task[None]) -> None:
        if not service.cancelled():
            self._standing.broken = f"a part of the worker stopped: {service.exception()!r}"
            log.critical("%s", self._standing.broken, exc_info=service.exception())

    # -- jobs -------------------------------------------------------------------------------

    async def submit(self, body: bytes, key: str = "") -> Receipt:
        # A caller who goes away must not leave behind a job that is stored and never started.
        return await self._see_through(self._submit(body, key))

    async def _submit(self, body: bytes, key: str) -> Receipt:
        receipt = await self._admission.submit(body, key)
        self._scheduler.wake()
        return receipt

    async def cancel(self, job_id: str) -> Cancelled | None:
        return await self._see_through(self._cancel(job_id))

    async def _cancel(self, job_id: str) -> Cancelled | None:
        record = await self.get(job_id)
        if record is None:
            return None
        # From here on nobody else has a turn until the job is out of the line.
        attempt = self._scheduler.attempts.get(job_id)
        if attempt is not None and not record.is_final:
            attempt.cancel("cancelled by a caller")
            await attempt.begun.wait()
            record = await self.get(job_id) or record
            if not record.is_final:
                return Cancelled(record, "cancellation requested; the container is being ended")
        elif record.state is ContainerJobState.QUEUED:
            return await self._cancel_waiting(record)
        elif not record.is_final:
            record = await self.get(job_id) or record
        return Cancelled(record, f"the job had ended already: {record.state.value}")

    async def _cancel_waiting(self, record: ContainerRecord) -> Cancelled:
        waiting = self._queue.discard(record.job_id)
        error = JobError(Code.CANCELLED, "cancelled by a caller before it started")
        change = Change(
            job_id=record.job_id,
            event=ContainerJobEvent.CANCEL,
            at=self._clock.now(),
            end=End(state=ContainerJobState.FAILED, error=error),
        )
        try:
            record = await self._records.change(change)
        except (IllegalMove, NotFound):
            record = await self.get(record.job_id) or record
            return Cancelled(record, f"the job had ended already: {record.state.value}")
        except BaseException:
            if waiting is not None:
                self._queue.add(waiting)
            raise
        finally:
            self._scheduler.wake()
        return Cancelled(record, "cancelled before it started")

    async def get(self, job_id: str) -> ContainerRecord | None:
        return await self._store.get(job_id, body=False)

    async def find(self, query: RecordQuery) -> Sequence[ContainerRecord]:
        return await self._store.find(query)

    async def wait(self, job_id: str, timeout: float) -> ContainerRecord | None:
        until = self._clock.monotonic() + timeout
        while True:
            with self._feed.next_change(job_id) as change:
                record = await self.get(job_id)
                left = until - self._clock.monotonic()
                if record is None or record.is_final or left <= 0 or self._stopped:
                    return record
                await done_within(self._clock, left, change)

    def waits_for(self, record: ContainerRecord) -> str:
        if record.state is not ContainerJobState.QUEUED:
            return ""
        if record.job_id in self._scheduler.attempts:
            return self._records.trouble or "it is being started"
        return self._scheduler.obstacle() or self._queue.waits_for(record.job_id)

    def position(self, record: ContainerRecord) -> int | None:
        if record.state is not ContainerJobState.QUEUED:
            return None
        return self._queue.position(record.job_id)

    # -- what jobs leave --------------------------------------------------------------------

    async def text(self, record: ContainerRecord) -> tuple[str, str]:
        return await self._leavings.text(record)

    async def logs(
        self, job_id: str, stream: Stream, offset: int, *, limit: int, wait: float = 0
    ) -> LogPage | None:
        return await self._leavings.logs(job_id, stream, offset, limit, wait)

    async def artifact(self, job_id: str, path: str) -> tuple[Artifact, BinaryIO] | None:
        return await self._leavings.artifact(job_id, path)

    # -- the worker itself ------------------------------------------------------------------

    def drain(self, on: bool) -> None:
        self._admission.draining = on

    async def info(self) -> WorkerInfo:
        return self._standing.info()

    async def health(self) -> WorkerHealth:
        return self._standing.health()

    def metrics(self) -> bytes:
        return self._telemetry.text()

    def changes(self) -> AsyncIterator[str]:
        return self._feed.changes()

    # -- heard ------------------------------------------------------------------------------

    def _hear(self, record: ContainerRecord) -> None:
        self._telemetry.hear(record)
        if record.is_final and record.image_id:
            self._images.used(record.image_id)
        self._feed.hear(record)

    def _looked(self) -> None:
        self._scheduler.wake()
        if self._admission.unsure and not self._stopped:
            self._own(self._catch_up())

    def _busy(self) -> Busy:
        return Busy(self._scheduler.attempts, self._scheduler.images())

    def _obstacle(self) -> str:
        return self._watch.problem or low_disk(self._config)

    async def _catch_up(self) -> None:
        """Find jobs that were stored although the store said that it had failed."""
        self._admission.unsure = False
        try:
            records = await self._store.unfinished()
        except Exception:
            self._admission.unsure = True
            raise
        for record in records:
            known = record.job_id in self._queue or record.job_id in self._scheduler.attempts
            if record.state is ContainerJobState.QUEUED and not known:
                self._queue.add(Waiting.of(record))
        self._scheduler.wake()

    async def _see_through(self, work: Coroutine[Any, Any, T]) -> T:
        """Goes on to its end though the caller may not wait for that."""
        return await asyncio.shield(self._own(work))

    def _own(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._writes.add(task)
        task.add_done_callback(self._written)
        return task

    def _written(self, task: asyncio.Task[Any]) -> None:
        self._writes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("a request failed: %r", error)
