"""`penstock db`, and `penstock up --store`, as an operator uses them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.support.postgres import PostgresServer

from penstock.adapters.postgres.store import PostgresBackend
from penstock.cli.exits import Exit
from penstock.control.ledger import Ledger
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports import rows
from penstock.testing.aio import run_async
from penstock.testing.samples import accept, move


def penstock(data: Path, *args: str, code: int = 0, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", *args, "--data", str(data)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_database_is_made_looked_at_and_filled_from_the_command_line(
    tmp_path: Path, url: str, server: PostgresServer
) -> None:
    data = tmp_path / "data"
    assert "nothing yet" in penstock(data, "db", "status", url)
    assert "applied" in penstock(data, "db", "migrate", url)
    assert penstock(data, "db", "migrate", url) == "up to date\n"
    said = penstock(data, "db", "status", url)
    assert "up to date" in said
    assert "no synchronous replica" in said
    assert json.loads(penstock(data, "db", "status", url, "--json"))["open_jobs"] == 0
    assert "no jobs in" in penstock(data, "db", "copy", url, code=3)
    assert "no database" in penstock(data, "db", "status", code=2)
    nowhere = server.url.replace(str(server.port), "9")
    assert "can't reach postgresql://127.0.0.1:9" in penstock(data, "db", "status", nowhere, code=8)
    wrong = penstock(data, "up", "--store", "mysql://x", code=2)
    assert "not the URL of a PostgreSQL database" in wrong


def test_a_changed_record_is_found_by_verify(
    tmp_path: Path, url: str, server: PostgresServer
) -> None:
    data = tmp_path / "data"
    data.mkdir()

    @run_async
    async def fill() -> None:
        store = Ledger(PostgresBackend(url, lease=0))
        await store.apply([accept("a"), move("a", JobEvent.CANCEL), accept("b")])
        await store.close()

    fill()
    assert "every record matches its log" in penstock(data, "db", "verify", PENSTOCK_STORE=url)
    schema = url.rpartition("=")[2]
    server.sql(f"UPDATE {schema}.done SET state = {rows.STATE_CODES[JobState.FAILED]}")
    said = penstock(data, "db", "verify", code=Exit.MISMATCH, PENSTOCK_STORE=url)
    assert "a: state is" in said
