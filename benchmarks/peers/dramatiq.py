"""Dramatiq on a Redis of its own that keeps everything in memory, its users' usual setting."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from processes import start, stop

MISSING = "dramatiq is not installed: 'make bench' installs it"
MISSING_SERVER = "there is no redis-server: install the system's package of that name"
_THREADS = "8"
"""Its default for one process."""


class DramatiqPeer:
    def __init__(self, folder: Path) -> None:
        self._log = folder / "dramatiq.log"
        port = _free_port()
        where = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
        memory_only = ["--save", "", "--appendonly", "no"]
        self._server = start(["redis-server", *where, *memory_only], folder / "redis.log")
        _wait_for(port)
        os.environ["BENCH_REDIS"] = f"redis://127.0.0.1:{port}/0"
        from peers import dramatiq_tasks  # made from what was just set

        self._tasks = dramatiq_tasks

    def clear(self) -> None:
        self._tasks.broker.client.flushall()

    def submit(self, sent: int) -> None:
        self._tasks.noop.send(sent)

    def submit_nap(self, sent: int) -> None:
        self._tasks.nap.send(sent)

    def start_workers(self, count: int) -> list[subprocess.Popen[bytes]]:
        program = Path(sys.executable).with_name("dramatiq")
        options = ["--processes", str(count), "--threads", _THREADS]
        return [start([str(program), "peers.dramatiq_tasks", *options], self._log)]

    def server_pids(self) -> list[int]:
        return [self._server.pid]

    def close(self) -> None:
        self._tasks.broker.close()
        stop(self._server)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_for(port: int, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 0.3).close()
            return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
