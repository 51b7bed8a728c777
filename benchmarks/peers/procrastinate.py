"""Procrastinate on a PostgreSQL of its own with fsync, through psycopg."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from peers.postgres import Postgres
from processes import start

CONCURRENCY = 20
"""Jobs that a worker runs at once (its default is 1)."""


def make_app(url: str, connections: int) -> Any:
    import procrastinate
    from marks import mark

    connector = procrastinate.PsycopgConnector(
        conninfo=url, min_size=connections, max_size=connections
    )
    app = procrastinate.App(connector=connector)

    @app.task(name="noop")
    async def noop(sent: int = 0) -> None:
        mark(sent)

    @app.task(name="nap")
    async def nap(sent: int = 0) -> None:
        await asyncio.sleep(0.02)
        mark(sent)

    return app


class ProcrastinatePeer:
    bulk = True

    def __init__(self, folder: Path) -> None:
        self._log = folder / "procrastinate.log"
        self._server = Postgres(folder)
        self._loop = asyncio.new_event_loop()
        try:
            self._app = make_app(self._server.url, 2)
            self._do(self._app.open_async())
            self._do(self._app.schema_manager.apply_schema_async())
        except BaseException:
            self._server.close()
            raise

    def clear(self) -> None:
        sql = "truncate procrastinate_jobs cascade"
        self._do(self._app.connector.execute_query_async(sql))

    def submit(self, sent: int) -> None:
        self._do(self._app.tasks["noop"].defer_async(sent=sent))

    def submit_nap(self, sent: int) -> None:
        self._do(self._app.tasks["nap"].defer_async(sent=sent))

    def submit_many(self, count: int) -> None:
        self._do(self._app.tasks["noop"].batch_defer_async(*[{"sent": 0}] * count))

    def start_workers(self, count: int) -> list[subprocess.Popen[bytes]]:
        argv = [sys.executable, "-m", "peers.procrastinate", self._server.url]
        return [start(argv, self._log) for _ in range(count)]

    def server_pids(self) -> list[int]:
        return [self._server.pid]

    def close(self) -> None:
        try:
            self._do(self._app.close_async())
        finally:
            self._loop.close()
            self._server.close()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run_until_complete(work)


async def work(url: str) -> None:
    """One worker process: `python -m peers.procrastinate URL`."""
    app = make_app(url, CONCURRENCY)
    async with app.open_async():
        await app.run_worker_async(concurrency=CONCURRENCY)


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1]))
