"""The jobs that a server has at once: claims the next when there is room."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from penstock.core.errors import StoreFailed
from penstock.lifecycles.spool import SPOOL, SpoolEvent, Status
from penstock.ports.clock import Clock
from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.disk import move
from penstock.workloads.spool.removing import open_up
from penstock.workloads.spool.serving.claims import Claims
from penstock.workloads.spool.serving.events import Event, Happened, Tell
from penstock.workloads.spool.serving.health import Health
from penstock.workloads.spool.serving.queue import Waiting
from penstock.workloads.spool.serving.running import Running, Why
from penstock.workloads.spool.workspace import Workspace

log = logging.getLogger(__name__)

Following = Callable[[], Awaitable[Waiting]]
Process = Callable[[Running], Awaitable[None]]
_PAUSE = 1.0
"""Seconds until the next claim after the disk refused one."""


class Pool:
    """Claims by rename, without a flush: a claim that is lost makes the job an orphan, no more."""

    def __init__(
        self,
        workspace: Workspace,
        claims: Claims,
        process: Process,
        clock: Clock,
        health: Health,
        tell: Tell,
        *,
        workers: int,
    ) -> None:
        self._workspace, self._claims, self._process = workspace, claims, process
        self._clock, self._health, self._tell = clock, health, tell
        self._room = asyncio.Semaphore(workers)
        self._put_off: set[str] = set()
        self.running: dict[str, Running] = {}

    async def run(self, following: Following) -> None:
        """Keep all workers busy with the jobs that `following` gives, until cancelled."""
        while True:
            await self._room.acquire()
            try:
                running = await self._next(following)
            except BaseException:
                self._room.release()
                raise
            self._start(running, self._room.release)
            if running.suspect:
                # Claimed beside it, jobs would only wait, and be lost with it.
                await self.empty()

    async def _next(self, following: Following) -> Running:
        while True:
            waiting = await following()
            if waiting.suspect:
                await self.empty()
            try:
                running = self.claim(waiting.job_id)
            except (OSError, StoreFailed) as error:
                self._health.trouble("claiming", str(error))
                await self._clock.sleep(_PAUSE)
                continue
            if running is not None:
                self._health.over("claiming")
                running.suspect = waiting.suspect
                return running

    def start(self, job_id: str) -> None:
        """Have it now, whether there is room or not: it is known to take no time."""
        if (running := self.claim(job_id)) is not None:
            self._start(running, lambda: None)

    def claim(self, job_id: str) -> Running | None:
        """None if it is not there any more, or can't be had now: the next scan finds it again."""
        if job_id in self.running or not self._claims.take(job_id):
            return None
        queued = self._workspace.of(Status.QUEUED, job_id)
        claimed = self._workspace.of(SPOOL.after(Status.QUEUED, SpoolEvent.CLAIM), job_id)
        try:
            _move(queued, claimed)
            folder_id = os.lstat(claimed).st_ino
        except FileNotFoundError:
            self._claims.drop(job_id)
            return None
        except FileExistsError:
            self._claims.drop(job_id)
            self._report(job_id, "another job with its id is in processing")
            return None
        except StoreFailed as error:
            self._claims.drop(job_id)
            if not isinstance(error.__cause__, PermissionError):
                raise
            self._report(job_id, str(error))
            return None
        return Running(claimed, folder_id, self._clock.monotonic())

    def _start(self, running: Running, over: Callable[[], None]) -> None:
        self.running[running.job_id] = running
        self._put_off.discard(running.job_id)
        running.task = asyncio.create_task(self._one(running, over))
        self._tell(Event(at=self._clock.now(), what=Happened.CLAIMED, job_id=running.job_id))

    async def _one(self, running: Running, over: Callable[[], None]) -> None:
        try:
            await self._process(running)
        except Exception:
            # It stays where it is, and ours; whoever starts next finds an orphan.
            log.exception("job %s could not be ended", running.job_id)
        finally:
            del self.running[running.job_id]
            over()

    def let_go(self) -> None:
        """Find jobs whose folders were taken away."""
        for running in list(self.running.values()):
            try:
                found = os.lstat(running.folder).st_ino
            except FileNotFoundError:
                found = 0
            if found != running.folder_id and not running.ended:
                running.end(Why.GONE)

    async def empty(self, patience: float | None = None) -> None:
        """Until no job runs; what is not over by then is left as it is, for others to find."""
        tasks = [running.task for running in self.running.values() if running.task]
        if not tasks:
            return
        _, left = await asyncio.wait(tasks, timeout=patience)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)

    def end_all(self, why: Why) -> None:
        for running in list(self.running.values()):
            running.end(why)

    def _report(self, job_id: str, why: str) -> None:
        if job_id not in self._put_off:
            self._put_off.add(job_id)
            log.warning("job %s can't be claimed: %s", job_id, why)


def _move(queued: Path, claimed: Path) -> None:
    try:
        move(queued, claimed, sync=Sync.NONE)
    except StoreFailed as error:
        if not isinstance(error.__cause__, PermissionError):
            raise
        # A folder that may not be written to can't be moved: if it is ours, it may be from now on.
        open_up(queued, os.lstat(queued).st_mode)
        move(queued, claimed, sync=Sync.NONE)
