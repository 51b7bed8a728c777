"""Pipelines without a control plane: a script, a store, and nothing else.

    async with PipelineJobManager(store, [news], blobs, clock) as manager:
        job = await manager.start_job(news, {"classify_limit": 50})
        record = await manager.wait(job.id)

Several managers, in several processes, may share a store. Each run is held by one of them
under a lease, and every write carries the fence of its run, so one that lost its lease can
change nothing. A manager takes up what others left behind (`recover`), and ends what nobody
will (`cleanup_stale_jobs`); it looks for both when it starts and from time to time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import uuid
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Self

from msgspec.structs import replace

from penstock.core.errors import (
    Conflict,
    IllegalMove,
    InvalidRequest,
    NotFound,
    PenstockError,
    Superseded,
    Unavailable,
)
from penstock.core.job import IdSource
from penstock.lifecycles.pipeline import PIPELINE
from penstock.ports.blobs import Blobs
from penstock.ports.clock import Clock
from penstock.ports.executor import Interrupted
from penstock.workloads.pipeline.calls import Pools
from penstock.workloads.pipeline.closing import call_hooks
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.following import Followers
from penstock.workloads.pipeline.options import RunOptions, Silent
from penstock.workloads.pipeline.orchestrator import AsyncPipelineOrchestrator, Stop
from penstock.workloads.pipeline.orphans import Fate, Patience, Sweeper
from penstock.workloads.pipeline.records import (
    STALE_MESSAGE,
    ItemOutcome,
    ItemRecord,
    PipelineEvent,
    PipelineRecord,
)
from penstock.workloads.pipeline.running import RunningJob, outcome_of
from penstock.workloads.pipeline.store import CancelAnswer, Claim, PipelineStore, RunQuery

log = logging.getLogger(__name__)

_SOONEST = 0.05
"""Seconds between two sweeps, at least."""
_SHUTDOWN_GRACE = 10.0


class PipelineJobManager:
    """Starts, cancels, follows, resumes and cleans up pipeline jobs.

    Entered, it declares its pipelines, takes up orphans and sweeps; left, it interrupts what
    runs, so that the next start goes on with it. No two managers that live at the same time may
    have the same `owner`; one that comes back under its old name need not wait for the leases
    it had.
    """

    def __init__(
        self,
        store: PipelineStore,
        pipelines: Iterable[Definition],
        blobs: Blobs,
        clock: Clock,
        *,
        owner: str | None = None,
        lease: float = 30.0,
        sweep_every: float = 60.0,
        max_resumes: int = 20,
        options: RunOptions | None = None,
    ) -> None:
        self._store, self._blobs, self._clock = store, blobs, clock
        self._pipelines = {definition.name: definition for definition in pipelines}
        self.owner = owner or f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._lease, self._sweep_every = lease, sweep_every
        patience = Patience(max_resumes=max_resumes, slack=sweep_every + lease)
        self._sweeper = Sweeper(store, self._pipelines, clock, self.owner, patience)
        self._options = replace(options or RunOptions(), lease=lease)
        self._pools = Pools(self._options)
        self._ids = IdSource()
        self._runs: dict[str, RunningJob] = {}
        self._starting: set[str] = set()
        """Jobs that are being recorded: a sweep must not take them for lost ones."""
        self._followers = Followers(store)
        self._open = False
        self._deaf: Callable[[], None] = _nothing
        self._sweeping: asyncio.Task[None] | None = None

    # -- service ------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        infos = [definition.info() for definition in self._pipelines.values()]
        await self._store.declare(infos)
        self._deaf = self._store.listen(self._followers.hear)
        self._open = True
        try:
            wait = await self._sweep()
        except BaseException:
            await self.shutdown()
            raise
        self._sweeping = asyncio.create_task(self._sweep_again(wait))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.shutdown()

    async def shutdown(self, grace: float = _SHUTDOWN_GRACE) -> None:
        """Interrupt what runs. It stays RUNNING with its lease given back, and the next manager
        goes on with it at once."""
        if not self._open:
            return
        self._open = False
        if self._sweeping is not None:
            self._sweeping.cancel()
            await asyncio.wait((self._sweeping,))
        for run in self._runs.values():
            run.stop(Stop.INTERRUPT, "the manager is shut down")
        tasks = [run.task for run in self._runs.values()]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace)
            for task in late:
                task.cancel()
            await asyncio.wait(tasks)
        await self._pools.close()
        self._deaf()
        self._deaf = _nothing

    # -- starting -----------------------------------------------------------------

    async def start_job(
        self,
        pipeline: Definition | str,
        config: Any = None,
        *,
        job_id: str | None = None,
        trigger: str = "manual",
        retry_of: str | None = None,
        tenant: str = "default",
    ) -> PipelineRecord:
        """Record a job, PENDING, and run it in the background. NotFound, InvalidRequest (names
        the field), PipelineBusy. An id that is there already is answered with its job."""
        definition = self._known(pipeline)
        if not self._open:
            raise Unavailable("this manager runs nothing", hint="enter it with 'async with'")
        now = self._clock.now()
        asked = PipelineRecord(
            id=job_id or self._ids.next(now),
            trace_id=str(uuid.uuid4()),
            pipeline=definition.name,
            fingerprint=definition.fingerprint,
            config=definition.plain_config(config),
            created_at=now,
            retry_of=retry_of,
            tenant=tenant,
            trigger=trigger,
            # Until it is claimed, so that no other manager takes it for an orphan.
            owner=self.owner,
            lease_until=now + self._lease,
        )
        self._starting.add(asked.id)
        try:
            record = await self._store.create(asked, single_flight=definition.single_flight)
        finally:
            self._starting.discard(asked.id)
        if record.trace_id != asked.trace_id:
            return _the_same(record, asked)
        if self._open:  # it may have been shut down meanwhile; then the next start runs it
            self._spawn(record)
        return record

    create_job = start_job
    """The seed's other name for it."""

    async def retry_failed(self, job_id: str) -> PipelineRecord:
        """A new job of what failed in this one and what depends on it; what succeeded is taken
        over. IllegalMove unless it has ended, InvalidRequest if nothing failed in it."""
        record = await self.get_job(job_id)
        if not record.is_final:
            raise IllegalMove(PIPELINE.name, record.status, "retry_failed")
        if not record.left_undone:
            raise InvalidRequest("job_id", f"nothing failed in job {job_id}")
        return await self.start_job(
            record.pipeline, record.config, retry_of=job_id, trigger="retry", tenant=record.tenant
        )

    def _known(self, pipeline: Definition | str) -> Definition:
        name = pipeline if isinstance(pipeline, str) else pipeline.name
        known = self._pipelines.get(name)
        if known is None or (isinstance(pipeline, Definition) and known is not pipeline):
            there = ", ".join(sorted(self._pipelines)) or "none"
            raise NotFound(f"no pipeline {name!r} in this manager", hint=f"there are: {there}")
        return known

    # -- running ------------------------------------------------------------------

    def _spawn(self, record: PipelineRecord, fence: int | None = None) -> RunningJob:
        if record.id in self._runs:
            return self._runs[record.id]
        self._runs[record.id] = run = RunningJob()
        run.task = asyncio.create_task(
            self._execute_job(record.id, fence), name=f"pipeline job {record.id}"
        )
        return run

    async def execute_job(self, job_id: str) -> PipelineRecord:
        """Run one that is recorded, if nobody does, and return its record at the end."""
        if job_id not in self._runs:
            record = await self.get_job(job_id)
            self._known(record.pipeline)
            self._spawn(record)
        await asyncio.wait((self._runs[job_id].task,))
        return await (self.wait(job_id) if self._open else self.get_job(job_id))

    async def _execute_job(self, job_id: str, fence: int | None = None) -> None:
        """The background task of one job: claims it and runs it to an end."""
        run = self._runs[job_id]
        try:
            record = await self._claim(job_id, fence)
            if record is None:
                return  # cancelled before it began, or somebody else's by now
            run.fence = record.fence
            definition = self._pipelines[record.pipeline]
            orchestrator = AsyncPipelineOrchestrator(
                definition,
                record,
                self._store,
                self._blobs,
                self._clock,
                options=self._options,
                pools=self._pools,
            )
            await run.orchestrate(orchestrator)
        except Interrupted:
            log.info("job %s is left for the next start", job_id)
        except Superseded:
            log.warning("job %s was taken over by another process", job_id)
        except Unavailable as error:
            log.warning("job %s is left as it is for a later sweep: %s", job_id, error)
        except asyncio.CancelledError:
            if not run.is_stopping:
                raise
        except Exception as error:
            log.exception("job %s could not be run", job_id)
            await self._fail(job_id, f"it could not be run: {error!r}")
        finally:
            del self._runs[job_id]

    async def _fail(self, job_id: str, why: str) -> None:
        """An exception beyond the orchestrator: nobody else will tell of it."""
        try:
            record = await self.get_job(job_id)
            now = self._clock.now()
            if record.owner == self.owner and await self._store.fail_stale(
                job_id, now, why, record.version
            ):
                await self._call_hooks(job_id)
        except PenstockError as error:
            log.warning("that could not be recorded of job %s: %s", job_id, error)

    async def _call_hooks(self, job_id: str) -> None:
        """Of a run that this manager ended, and no orchestrator."""
        record = await self.get_job(job_id)
        if (definition := self._pipelines.get(record.pipeline)) is not None:
            await call_hooks(definition, record, Silent())

    async def _claim(self, job_id: str, fence: int | None) -> PipelineRecord | None:
        now = self._clock.now()
        until = now + self._lease
        return await self._store.claim(
            Claim(job_id=job_id, owner=self.owner, now=now, lease_until=until, fence=fence)
        )

    # -- cancelling ---------------------------------------------------------------

    async def cancel_job(
        self, job_id: str, *, reason: str = "", timeout: float | None = None
    ) -> CancelAnswer:
        """Ask a job to end, and wait for that: for its grace time and a second, if not said
        otherwise. The answer says which won, the cancel or the finish. NotFound.

        A job that another process runs is marked, and that process learns of it when it next
        writes; one that nobody runs is ended here.
        """
        answer = await self._store.request_cancel(job_id, self._clock.now())
        if not answer.accepted:
            return answer
        if PIPELINE.is_final(answer.status):  # nobody had begun it, so nobody else tells
            await self._call_hooks(job_id)
        record = await self.get_job(job_id)
        run = self._runs.get(job_id) or self._take_up(record)
        if run is not None:
            run.stop(Stop.CANCEL, reason or "Job was cancelled")
            grace = self._pipelines[record.pipeline].cancel_grace
            await run.ended_within(grace, grace + 1.0 if timeout is None else timeout)
        return outcome_of(await self.get_job(job_id))

    # -- asking -------------------------------------------------------------------

    async def get_job(self, job_id: str) -> PipelineRecord:
        return await self._followers.record(job_id)

    async def list_jobs(self, query: RunQuery | None = None) -> list[PipelineRecord]:
        return await self._store.find(query or RunQuery())

    async def items(
        self,
        job_id: str,
        stage: str,
        *,
        after: int = -1,
        limit: int = 100,
        outcomes: tuple[ItemOutcome, ...] = (),
    ) -> list[ItemRecord]:
        """Items of one stage, in order. NotFound also for a stage that the job does not have."""
        record = await self.get_job(job_id)
        known = self._pipelines.get(record.pipeline)
        names = dict.fromkeys(
            [one.name for one in record.stages] + list(known.stages if known else ())
        )
        if stage not in names:
            there = ", ".join(names) or "none"
            raise NotFound(f"job {job_id} has no stage {stage!r}", hint=f"there are: {there}")
        return await self._store.items(job_id, stage, after=after, limit=limit, outcomes=outcomes)

    async def wait(self, job_id: str, timeout: float | None = None) -> PipelineRecord:
        """Its record when it has ended. NotFound, WaitTimedOut."""
        return await self._followers.end_of(job_id, timeout)

    def events(self, job_id: str, after: int = 0) -> AsyncIterator[PipelineEvent]:
        """Its events from an id on, as they come; ends after `job_complete`."""
        return self._followers.events(job_id, after)

    # -- sweeping -----------------------------------------------------------------

    async def recover(self) -> list[str]:
        """Take up what nobody has: the ids of the jobs that are run here now."""
        taken = []
        for record in await self._store.unfinished():
            if record.id not in self._runs and self._take_up(record) is not None:
                taken.append(record.id)
        return taken

    async def cleanup_stale_jobs(self) -> list[str]:
        """End what nobody will: FAILED, with the seed's words. The ids of those.

        One that is healthy, here or elsewhere, is not touched: the store asks for the very
        version of the record that was judged. One that runs here watches itself; only if it does
        not even keep its lease is it stopped from here.
        """
        infos = {info.name: info for info in await self._store.declared()}
        ended = []
        for record in await self._store.unfinished():
            run = self._runs.get(record.id)
            if run is None:
                info, starting = infos.get(record.pipeline), record.id in self._starting
                if not starting and await self._sweeper.end_if_stale(record, info):
                    ended.append(record.id)
                    await self._call_hooks(record.id)
            elif record.fence == run.fence and self._sweeper.is_lost(record):
                run.stop(Stop.FAIL, STALE_MESSAGE)
        return ended

    def _take_up(self, record: PipelineRecord) -> RunningJob | None:
        """Run it here if nobody has it."""
        if not self._open or record.is_final or record.id in self._starting:
            return None
        if self._sweeper.fate_of(record) is not Fate.RESUME:
            return None
        # A lease of ours without a task is over, whatever it says.
        ours = record.owner == self.owner and record.fence > 0
        return self._spawn(record, record.fence + 1 if ours else None)

    async def _sweep(self) -> float:
        """Recover and clean up; the seconds until the next sweep."""
        begun = self._clock.now()
        try:
            await self.recover()
            await self.cleanup_stale_jobs()
            unfinished = await self._store.unfinished()
        except Unavailable as error:
            log.warning("a sweep was left out: %s", error)
            return self._sweep_every
        except Exception:  # the next one may do better, and there must be a next one
            log.exception("a sweep failed")
            return self._sweep_every
        leases = [r.lease_until for r in unfinished if r.id not in self._runs and r.lease_until]
        # One that ran out while this sweep went on was not seen by it.
        ends = [lease - self._clock.now() for lease in leases if lease > begun]
        return min([self._sweep_every, *(max(end, _SOONEST) for end in ends)])

    async def _sweep_again(self, wait: float) -> None:
        while True:
            await self._clock.sleep(wait)
            wait = await self._sweep()


def _nothing() -> None:
    pass


def _the_same(record: PipelineRecord, asked: PipelineRecord) -> PipelineRecord:
    if record.pipeline != asked.pipeline or record.config != asked.config:
        raise Conflict(
            f"job {record.id} is there already, and is another",
            hint="leave job_id out, or start it with the same pipeline and config",
        )
    return record
