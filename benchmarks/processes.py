"""Processes that a measurement starts, and ends itself."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
"""The folder of the benchmarks: workers import from it."""


def start(
    argv: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a process in a group of its own; what it says goes to `log`."""
    with log.open("ab") as said:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            cwd=HERE,
            env={**os.environ, "PYTHONPATH": str(HERE), **(environment or {})},
            start_new_session=True,
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
