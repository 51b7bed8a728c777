"""Processes that a measurement starts and ends, and what the system says of them: processor time,
memory, and how long a flush takes."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import pwd
import signal
import socket
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
"""The folder of the benchmarks: workers import from it."""
PATH = os.pathsep.join(
    filter(None, (str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")))
)
"""Where the processes of a benchmark import from: tests/support has engines and fakes."""
_TICKS = os.sysconf("SC_CLK_TCK")


def start(
    argv: Sequence[str],
    log: Path,
    environment: Mapping[str, str] | None = None,
    user: str | None = None,
) -> subprocess.Popen[bytes]:
    """Start a process in a group of its own, its output in `log`; as `user`, if we are root."""
    identity: dict[str, Any] = {}
    if user is not None:
        identity = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
    with log.open("ab") as said:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            cwd=HERE,
            env={**os.environ, "PYTHONPATH": PATH, **(environment or {})},
            start_new_session=True,
            **identity,
        )


def stop(process: subprocess.Popen[bytes], patience: float = 5.0) -> None:
    """Ask it to end, wait, then kill what is left of its group."""
    _signal(process, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(patience)
    kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


@contextmanager
def running(started: Sequence[subprocess.Popen[bytes]]) -> Iterator[list[int]]:
    """The ids of these processes, which are stopped at the end."""
    try:
        yield [process.pid for process in started]
    finally:
        for process in started:
            stop(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_for_port(port: int) -> None:
    """Wait until something listens there. Raises TimeoutError."""

    def is_open() -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 0.3).close()
            return True
        return False

    wait(is_open, f"nothing listens at port {port}", 20.0)


def until(met: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Wait for something; whether it came to be in time."""
    end = time.monotonic() + seconds
    while not met():
        if time.monotonic() > end:
            return False
        time.sleep(0.005)
    return True


def wait(met: Callable[[], bool], problem: str, seconds: float = 120.0) -> None:
    """The same; raises TimeoutError, which says what did not come to be."""
    if not until(met, seconds):
        raise TimeoutError(problem)


# -- what the system says --------------------------------------------------------------


def cpu_seconds(*pids: int) -> float:
    """Processor time used so far by these processes and all below them, ended ones included."""
    used: dict[int, int] = {}
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it ended while we looked
        pid = int(entry.name)
        children[int(fields[1])].append(pid)
        used[pid] = sum(map(int, fields[11:15]))
    total, todo = 0, list(pids)
    while todo:
        pid = todo.pop()
        total += used.get(pid, 0)
        todo += children[pid]
    return total / _TICKS


def process_seconds(pid: int) -> float:
    """The same of one process without those below it, exact to the microsecond (Linux)."""
    return time.clock_gettime(~pid << 3 | 2)


def busy_percent(seconds: float = 0.25) -> float:
    """How much of all cores is in use: while we do nothing, it is what others do."""
    before = _core_times()
    time.sleep(seconds)
    passed = [now - then for now, then in zip(_core_times(), before, strict=True)]
    idle = passed[3] + passed[4]
    return 100 * (1 - idle / max(1, sum(passed)))


def _core_times() -> list[int]:
    """Ticks spent: user, nice, system, idle, waiting for a disk, interrupts, stolen."""
    with Path("/proc/stat").open() as file:
        return [int(field) for field in file.readline().split()[1:9]]


def resident_bytes(pid: int) -> int:
    """What the process occupies in memory now."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def flush_times(folder: Path, count: int = 200) -> list[float]:
    """Seconds that appending 4 KiB and flushing it to disk takes here, again and again."""
    times = []
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        for _ in range(count):
            start = time.perf_counter()
            file.write(bytes(4096))
            os.fsync(file.fileno())
            times.append(time.perf_counter() - start)
    return times


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def machine() -> dict[str, str]:
    """What a reader needs to know to judge the figures."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    loop = "uvloop" if importlib.util.find_spec("uvloop") else "asyncio"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    return {
        "processor": f"{model}, {len(os.sched_getaffinity(0))} cores",
        "memory": f"{memory:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "Python": f"{platform.python_version()}, event loop {loop}",
    }
