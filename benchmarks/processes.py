"""Processes that a measurement starts, and ends itself."""

from __future__ import annotations

import contextlib
import os
import pwd
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
"""The folder of the benchmarks: workers import from it."""


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
            env={**os.environ, "PYTHONPATH": str(HERE), **(environment or {})},
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
