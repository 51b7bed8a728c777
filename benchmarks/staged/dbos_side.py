"""DBOS on SQLite: as it is installed, or with WAL and a flush at each commit."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from pathlib import Path
from typing import Any

from staged.clocked import STAGES, WARM_ITEMS, many, once, run

if sqlite3.sqlite_version_info < (3, 42):  # its schema wants a newer one than some systems have
    import pysqlite3

    sys.modules["sqlite3"] = pysqlite3


def launch(folder: Path, wal: bool) -> Any:
    import sqlalchemy
    from dbos import DBOS

    if wal:

        @sqlalchemy.event.listens_for(sqlalchemy.engine.Engine, "connect")
        def set_wal(connection: Any, _: Any) -> None:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")

    DBOS(
        config={
            "name": "bench",
            "system_database_url": f"sqlite:///{folder}/dbos.db",
            "log_level": "ERROR",
            "enable_otlp": False,
            "run_admin_server": False,
        }
    )
    return DBOS


def measure(what: str, folder: Path, *, wal: bool, at_once: int, count: int) -> dict[str, float]:
    DBOS = launch(folder, wal)

    @DBOS.step()
    async def nothing(n: int) -> int:
        return n

    @DBOS.workflow()
    async def six() -> None:
        for n in range(STAGES):
            await nothing(n)

    @DBOS.workflow()
    async def items(n: int, at_once: int) -> None:
        for first in range(0, n, at_once):
            await asyncio.gather(*(nothing(first + k) for k in range(min(at_once, n - first))))

    DBOS.launch()
    try:
        if what == "jobs":
            return run(many(six, count, at_once))

        async def both() -> dict[str, float]:
            await items(WARM_ITEMS, at_once)
            return await once(lambda: items(count, at_once), count)

        return run(both())
    finally:
        DBOS.destroy()
