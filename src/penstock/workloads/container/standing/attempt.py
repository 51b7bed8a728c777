"""One job, from its start until nothing of it is left but its record, its logs and artifacts.

What follows what is what makes a crash harmless: the record names the container before that is
started, so a job without the name never ran, and is begun anew; the container is removed only
after the record says how it ended, however often that has to be written; only then are its
folders cleared and its room given to the next.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from penstock.core.errors import IllegalMove, NotFound
from penstock.lifecycles.container import ContainerJobEvent, ContainerJobState
from penstock.ports.clock import Clock
from penstock.ports.executor import CancelToken
from penstock.ports.failpoint import failpoint
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.engine import ContainerState, Engine, Found
from penstock.workloads.container.files.output import Output
from penstock.workloads.container.files.sandbox import Sandbox, Sandboxes
from penstock.workloads.container.job import (
    Code,
    ContainerJob,
    ContainerRecord,
    End,
    JobError,
    Rejected,
    Stream,
)
from penstock.workloads.container.protocol.submission import recall_job
from penstock.workloads.container.running.patience import drop
from penstock.workloads.container.running.runner import Runner
from penstock.workloads.container.standing.records import Records, event_of
from penstock.workloads.container.standing.recovery import RESTARTED
from penstock.workloads.container.standing.watch import EngineWatch
from penstock.workloads.container.store import Change, ContainerStore

log = logging.getLogger(__name__)

_CANCELLED = "cancelled"
"""A file in a job's folder that says that its end was asked for, and why."""


class Parts(Struct, frozen=True):
    """What every attempt needs."""

    config: WorkerConfig
    engine: Engine
    store: ContainerStore
    records: Records
    sandboxes: Sandboxes
    runner: Runner
    watch: EngineWatch
    clock: Clock
    left: Callable[[], None]
    """Called when something could not be removed."""


