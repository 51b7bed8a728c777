"""Dramatiq on a Redis of its own that keeps everything in memory, its users' usual setting."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from processes import free_port, start, stop, wait_for_port

_THREADS = "8"
"""Its default for one process."""


class DramatiqPeer:
    bulk = False

    def __init__(self, folder: Path) -> None:
        self._log = folder / "dramatiq.log"
        port = free_port()
        where = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(folder)]
        memory_only = ["--save", "", "--appendonly", "no"]
        self._server = start(["redis-server", *where, *memory_only], folder / "redis.log")
        wait_for_port(port)
        os.environ["BENCH_REDIS"] = f"redis://127.0.0.1:{port}/0"
        from peers import dramatiq_tasks  # made from what was just set

        self._tasks = dramatiq_tasks

    def clear(self) -> None:
        self._tasks.broker.client.flushall()

    def submit(self, sent: int) -> None:
        self._tasks.noop.send(sent)

    def submit_nap(self, sent: int) -> None:
        self._tasks.nap.send(sent)

    def submit_many(self, count: int) -> None:
        for _ in range(count):
            self.submit(0)

    def start_workers(self, count: int) -> list[subprocess.Popen[bytes]]:
        program = [sys.executable, "-m", "dramatiq", "peers.dramatiq_tasks"]
        options = ["--processes", str(count), "--threads", _THREADS]
        return [start([*program, *options], self._log)]

    def server_pids(self) -> list[int]:
        return [self._server.pid]

    def close(self) -> None:
        self._tasks.broker.close()
        stop(self._server)
