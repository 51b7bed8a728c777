"""Oban on a PostgreSQL of its own with fsync, through psycopg. It needs Python 3.12.

`python -m peers.oban URL` is one worker process.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop
from marks import mark
from oban import Oban, worker
from oban.schema import install
from peers.postgres import Postgres
from processes import start

LIMIT = 100
"""Jobs that a worker process fetches and runs at once (its default is 10)."""
_CONNECTIONS = 10
"""Of a process: its own default."""


@worker(queue="default")
class Noop:
    async def process(self, job: Any) -> None:
        mark(job.args["sent"])


@worker(queue="default")
class Nap:
    async def process(self, job: Any) -> None:
        await asyncio.sleep(0.02)
        mark(job.args["sent"])


class ObanPeer:
    bulk = True

    def __init__(self, folder: Path) -> None:
        self._log = folder / "oban.log"
        self.server = Postgres(folder)
        self._loop = uvloop.new_event_loop()
        try:
            self._do(self._connect())
        except BaseException:
            self.server.close()
            raise

    async def _connect(self) -> None:
        self._pool = await Oban.create_pool(self.server.url, max_size=2)
        await install(self._pool)
        self._oban = Oban(pool=self._pool)
        await self._oban.start()

    def clear(self) -> None:
        self._do(self._clear())

    async def _clear(self) -> None:
        async with self._pool.connection() as connection:
            await connection.execute("TRUNCATE oban_jobs")

    def submit(self, sent: int) -> None:
        self._do(self._oban.enqueue(Noop.new({"sent": sent})))

    def submit_nap(self, sent: int) -> None:
        self._do(self._oban.enqueue(Nap.new({"sent": sent})))

    def submit_many(self, count: int) -> None:
        self._do(self._oban.enqueue_many(Noop.new({"sent": 0}) for _ in range(count)))

    def start_workers(self, count: int) -> list[subprocess.Popen[bytes]]:
        argv = [sys.executable, "-m", "peers.oban", self.server.url]
        return [start(argv, self._log) for _ in range(count)]

    def server_pids(self) -> list[int]:
        return [self.server.pid]

    def close(self) -> None:
        try:
            self._do(self._disconnect())
        finally:
            self._loop.close()
            self.server.close()

    async def _disconnect(self) -> None:
        await self._oban.stop()
        await self._pool.close()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)


async def work(url: str) -> None:
    pool = await Oban.create_pool(url, max_size=_CONNECTIONS)
    async with Oban(pool=pool, queues={"default": LIMIT}):
        await asyncio.Event().wait()


if __name__ == "__main__":
    uvloop.run(work(sys.argv[1]))
