"""Memory and processors of a worker: how much its container jobs may use together."""

from __future__ import annotations

import asyncio

from msgspec import Struct

from penstock.ports.clock import Clock
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.job import ContainerJob, Mode
from penstock.workloads.container.timeouts import done_within

_SLACK = 1e-6
"""Sums of fractions of a processor are not exact."""
_SHARE = 0.8
"""Of the machine's memory, for jobs, unless the configuration says otherwise."""


class Need(Struct, frozen=True):
    """What one job is admitted with."""

    memory_mb: float
    cpus: float


def need_of(job: ContainerJob, config: WorkerConfig) -> Need:
    """A job that builds its image needs room for the build, too; the two don't overlap."""
    memory = job.limits.memory_mb
    if job.mode is Mode.BUILD:
        memory = max(memory, config.build.memory_mb)
    return Need(memory, job.limits.cpus)


class Capacity:
    """What all running jobs may use, and what they do use.

    Jobs are admitted in the order in which they ask: nobody overtakes one that waits, so that a
    large job gets its turn.
    """

    def __init__(self, config: WorkerConfig, machine_mb: float, clock: Clock) -> None:
        self.memory_mb = config.memory_mb or machine_mb * _SHARE
        self.cpus = config.cpus or max(float(config.max_concurrent_jobs), config.max_limits.cpus)
        self._clock = clock
        self._used: dict[str, Need] = {}
        self._waiting: dict[asyncio.Future[None], tuple[str, Need]] = {}
        self._refused: Need | None = None
        """Of the last job that waited in vain: until there is room for it, no other is taken."""

    def too_small(self, need: Need) -> tuple[str, str] | None:
        """The field by which a job can never be admitted, and why; None if it can."""
        if need.memory_mb > self.memory_mb + _SLACK:
            why = f"needs {_mb(need.memory_mb)}; this worker has {_mb(self.memory_mb)} for all jobs"
            return "runtime.limits.memory_mb", why
        if need.cpus > self.cpus + _SLACK:
            why = f"needs {need.cpus:g} processors; this worker has {self.cpus:g} for all jobs"
            return "runtime.limits.cpus", why
        return None

    @property
    def used(self) -> Need:
        # Summed anew each time (they are few), so that no error of rounding adds up.
        used = self._used.values()
        return Need(sum(one.memory_mb for one in used), sum(one.cpus for one in used))

    def hold(self, job_id: str, need: Need) -> None:
        """Count a job that runs already; there may be less room than it takes."""
        self._used[job_id] = need

    async def admit(self, job_id: str, need: Need, seconds: float) -> str:
        """Wait for room, up to so many seconds. Returns why there is none, or nothing."""
        if not self._waiting and not self.lacks(need):
            self._used[job_id] = need
            self._refused = None
            return ""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[turn] = (job_id, need)
        try:
            if await done_within(self._clock, seconds, turn):
                return ""
        finally:
            if self._waiting.pop(turn, None) is not None:
                self._admit_waiting()
        self._refused = need
        return self.lacks(need) or "other jobs wait for room"

    def release(self, job_id: str) -> None:
        if self._used.pop(job_id, None) is not None:
            self._admit_waiting()

    @property
    def shortage(self) -> str:
        """Why no job is to be sent here now, in a sentence; empty if there is room."""
        if self._refused is not None and (lacks := self.lacks(self._refused)):
            return f"the next job {lacks}"
        self._refused = None
        return ""

    def lacks(self, need: Need) -> str:
        """What is missing for it now."""
        used = self.used
        if (free := self.memory_mb - used.memory_mb) + _SLACK < need.memory_mb:
            return f"needs {_mb(need.memory_mb)} and {_mb(max(0, free))} are free"
        if (left := self.cpus - used.cpus) + _SLACK < need.cpus:
            return f"needs {need.cpus:g} processors and {max(0, round(left, 3)):g} are free"
        return ""

    def _admit_waiting(self) -> None:
        for turn, (job_id, need) in list(self._waiting.items()):
            if self.lacks(need):
                return
            del self._waiting[turn]
            self._used[job_id] = need
            if turn.done():  # it was cancelled just now
                del self._used[job_id]
            else:
                turn.set_result(None)


def _mb(amount: float) -> str:
    return f"{round(amount, 1):g} MB" if amount < 1e6 else f"{amount:.0f} MB"
