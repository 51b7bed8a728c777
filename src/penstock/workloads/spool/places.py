"""A queued job's place, and when it may have ended."""

from __future__ import annotations

import heapq
import os

from msgspec import Struct

from penstock.core.job import Priority
from penstock.lifecycles.spool import Status
from penstock.ports.clock import Clock
from penstock.workloads.spool.disk import Unfit
from penstock.workloads.spool.found import read_progress
from penstock.workloads.spool.ids import JobId, order_of
from penstock.workloads.spool.meta import OPTIONS, read_options, seen_meta
from penstock.workloads.spool.serving.neighbours import is_served
from penstock.workloads.spool.serving.turns import Turn, turn_of
from penstock.workloads.spool.workspace import Workspace

_LATELY = 20
"""How many jobs that are DONE tell how long one takes."""


class Position(Struct, frozen=True, kw_only=True):
    status: Status
    ahead: int = 0
    """Queued jobs whose turn is before its own."""
    queued: int = 0
    running: int = 0
    eta_s: float | None = None
    """Seconds until it may have ended, judged by those that ended lately; None if none did."""
    served: bool = True
    """False if it is queued and no server is seen; then it waits for one first."""


class Places:
    """Remembers the turns of queued jobs: they don't change."""

    def __init__(self, workspace: Workspace, clock: Clock) -> None:
        self._workspace, self._clock = workspace, clock
        self._turns: dict[JobId, Turn] = {}

    def of(self, job_id: JobId, status: Status) -> Position:
        if status is Status.RUNNING:
            progress = read_progress(self._workspace.of(status, job_id))
            return Position(status=status, eta_s=progress.eta_s)
        if status is not Status.QUEUED:
            return Position(status=status, eta_s=0.0)
        return self._queued(job_id)

    def _queued(self, job_id: JobId) -> Position:
        queued = {*self._workspace.ids(Status.QUEUED), job_id}
        self._turns = {one: self._turns.get(one) or self._turn(one) for one in queued}
        mine = self._turns[job_id]
        ahead = sum(1 for turn in self._turns.values() if turn < mine)
        running = sum(1 for _ in self._workspace.ids(Status.RUNNING))
        return Position(
            status=Status.QUEUED,
            ahead=ahead,
            queued=len(queued),
            running=running,
            eta_s=self._eta(ahead, max(1, running)),
            served=is_served(self._workspace, self._clock),
        )

    def _turn(self, job_id: JobId) -> Turn:
        return turn_of(job_id, self._priority(job_id), self._clock.now())

    def _priority(self, job_id: JobId) -> Priority:
        folder = self._workspace.of(Status.QUEUED, job_id)
        if not os.access(f"{folder}/{OPTIONS}", os.F_OK):
            return Priority.BATCH
        try:
            return read_options(folder).priority
        except Unfit:
            return Priority.BATCH

    def _eta(self, ahead: int, at_once: int) -> float | None:
        done = heapq.nlargest(_LATELY, self._workspace.ids(Status.DONE), key=order_of)
        metas = (seen_meta(self._workspace.of(Status.DONE, job_id)) for job_id in done)
        took = [meta.duration_s for meta in metas if meta.duration_s is not None]
        if not took:
            return None
        return (ahead // at_once + 1) * sum(took) / len(took)
