"""The machine that a worker runs on: facts for /info and /health, and how much of its memory and
processors container jobs may use together.

Of the facts, whatever can't be read is None; nothing raises. `Machine` reads below a folder of its
own in tests.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
from pathlib import Path

from msgspec import Struct

from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.job import ContainerJob, Mode
from penstock.workloads.container.timeouts import done_within

_MB = 1 << 20


class Disk(Struct, frozen=True):
    """Of the file system that a folder is on, in whole MB."""

    total_mb: int | None = None
    available_mb: int | None = None


class Memory(Struct, frozen=True):
    total_mb: int
    available_mb: int


class Machine:
    def __init__(self, root: Path = Path("/")) -> None:
        self._proc = root / "proc"
        self.hostname = socket.gethostname()
        self.os = platform.system().lower()
        self.architecture = platform.machine()
        self.threads = os.cpu_count() or 1
        cpus = _records(_text(self._proc / "cpuinfo"))
        self.cpu_model = _cpu_model(cpus)
        self.cpu_cores = _physical_cores(cpus)

    def load_average(self) -> tuple[float, float, float]:
        try:
            return os.getloadavg()
        except OSError:
            return 0.0, 0.0, 0.0

    def memory(self) -> Memory:
        told = {}
        for line in _text(self._proc / "meminfo").splitlines():
            name, _, rest = line.partition(":")
            amount = rest.split()
            if amount and amount[0].isdigit():
                told[name] = int(amount[0]) // 1024
        total = told.get("MemTotal") or _pages("SC_PHYS_PAGES")
        # An old kernel does not tell what is available; what is free is less, and safe.
        available = told.get("MemAvailable", told.get("MemFree", _pages("SC_AVPHYS_PAGES")))
        return Memory(total, min(available, total))


def disk_of(folder: Path | str) -> Disk:
    """Of the folder, or of the nearest one above it that is there."""
    if not str(folder):
        return Disk()
    path = os.path.abspath(folder)
    while True:
        try:
            found = os.statvfs(path)
        except FileNotFoundError:
            path = os.path.dirname(path)
        except OSError:
            return Disk()
        else:
            block = found.f_frsize
            return Disk(found.f_blocks * block // _MB, found.f_bavail * block // _MB)


def _cpu_model(cpus: list[dict[str, str]]) -> str | None:
    names = (cpu.get("model name") or cpu.get("Model") or cpu.get("cpu model") for cpu in cpus)
    return next((name for name in names if name), None)


def _physical_cores(cpus: list[dict[str, str]]) -> int | None:
    """Each pair of a package and a core once; some machines (and all that are not x86) don't
    tell."""
    cores = {(cpu.get("physical id", "0"), cpu["core id"]) for cpu in cpus if "core id" in cpu}
    return len(cores) or None


def _records(text: str) -> list[dict[str, str]]:
    """The blocks of /proc/cpuinfo."""
    blocks = []
    for block in text.split("\n\n"):
        lines = (line.partition(":") for line in block.splitlines())
        if fields := {name.strip(): value.strip() for name, colon, value in lines if colon}:
            blocks.append(fields)
    return blocks


def _pages(name: str) -> int:
    try:
        return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE") // _MB
    except (ValueError, OSError):
        return 0


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


# -- capacity -----------------------------------------------------------------------------------

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

    def __init__(self, config: WorkerConfig, machine_mb: float) -> None:
        self.memory_mb = config.memory_mb or machine_mb * _SHARE
        self.cpus = config.cpus or max(float(config.max_concurrent_jobs), config.max_limits.cpus)
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
            if await done_within(seconds, turn):
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
