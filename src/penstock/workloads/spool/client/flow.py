"""Flow: looking at jobs, and waiting for their end."""

from __future__ import annotations

import asyncio
import heapq
import os
from collections.abc import Collection
from pathlib import Path

from penstock.core.errors import NotFound, WaitTimedOut
from penstock.lifecycles.spool import SPOOL, VISIBLE, Status
from penstock.ports.clock import Clock, SystemClock
from penstock.workloads.spool.client.job_view import (
    JobView,
    Listed,
    Partial,
    Position,
    Progress,
    QueuePositions,
    read_job_view,
    read_partial,
    read_progress,
)
from penstock.workloads.spool.client.work import MAX_PROMPT, PROMPT
from penstock.workloads.spool.disk.files import read_text
from penstock.workloads.spool.disk.ids import JobId, order_of
from penstock.workloads.spool.disk.peers import is_served
from penstock.workloads.spool.disk.watching import FolderWatch, Names
from penstock.workloads.spool.disk.workspace import FORWARD, Workspace

_FIRST, _LONGEST, _GROWTH = 0.05, 1.0, 1.5


class WaitBackoff:
    """How long until the next look, and whether there is one."""

    def __init__(self, timeout: float | None, clock: Clock) -> None:
        self._clock = clock
        self._end = None if timeout is None else clock.monotonic() + timeout
        self._pause = _FIRST

    def next(self, what: str) -> float:
        """Seconds to wait now; WaitTimedOut when there are none left."""
        pause, self._pause = self._pause, min(_LONGEST, self._pause * _GROWTH)
        if self._end is None:
            return pause
        left = self._end - self._clock.monotonic()
        if left <= 0:
            raise WaitTimedOut(f"{what} within the time given", hint="nothing was cancelled")
        return min(pause, left)


def ended(workspace: Workspace, job_id: JobId, patience: WaitBackoff) -> None:
    with Names(_ends(workspace)) as names:
        while not _has_ended(workspace, job_id):
            names.wait_for(job_id, patience.next(f"job {job_id} did not end"))


async def ended_async(workspace: Workspace, job_id: JobId, patience: WaitBackoff) -> None:
    moved = asyncio.Event()
    watch = FolderWatch(moved.set)
    try:
        for folder in _ends(workspace):
            watch.add(folder, lambda name: moved.set() if name == job_id else None)
        while not _has_ended(workspace, job_id):
            try:
                async with asyncio.timeout(patience.next(f"job {job_id} did not end")):
                    await moved.wait()
            except TimeoutError:
                continue
            moved.clear()
    finally:
        watch.close()


def idle(workspace: Workspace, patience: WaitBackoff) -> None:
    with Names(_ends(workspace)) as names:
        while not _is_idle(workspace):
            names.wait(patience.next("the jobs did not end"))


def _ends(workspace: Workspace) -> list[Path]:
    return [workspace.folder(status) for status in sorted(SPOOL.final)]


def _has_ended(workspace: Workspace, job_id: JobId) -> bool:
    status = workspace.find(job_id)
    if status is Status.MISSING:
        raise NotFound(f"there is no job {job_id} in {workspace.path}")
    return SPOOL.is_final(status)


def _is_idle(workspace: Workspace) -> bool:
    """A look at the queue again, for a job that was put back to it while we looked on."""
    busy = (Status.QUEUED, Status.RUNNING, Status.QUEUED)
    return not any(True for status in busy for _ in workspace.ids(status))


