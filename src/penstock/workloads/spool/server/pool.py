"""The jobs that a server has at once: claims the next when there is room."""

from __future__ import annotations

import asyncio
import heapq
import logging
import os
from collections.abc import Awaitable, Callable, Collection, Iterable
from pathlib import Path

from msgspec import Struct

from penstock.core.errors import StoreFailed
from penstock.lifecycles.spool import SPOOL, SpoolEvent, Status
from penstock.workloads.spool.config import Sync
from penstock.workloads.spool.disk.files import move
from penstock.workloads.spool.disk.ids import Turn
from penstock.workloads.spool.disk.removing import open_up
from penstock.workloads.spool.server.running import EventKind, JobEvent, Running, ServerParts, Why


class Waiting(Struct, frozen=True, kw_only=True):
    """One queued job."""

    job_id: str
    turn: Turn
    deadline: float | None = None
    parent: str | None = None
    """The job whose end it waits for."""
    suspect: bool = False
    """Whether it is to run alone."""
    model: str = ""
    """The model that it names; empty for the default one."""


class Queue:
    """A heap by turn, and beside it those that wait for a parent."""

    def __init__(self) -> None:
        self._known: dict[str, Waiting] = {}
        self._heap: list[tuple[Turn, str]] = []
        self._deadlines: list[tuple[float, str]] = []
        self._children: dict[str, set[str]] = {}
        self._paused: dict[str, set[str]] = {}
        """Jobs that wait for a model, by its name."""

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._known

    def add(self, found: Iterable[Waiting]) -> None:
        for waiting in found:
            if waiting.job_id not in self._known:
                self._add(waiting)

    def _add(self, waiting: Waiting) -> None:
        self._known[waiting.job_id] = waiting
        if waiting.deadline is not None:
            heapq.heappush(self._deadlines, (waiting.deadline, waiting.job_id))
        if waiting.parent is None or self._is_circle(waiting):
            heapq.heappush(self._heap, (waiting.turn, waiting.job_id))
        else:
            self._children.setdefault(waiting.parent, set()).add(waiting.job_id)

    def _is_circle(self, waiting: Waiting) -> bool:
        """Whether it would wait for itself: then it is let through, to fail with that reason."""
        seen = {waiting.job_id}
        parent = waiting.parent
        while parent is not None and parent not in seen:
            seen.add(parent)
            known = self._known.get(parent)
            parent = known.parent if known else None
        return parent is not None

    def pop(self) -> Waiting | None:
        """The job whose turn it is; the queue forgets it."""
        while self._heap:
            _, job_id = heapq.heappop(self._heap)
            if (waiting := self._known.get(job_id)) is not None:
                self.forget(job_id)
                return waiting
        return None

    def pause(self, waiting: Waiting, model: str) -> None:
        """Keep a job that was popped until its model is resumed."""
        self._known[waiting.job_id] = waiting
        if waiting.deadline is not None:
            heapq.heappush(self._deadlines, (waiting.deadline, waiting.job_id))
        self._paused.setdefault(model, set()).add(waiting.job_id)

    def resume(self, model: str) -> bool:
        """Let the jobs of a model have their turn; whether there were any."""
        jobs = [one for one in self._paused.pop(model, set()) if one in self._known]
        for job_id in jobs:
            heapq.heappush(self._heap, (self._known[job_id].turn, job_id))
        return bool(jobs)

    def forget(self, job_id: str) -> None:
        waiting = self._known.pop(job_id, None)
        if waiting is not None and waiting.parent in self._children:
            children = self._children[waiting.parent]
            children.discard(job_id)
            if not children:
                del self._children[waiting.parent]

    @property
    def parents(self) -> Collection[str]:
        """Those that somebody waits for."""
        return self._children.keys()

    def ended(self, parent: str) -> bool:
        """Let its children have their turn; whether there were any."""
        children = self._children.pop(parent, set())
        for job_id in children:
            heapq.heappush(self._heap, (self._known[job_id].turn, job_id))
        return bool(children)

    def next_deadline(self) -> float | None:
        while self._deadlines and self._deadlines[0][1] not in self._known:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def late(self, now: float) -> list[str]:
        """Those whose deadline is over; the queue forgets them."""
        late: list[str] = []
        while (due := self.next_deadline()) is not None and due <= now:
            _, job_id = heapq.heappop(self._deadlines)
            self.forget(job_id)
            late.append(job_id)
        return late


log = logging.getLogger(__name__)

Following = Callable[[], Awaitable[Waiting]]
Process = Callable[[Running], Awaitable[None]]
_PAUSE = 1.0
"""Seconds until the next claim after the disk refused one."""


class Pool:
    """Claims by rename, without a flush: a claim that is lost makes the job an orphan, no more."""

    def __init__(self, parts: ServerParts, process: Process) -> None:
        self._workspace, self._claims, self._process = parts.workspace, parts.claims, process
        self._clock, self._health, self._tell = parts.clock, parts.health, parts.tell
        self._room = asyncio.Semaphore(parts.config.workers)
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
        queued = self._workspace.name(Status.QUEUED, job_id)
        claimed = self._workspace.name(SPOOL.after(Status.QUEUED, SpoolEvent.CLAIM), job_id)
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
        return Running(job_id, claimed, folder_id, self._clock.monotonic())

    def _start(self, running: Running, over: Callable[[], None]) -> None:
        self.running[running.job_id] = running
        self._put_off.discard(running.job_id)
        running.task = asyncio.create_task(self._one(running, over))
        self._tell(JobEvent(at=self._clock.now(), what=EventKind.CLAIMED, job_id=running.job_id))

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


def _move(queued: str, claimed: str) -> None:
    try:
        move(queued, claimed, sync=Sync.NONE)
    except StoreFailed as error:
        if not isinstance(error.__cause__, PermissionError):
            raise
        # A folder that may not be written to can't be moved: if it is ours, it may be from now on.
        open_up(Path(queued), os.lstat(queued).st_mode)
        move(queued, claimed, sync=Sync.NONE)
