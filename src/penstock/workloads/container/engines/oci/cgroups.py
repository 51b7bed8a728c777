"""The control groups of a container: what it used, whether it was killed for memory, and their
removal. Both versions of the interface; on a machine that has both, version 1 counts.

runc makes and keeps them itself (`runc run --keep`). crun and runsc remove theirs at the end,
and with them the counters; for these they are made here, and the launcher steps into them.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from penstock.core.containers import Usage
from penstock.workloads.container.engine import EngineUnavailable, Plan
from penstock.workloads.container.engines.oci.bundle import cpu_quota

_NEEDED = ("memory", "cpu", "cpuacct", "pids", "devices", "freezer")
"""Controllers of version 1 that a container is put into."""
_NODES = ("1:3", "1:5", "1:7", "1:8", "1:9", "5:0", "5:2", "136:*")
"""null, zero, full, random, urandom, tty, ptmx, and terminals."""
_DEVICES = ("c *:* m", "b *:* m", *(f"c {node} rwm" for node in _NODES))
"""The runtime makes them; a container can't, without the capability."""


class Cgroups:
    """Of one machine; `mounts` are the lines of /proc/self/mounts."""

    def __init__(self, mounts: str) -> None:
        self.unified: Path | None = None
        self.controllers: dict[str, Path] = {}
        for line in mounts.splitlines():
            _, place, kind, options, *_ = line.split(" ")
            if kind == "cgroup2":
                self.unified = Path(place)
            elif kind == "cgroup":
                for option in options.split(","):
                    self.controllers.setdefault(option, Path(place))

    @classmethod
    def here(cls) -> Cgroups:
        return cls(Path("/proc/self/mounts").read_text())

    @property
    def is_v2(self) -> bool:
        return "memory" not in self.controllers

    @property
    def is_hybrid(self) -> bool:
        """Version 1, and version 2 beside it with a controller: crun refuses that."""
        return not self.is_v2 and self.unified is not None

    @property
    def counts_swap(self) -> bool:
        if self.is_v2:
            return True
        return (self.controllers["memory"] / "memory.memsw.limit_in_bytes").exists()

    def check(self) -> None:
        """Raises EngineUnavailable if containers can't be limited here."""
        if self.is_v2 and self.unified is None:
            raise EngineUnavailable("No cgroup file system is mounted at /sys/fs/cgroup.")
        lacking = {"memory", "cpu", "pids"} - self._offered()
        if lacking:
            names = ", ".join(sorted(lacking))
            raise EngineUnavailable(f"The cgroup controllers {names} are not available here.")

    def _offered(self) -> set[str]:
        if self.is_v2 and self.unified is not None:
            return set((self.unified / "cgroup.controllers").read_text().split())
        return set(self.controllers)

    def make(self, plan: Plan) -> list[Path]:
        """Groups with the plan's limits; whoever writes 0 into their `cgroup.procs` is in."""
        if self.is_v2:
            return [self._make_v2(plan)]
        made = []
        for place in self._places(plan.name, _NEEDED):
            place.mkdir()
            made.append(place)
        quota, period = cpu_quota(plan.cpus)
        memory = self.controllers["memory"] / plan.name
        _write(memory / "memory.limit_in_bytes", plan.memory)
        if self.counts_swap:
            _write(memory / "memory.memsw.limit_in_bytes", plan.memory)
        _write(self.controllers["cpu"] / plan.name / "cpu.cfs_period_us", period)
        _write(self.controllers["cpu"] / plan.name / "cpu.cfs_quota_us", quota)
        _write(self.controllers["pids"] / plan.name / "pids.max", plan.pids)
        if "devices" in self.controllers:
            devices = self.controllers["devices"] / plan.name
            _write(devices / "devices.deny", "a")
            for rule in _DEVICES:
                _write(devices / "devices.allow", rule)
        return made

    def _make_v2(self, plan: Plan) -> Path:
        assert self.unified is not None
        _write(self.unified / "cgroup.subtree_control", "+memory +cpu +pids")
        place = self.unified / plan.name
        place.mkdir()
        _write(place / "memory.max", plan.memory)
        if (place / "memory.swap.max").exists():
            _write(place / "memory.swap.max", 0)
        _write(place / "cpu.max", "{} {}".format(*cpu_quota(plan.cpus)))
        _write(place / "pids.max", plan.pids)
        return place

    def usage(self, name: str) -> Usage:
        if self.is_v2:
            peak = _number(self._one(name, "memory.peak"))
            cpu = _field(self._one(name, "cpu.stat"), "usage_usec")
            return Usage(peak, None if cpu is None else cpu / 1e6)
        peak = _number(self._one(name, "memory.max_usage_in_bytes"))
        cpu = _number(self._one(name, "cpuacct.usage"))
        return Usage(peak, None if cpu is None else cpu / 1e9)

    def oom_kills(self, name: str) -> int:
        file = "memory.events" if self.is_v2 else "memory.oom_control"
        return _field(self._one(name, file), "oom_kill") or 0

    def processes(self, name: str) -> list[int]:
        """All that are in it."""
        found: set[int] = set()
        for place in self._all(name):
            for folder in (place, *_below(place)):
                found.update(int(pid) for pid in _read(folder / "cgroup.procs").split())
        return sorted(found - {0})

    def kill(self, name: str) -> None:
        """SIGKILL to everything that is in it now."""
        if self.is_v2 and self.unified is not None:
            with contextlib.suppress(OSError):
                _write(self.unified / name / "cgroup.kill", 1)
                return
        for pid in self.processes(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def remove(self, name: str) -> bool:
        """False if some process is still in one of them."""
        gone = True
        for place in self._all(name):
            for folder in (*_below(place), place):
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    continue
                except OSError:
                    gone = False
        return gone

    def is_in(self, name: str, pid: int) -> bool:
        """Whether a process belongs to this container (and its PID was not given anew)."""
        lines = _read(Path(f"/proc/{pid}/cgroup")).splitlines()
        return any(line.split(":", 2)[2].strip("/").split("/")[0] == name for line in lines)

    def _all(self, name: str) -> Iterator[Path]:
        places = {*self.controllers.values(), *([self.unified] if self.unified else ())}
        for place in places:
            if (place / name).is_dir():
                yield place / name

    def _places(self, name: str, controllers: tuple[str, ...]) -> list[Path]:
        """Two controllers may be mounted together."""
        found = (self.controllers[each] for each in controllers if each in self.controllers)
        return [place / name for place in dict.fromkeys(found)]

    def _one(self, name: str, file: str) -> str:
        if self.is_v2:
            return _read(self.unified / name / file) if self.unified else ""
        controller = file.partition(".")[0]
        place = self.controllers.get(controller)
        return _read(place / name / file) if place else ""


def _below(place: Path) -> list[Path]:
    """Groups inside, the innermost first."""
    return [Path(folder) for folder, _, _ in os.walk(place, topdown=False)][:-1]


def _write(file: Path, value: int | str) -> None:
    with file.open("w") as out:
        out.write(str(value))


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _field(text: str, name: str) -> int | None:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _number(value)
    return None