class Flow:
    """Asks a workspace. Every id is checked first: InvalidRequest if it can't be one."""

    def __init__(self, workspace: Workspace | Path | str, *, clock: Clock | None = None) -> None:
        self.workspace = workspace if isinstance(workspace, Workspace) else Workspace(workspace)
        self._clock = clock or SystemClock()
        self._positions = QueuePositions(self.workspace, self._clock)

    def status(self, job_id: JobId) -> Status:
        """MISSING only if it is in none of the folders, not if it moves just now."""
        return self.workspace.find(job_id)

    def exists(self, job_id: JobId) -> bool:
        return self.status(job_id) is not Status.MISSING

    def get(self, job_id: JobId) -> JobView:
        """What there is of it; everything is of the state that is told."""
        while (status := self.status(job_id)) is not Status.MISSING:
            found = read_job_view(self.workspace.of(status, job_id), job_id, status)
            if self.workspace.holds(status, job_id):
                return found
        return JobView(job_id=job_id, status=status)

    def prompt(self, job_id: JobId) -> str:
        """NotFound if there is no such job; Unfit if its prompt is no text."""
        while True:
            folder = self.workspace.of(self._known(job_id), job_id)
            try:
                return read_text(folder, PROMPT, MAX_PROMPT)
            except FileNotFoundError:
                if os.path.lexists(folder):
                    raise NotFound(f"job {job_id} has no {PROMPT}") from None

    def list(self, states: Collection[Status] = VISIBLE, limit: int | None = None) -> list[Listed]:
        """By id, the newest first. No job is looked into, and none that moves is missed."""
        found: dict[JobId, Status] = {}
        for status in FORWARD:
            found.update(dict.fromkeys(self.workspace.ids(status), status))
        ids = [job_id for job_id, status in found.items() if status in states]
        if limit is None:
            ids.sort(key=order_of, reverse=True)
        else:
            ids = heapq.nlargest(limit, ids, key=order_of)
        return [Listed(job_id, found[job_id]) for job_id in ids]

    def counts(self) -> dict[Status, int]:
        return self.workspace.counts()

    def latest(self) -> JobView | None:
        """The job that ended last."""
        ends: list[tuple[float, JobId]] = []
        for status in sorted(SPOOL.final):
            for job_id in self.workspace.ids(status):
                try:
                    ends.append((os.lstat(self.workspace.of(status, job_id)).st_mtime, job_id))
                except FileNotFoundError:
                    continue
        return self.get(max(ends)[1]) if ends else None

    def is_served(self) -> bool:
        """Whether a server is seen that may take queued jobs."""
        return is_served(self.workspace, self._clock)

    def position(self, job_id: JobId) -> Position:
        """How many are before it, and how long it may take; NotFound if there is no such job."""
        return self._positions.of(job_id, self._known(job_id))

    def partial(self, job_id: JobId) -> Partial:
        """What it has said so far. NotFound if there is no such job."""
        while True:
            status = self._known(job_id)
            if SPOOL.is_final(status):
                return Partial(status=status, text=self.get(job_id).text)
            folder = self.workspace.of(status, job_id)
            text, progress = read_partial(folder), read_progress(folder)
            if status is Status.QUEUED:
                text, progress = "", Progress()
            if self.workspace.holds(status, job_id):
                return Partial(status=status, text=text, progress=progress)

    # -- waiting ----------------------------------------------------------------------

    def wait(self, job_id: JobId, timeout: float | None = None) -> JobView:
        """Until it has ended. NotFound if it is not there, or is taken away; WaitTimedOut."""
        ended(self.workspace, job_id, WaitBackoff(timeout, self._clock))
        return self.get(job_id)

    async def await_end(self, job_id: JobId, timeout: float | None = None) -> JobView:
        """The same, in an event loop."""
        await ended_async(self.workspace, job_id, WaitBackoff(timeout, self._clock))
        return self.get(job_id)

    def wait_idle(self, timeout: float | None = None) -> dict[Status, int]:
        """Until no job is queued or running; returns the counts."""
        idle(self.workspace, WaitBackoff(timeout, self._clock))
        return self.counts()

    def _known(self, job_id: JobId) -> Status:
        status = self.status(job_id)
        if status is Status.MISSING:
            raise NotFound(f"there is no job {job_id} in {self.workspace.path}")
        return status
