"""Waiting for the end of jobs: woken by the kernel, and by looks that grow rarer."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.core.errors import NotFound, WaitTimedOut
from penstock.lifecycles.spool import SPOOL, Status
from penstock.ports.clock import Clock
from penstock.workloads.spool.ids import JobId
from penstock.workloads.spool.watching import Names, Watch
from penstock.workloads.spool.workspace import Workspace

_FIRST, _LONGEST, _GROWTH = 0.05, 1.0, 1.5


class Patience:
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


def ended(workspace: Workspace, job_id: JobId, patience: Patience) -> None:
    with Names(_ends(workspace)) as names:
        while not _has_ended(workspace, job_id):
            names.wait_for(job_id, patience.next(f"job {job_id} did not end"))


async def ended_async(workspace: Workspace, job_id: JobId, patience: Patience) -> None:
    moved = asyncio.Event()
    watch = Watch(moved.set)
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


def idle(workspace: Workspace, patience: Patience) -> None:
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
