"""Which job starts next, and why one waits. Pure: it holds numbers and names, and starts nothing.

The order is strict: by priority, and within one as jobs came. The first in line starts as soon
as there is room for it, and nobody overtakes it, not even a smaller job that would fit: so a
large job gets its turn, at the price of room that stays empty until then. Jobs of a lower
priority wait for as long as jobs of a higher one keep coming.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from msgspec import Struct

from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.job import ContainerJob, ContainerRecord, Mode, Priority

_SLACK = 1e-6
"""Sums of fractions of a processor are not exact."""


class Need(Struct, frozen=True):
    """What a job is admitted with."""

    memory_mb: float
    cpus: float


class Room(Struct, frozen=True):
    """What all running jobs may use together."""

    jobs: int
    memory_mb: float
    cpus: float

    @classmethod
    def of(cls, config: WorkerConfig, machine_mb: float) -> Room:
        """A worker that says nothing of processors has one for each job that may run at once,
        and never fewer than a single job may ask for."""
        return cls(
            config.max_concurrent_jobs,
            config.memory_mb or machine_mb * 0.8,
            config.cpus or max(float(config.max_concurrent_jobs), config.most.cpus),
        )

    def too_small(self, need: Need) -> tuple[str, str] | None:
        """The field by which a job can never be admitted, and why; None if it can."""
        if need.memory_mb > self.memory_mb + _SLACK:
            return (
                "runtime.limits.memory_mb",
                f"{_mb(need.memory_mb)} are asked for, and this worker has {_mb(self.memory_mb)} "
                "for all its jobs",
            )
        if need.cpus > self.cpus + _SLACK:
            return (
                "runtime.limits.cpus",
                f"{need.cpus:g} processors are asked for, and this worker has {self.cpus:g} "
                "for all its jobs",
            )
        return None


def need_of(job: ContainerJob, config: WorkerConfig) -> Need:
    """A job that builds its image needs room for the build, too; the two don't overlap."""
    memory = job.limits.memory_mb
    if job.mode is Mode.BUILD:
        memory = max(memory, config.build.memory_mb)
    return Need(memory, job.limits.cpus)


class Waiting(Struct, frozen=True, order=True):
    """A job in line; the order of the fields is the order of the line."""

    rank: int
    seq: int
    job_id: str
    need: Need

    @classmethod
    def of(cls, record: ContainerRecord) -> Waiting:
        need = Need(record.memory_mb, record.cpus)
        return cls(record.priority.rank, record.seq, record.job_id, need)


class Queue:
    """Those that wait, in order, and what those that run hold."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self._line: dict[str, Waiting] = {}
        # One for each priority, sorted, so that nobody's place has to be counted out.
        self._lanes: list[list[tuple[int, str]]] = [[] for _ in Priority]
        self._held: dict[str, Need] = {}
        self._memory_mb = self._cpus = 0.0

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, job_id: object) -> bool:
        return job_id in self._line

    def __iter__(self) -> Iterator[Waiting]:
        """In the order in which they are to start."""
        for lane in self._lanes:
            yield from (self._line[job_id] for _, job_id in lane)

    @property
    def running(self) -> int:
        return len(self._held)

    @property
    def held(self) -> tuple[float, float]:
        """Memory in MB and processors that running jobs have."""
        return self._memory_mb, self._cpus

    def add(self, waiting: Waiting) -> None:
        self._line[waiting.job_id] = waiting
        insort(self._lanes[waiting.rank], (waiting.seq, waiting.job_id))

    def discard(self, job_id: str) -> Waiting | None:
        """Take it out of the line; None if it is not in it."""
        waiting = self._line.pop(job_id, None)
        if waiting is not None:
            lane = self._lanes[waiting.rank]
            del lane[bisect_left(lane, (waiting.seq, job_id))]
        return waiting

    def next(self) -> Waiting | None:
        """The first in line, if there is room for it now."""
        first = self._first()
        return first if first is not None and not self._lacks(first.need) else None

    def begin(self, waiting: Waiting) -> None:
        """It leaves the line and takes its room."""
        self.discard(waiting.job_id)
        self.hold(waiting.job_id, waiting.need)

    def hold(self, job_id: str, need: Need) -> None:
        """A job that runs already; there may be less room than it takes."""
        self._held[job_id] = need
        self._sum()

    def release(self, job_id: str) -> None:
        if self._held.pop(job_id, None) is not None:
            self._sum()

    def position(self, job_id: str) -> int | None:
        """How many are to start before it."""
        waiting = self._line.get(job_id)
        if waiting is None:
            return None
        before = sum(map(len, self._lanes[: waiting.rank]))
        return before + bisect_left(self._lanes[waiting.rank], (waiting.seq, job_id))

    def waits_for(self, job_id: str) -> str:
        """What keeps it from starting, in a sentence; empty if nothing in here does."""
        first = self._first()
        place = self.position(job_id)
        if place is None or first is None:
            return ""
        lacks = self._lacks(first.need)
        if not place:
            return lacks
        before = "1 job is" if place == 1 else f"{place} jobs are"
        return f"{before} before it; the first waits: {lacks}" if lacks else f"{before} before it"

    def _first(self) -> Waiting | None:
        return next((self._line[lane[0][1]] for lane in self._lanes if lane), None)

    def _lacks(self, need: Need) -> str:
        room = self.room
        if self.running >= room.jobs:
            return f"{self.running} of {room.jobs} jobs are running"
        if (free := room.memory_mb - self._memory_mb) + _SLACK < need.memory_mb:
            return f"needs {_mb(need.memory_mb)} and {_mb(max(0, free))} are free"
        if (left := room.cpus - self._cpus) + _SLACK < need.cpus:
            return f"needs {need.cpus:g} processors and {max(0, round(left, 3)):g} are free"
        return ""

    def _sum(self) -> None:
        # Summed anew each time (they are few), so that no error of rounding adds up.
        self._memory_mb = sum(need.memory_mb for need in self._held.values())
        self._cpus = sum(need.cpus for need in self._held.values())


def _mb(amount: float) -> str:
    return f"{round(amount, 1):g} MB" if amount < 1e6 else f"{amount:.0f} MB"
