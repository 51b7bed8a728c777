"""Huey on SQLite, with its own defaults otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from processes import start

POLL = 0.1
"""Seconds between two looks of an idle consumer: Huey's default, which grows while it is idle."""


class HueyPeer:
    bulk = False

    def __init__(self, folder: Path, *, fsync: bool) -> None:
        self._log = folder / "huey.log"
        os.environ["BENCH_HUEY_FILE"] = str(folder / "huey.db")
        os.environ["BENCH_HUEY_FSYNC"] = "1" if fsync else ""
        from peers import huey_tasks  # made from what was just set

        self._tasks = huey_tasks

    def clear(self) -> None:
        self._tasks.huey.flush()

    def submit(self, sent: int) -> None:
        self._tasks.noop(sent)

    def submit_nap(self, sent: int) -> None:
        self._tasks.nap(sent)

    def submit_many(self, count: int) -> None:
        for _ in range(count):
            self.submit(0)

    def start_workers(self, count: int) -> list[subprocess.Popen[bytes]]:
        consumer = [sys.executable, "-m", "huey.bin.huey_consumer", "peers.huey_tasks.huey"]
        options = ["-w", str(count), "-k", "process", "-q", "-n", "-d", str(POLL)]
        return [start([*consumer, *options], self._log)]

    def server_pids(self) -> list[int]:
        return []

    def close(self) -> None:
        self._tasks.huey.storage.close()
