"""PgQueuer on a PostgreSQL of its own with fsync, through asyncpg."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from peers.postgres import Postgres
from processes import start

BATCH = 100
"""Jobs that a worker dequeues at a time (its default is 10)."""


class PgQueuerPeer:
    bulk = True

    def __init__(self, folder: Path) -> None:
        self._log = folder / "pgqueuer.log"
        self.server = Postgres(folder)
        self._loop = _new_event_loop()
        try:
            self._do(self._connect())
        except BaseException:
            self.server.close()
            raise

    async def _connect(self) -> None:
        import asyncpg
        from pgqueuer.db import AsyncpgDriver
        from pgqueuer.queries import Queries

        self._connection = await asyncpg.connect(self.server.url)
        self._queries = Queries(AsyncpgDriver(self._connection))
        await self._queries.install()

    def clear(self) -> None:
        self._do(self._connection.execute("truncate pgqueuer cascade"))
        self._do(self._connection.execute("truncate pgqueuer_log"))

    def submit(self, sent: int) -> None:
        self._do(self._queries.enqueue("noop", b"%d" % sent))

    def submit_nap(self, sent: int) -> None:
        self._do(self._queries.enqueue("nap", b"%d" % sent))

    def submit_many(self, count: int) -> None:
        self._do(self._queries.enqueue(["noop"] * count, [b"0"] * count, [0] * count))

    def start_workers(self, count: int) -> list[subprocess.Popen[bytes]]:
        argv = [sys.executable, "-m", "peers.pgqueuer_worker", self.server.url, str(BATCH)]
        return [start(argv, self._log) for _ in range(count)]

    def server_pids(self) -> list[int]:
        return [self.server.pid]

    def close(self) -> None:
        try:
            self._do(self._connection.close())
        finally:
            self._loop.close()
            self.server.close()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