class Attempt:
    def __init__(self, parts: Parts, job_id: str) -> None:
        self._parts = parts
        self.job_id = job_id
        self.sandbox: Sandbox = parts.sandboxes.of(job_id)
        self.output: Output | None = None
        """While it runs."""
        self.speaks = asyncio.Event()
        """Its output can be read."""
        self.begun = asyncio.Event()
        """Its record says that it runs, or that it never will."""
        self.started = False
        """Its container was started, as far as is known."""
        self._unsure = False
        """Whether the record names the container is not known."""
        self._stop = CancelToken()
        self._cancelled = self._ended_by_cancel = False
        self._leaving = False
        self._work: asyncio.Task[End] | None = None
        self._job: ContainerJob | None = None

    @property
    def image(self) -> str:
        """As the job names it."""
        return self._job.image if self._job is not None else ""

    # -- asked by others --------------------------------------------------------------------

    def cancel(self, reason: str) -> None:
        """A caller wants it ended. That outlives a restart, if the disk can be written."""
        self._cancelled = True
        with suppress(OSError):
            self.sandbox.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            (self.sandbox.folder / _CANCELLED).write_text(reason)
        self._stop.request(reason)

    def end(self, reason: str) -> None:
        """The worker wants it ended, because it stops or was restarted."""
        self._stop.request(reason)

    def let_go(self) -> None:
        """Leave its container as it is, for the worker that comes next."""
        self._leaving = True
        if self._work is not None:
            self._work.cancel()

    # -- four ways in ----------------------------------------------------------------------

    async def run(self) -> None:
        """From the queue."""
        try:
            record = await self._begin()
        finally:
            self.begun.set()
        if record is not None and not self._leaving:
            await self._see_through(record, None)

    async def begin_anew(self, record: ContainerRecord) -> None:
        """An earlier worker began it, and did not start its container."""
        with suppress(OSError):
            self.cancel((self.sandbox.folder / _CANCELLED).read_text())
        await self._see_through(record, None)

    async def adopt(self, record: ContainerRecord, found: Found, stop: str) -> None:
        """Its container is there."""
        self.started = True
        with suppress(OSError):
            self.cancel((self.sandbox.folder / _CANCELLED).read_text())
            # An exit that nobody saw is then most likely the last worker's doing.
            self._ended_by_cancel = found.state is ContainerState.EXITED
        if stop:
            self.end(stop)
        await self._see_through(record, found)

    async def give_up(self, message: str) -> None:
        """Nothing is there that could go on."""
        limit = self._parts.config.defaults.max_output_bytes
        with suppress(Rejected):
            self._job = await self._read()
            limit = self._job.limits.max_output_bytes
        end = _failed(Code.WORKER_RESTARTED, message)
        if self.sandbox.logs.is_dir():
            self.output = Output.reopen(self.sandbox.logs, limit)
            stdout, stderr = map(self.output.count, Stream)
            end = replace(end, stdout=stdout, stderr=stderr)
        await self._settle(end)
        await self._tidy()

    # -- how it goes ------------------------------------------------------------------------

    async def _begin(self) -> ContainerRecord | None:
        """The record, which says that it runs; None if it was cancelled before."""
        parts = self._parts
        if self._leaving:
            return None
        start = Change(
            job_id=self.job_id,
            event=ContainerJobEvent.START,
            at=parts.clock.now(),
            engine=parts.engine.name,
        )
        try:
            record = await parts.records.insist(start)
        except (IllegalMove, NotFound):
            return None
        failpoint("container-job-started")
        return record

    async def _see_through(self, record: ContainerRecord, found: Found | None) -> None:
        end = await self._work_out(self._execute(record, found))
        if end is None:
            self._close_output()
            await self._unname()
            return
        failpoint("container-job-ended")
        await self._settle(self._told(end))
        failpoint("container-job-recorded")
        await self._tidy()

    async def _work_out(self, work: Coroutine[Any, Any, End]) -> End | None:
        """How it ended; None if it was let go of."""
        task = self._work = asyncio.ensure_future(work)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            await drop(task)
            raise
        if task.cancelled():
            return None
        error = task.exception()
        if error is None:
            return task.result()
        log.error("job %s: the worker itself went wrong", self.job_id, exc_info=error)
        return _failed(
            Code.RUNTIME_ERROR, f"the worker went wrong: {type(error).__name__}: {error}"
        )

    async def _execute(self, record: ContainerRecord, found: Found | None) -> End:
        parts = self._parts
        try:
            job = self._job = await self._read()
        except Rejected as refused:
            # It was taken under other rules than those of now.
            return End(state=ContainerJobState.FAILED, error=refused.error)
        open_output = Output if found is None else Output.reopen
        self.output = open_output(self.sandbox.logs, job.limits.max_output_bytes)
        self.speaks.set()
        if found is None:
            return await parts.runner.run(
                job, self.sandbox, self.output, self._stop, starts=self._name
            )
        started_at = record.started_at if record.started_at is not None else parts.clock.now()
        return await parts.runner.adopt(
            job, found, self.sandbox, self.output, self._stop, started_at
        )

    async def _name(self) -> None:
        """The container is started next."""
        parts = self._parts
        self._unsure = True
        await parts.records.insist(
            Change(
                job_id=self.job_id,
                at=parts.clock.now(),
                container=parts.runner.name_of(self.job_id),
            )
        )
        self._unsure, self.started = False, True
        failpoint("container-job-named")

    async def _unname(self) -> None:
        """It was let go of just before its container was started."""
        if self._unsure:
            parts = self._parts
            with suppress(Exception):
                await parts.records.change(
                    Change(job_id=self.job_id, at=parts.clock.now(), container="")
                )

    async def _read(self) -> ContainerJob:
        parts, facts = self._parts, self._parts.watch.facts
        record = await parts.store.get(self.job_id)
        assert record is not None
        accepted = await asyncio.to_thread(
            recall_job,
            record.body,
            parts.config,
            can_build=facts is None or facts.can_build,
            runtimes=() if facts is None else facts.runtimes,
        )
        return accepted.job

    def _told(self, end: End) -> End:
        """Whose wish it was that it ended: the worker's own is no cancel."""
        if self._ended_by_cancel and (end.error is None or end.error.code == Code.NON_ZERO_EXIT):
            error = JobError(Code.CANCELLED, self._stop.reason)
            return replace(end, state=ContainerJobState.FAILED, exit_code=None, error=error)
        if end.error is None:
            return end
        if end.error.code == Code.ENGINE_UNAVAILABLE:
            # Nobody else starts before it has answered.
            self._parts.watch.failed(end.error.message)
        if end.error.code == Code.CANCELLED and not self._cancelled:
            error = JobError(Code.WORKER_RESTARTED, self._stop.reason or RESTARTED)
            return replace(end, error=error)
        return end

    async def _settle(self, end: End) -> None:
        """Its end is durable, and so is what it wrote, when this returns."""
        parts = self._parts
        change = Change(job_id=self.job_id, event=event_of(end), at=parts.clock.now(), end=end)
        kept = asyncio.ensure_future(asyncio.to_thread(self._keep_output))
        try:
            await parts.records.insist(change)
        except (IllegalMove, NotFound) as error:
            log.error("job %s: its end was not taken: %s", self.job_id, error)
        finally:
            await kept
            self._close_output()

    def _keep_output(self) -> None:
        try:
            if self.output is not None:
                self.output.flush()
        except OSError as error:
            log.error("job %s: its output may not outlive a power cut: %s", self.job_id, error)

    def _close_output(self) -> None:
        output, self.output = self.output, None
        if output is not None:
            if not self._leaving:
                output.end()
            output.close()

    async def _tidy(self) -> None:
        """What fails here is done again by the Sweeper and by the upkeep."""
        removed = await self._parts.runner.remove(self.job_id, self._job)
        if not removed:
            self._parts.watch.doubt()
        try:
            (self.sandbox.folder / _CANCELLED).unlink(missing_ok=True)
            await self.sandbox.clear()
        except OSError as error:
            log.warning("job %s: its folder is still there: %s", self.job_id, error)
        if not removed:
            # Last of all: nothing is swept of a job that is not done.
            self._parts.left()


def _failed(code: Code, message: str) -> End:
    return End(state=ContainerJobState.FAILED, error=JobError(code, message))
