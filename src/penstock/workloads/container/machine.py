"""Facts about the machine that a worker runs on, for /info and /health.

Whatever can't be read is None; nothing here raises. `Machine` reads below a folder of its own
in tests.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
from pathlib import Path

from msgspec import Struct

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
    path = Path(folder).absolute()
    for place in (path, *path.parents):
        try:
            usage = shutil.disk_usage(place)
        except FileNotFoundError:
            continue
        except OSError:
            return Disk()
        return Disk(usage.total // _MB, usage.free // _MB)
    return Disk()


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
