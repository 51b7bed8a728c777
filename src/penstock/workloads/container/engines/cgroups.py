"""The control groups of a container: what it used, whether it was killed for memory, and their
removal. Both versions of the interface; on a machine that has both, version 1 counts.

The runtimes make them, and leave them when the container ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
from functools import cached_property
from pathlib import Path

from penstock.workloads.container.engine import EngineUnavailable
from penstock.workloads.container.job import Usage

_ENOUGH = 1 << 16


class Cgroups:
    """Of one machine; `mounts` are the lines of /proc/self/mounts."""

    def __init__(self, mounts: str) -> None:
        self.unified = ""
        """Where version 2 is mounted."""
        self.controllers: dict[str, str] = {}
        """Where those of version 1 are."""
        for line in mounts.splitlines():
            _, place, kind, options, *_ = line.split(" ")
            if kind == "cgroup2":
                self.unified = place
            elif kind == "cgroup":
                for option in options.split(","):
                    self.controllers.setdefault(option, place)

    @classmethod
    def here(cls) -> Cgroups:
        return cls(Path("/proc/self/mounts").read_text())

    @property
    def is_v2(self) -> bool:
        return "memory" not in self.controllers

    @property
    def is_hybrid(self) -> bool:
        """Version 1, and version 2 beside it: crun refuses that."""
        return not self.is_v2 and bool(self.unified)

    @cached_property
    def counts_swap(self) -> bool:
        return self.is_v2 or os.path.exists(
            f"{self.controllers['memory']}/memory.memsw.limit_in_bytes"
        )

    def check(self) -> None:
        """Raises EngineUnavailable if containers can't be limited here."""
        if self.is_v2 and not self.unified:
            raise EngineUnavailable("No cgroup file system is mounted at /sys/fs/cgroup.")
        lacking = {"memory", "cpu", "pids"} - self._offered()
        if lacking:
            names = ", ".join(sorted(lacking))
            raise EngineUnavailable(f"The cgroup controllers {names} are not available here.")

    def _offered(self) -> set[str]:
        if self.is_v2:
            return set(_read(f"{self.unified}/cgroup.controllers").split())
        return set(self.controllers)

    def usage(self, name: str) -> Usage:
        if self.is_v2:
            peak = _number(self._get(name, "memory.peak") or self._get(name, "memory.current"))
            cpu = _field(self._get(name, "cpu.stat"), "usage_usec")
            return Usage(peak, None if cpu is None else cpu / 1e6)
        peak = _number(self._get(name, "memory.max_usage_in_bytes"))
        cpu = _number(self._get(name, "cpuacct.usage"))
        return Usage(peak, None if cpu is None else cpu / 1e9)

    def keeps_peak(self, name: str) -> bool:
        """Whether `usage` has the most that was used; else (before Linux 5.19) what is used now."""
        return not self.is_v2 or os.path.exists(self._file(name, "memory.peak"))

    def oom_kills(self, name: str) -> int:
        file = "memory.events" if self.is_v2 else "memory.oom_control"
        return _field(self._get(name, file), "oom_kill") or 0

    def processes(self, name: str) -> list[int]:
        """All that are in it."""
        found: set[int] = set()
        for place in self._places():
            for folder in _with_inner(f"{place}/{name}"):
                found.update(int(pid) for pid in _read(f"{folder}/cgroup.procs").split())
        return sorted(found - {0})

    def kill(self, name: str) -> None:
        """SIGKILL to everything that is in it now."""
        if self.is_v2:
            with contextlib.suppress(OSError):
                Path(self._file(name, "cgroup.kill")).write_text("1")
                return
        for pid in self.processes(name):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)

    def remove(self, name: str) -> bool:
        """False if some process is still in one of them."""
        return all(_remove(f"{place}/{name}") for place in self._places())

    def _places(self) -> set[str]:
        return {*self.controllers.values(), self.unified} - {""}

    def _file(self, name: str, file: str) -> str:
        place = self.unified if self.is_v2 else self.controllers.get(file.partition(".")[0], "")
        return f"{place}/{name}/{file}"

    def _get(self, name: str, file: str) -> str:
        return _read(self._file(name, file))


def _remove(place: str) -> bool:
    try:
        os.rmdir(place)
    except FileNotFoundError:
        return True
    except OSError:
        try:
            for folder in _with_inner(place):
                os.rmdir(folder)
        except OSError:
            return not os.path.exists(place)
    return True


def _with_inner(place: str) -> list[str]:
    """A group and those inside of it, the innermost first."""
    return [folder for folder, _, _ in os.walk(place, topdown=False)]


def _read(file: str) -> str:
    try:
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        parts = []
        while part := os.read(fd, _ENOUGH):
            parts.append(part)
        return b"".join(parts).decode()
    except OSError:
        return ""
    finally:
        os.close(fd)


def _number(text: str) -> int | None:
    return int(text) if text.strip().isdecimal() else None


def _field(text: str, name: str) -> int | None:
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return _number(value)
    return None
