"""Jobs that are submitted with SQL, in a transaction of the user's own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest
from tests.support.postgres import PostgresServer

from penstock import App, Client, NotFound
from penstock.testing.aio import run_async

app = App()


@app.job("job.sql.double")
def double(n: int) -> int:
    return 2 * n


@pytest.fixture
def ps(url: str, tmp_path: Path) -> Iterator[Client]:
    with app.run(tmp_path / "data", store=url) as client:
        yield client


@pytest.fixture
def schema(url: str) -> str:
    return url.partition("schema=")[2]


def eventually_result(ps: Client, job_id: str) -> object:
    end = time.monotonic() + 30
    while True:
        try:
            return ps.get(job_id).result(timeout=30)
        except NotFound:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def test_a_job_that_sql_submits_is_run(ps: Client, server: PostgresServer, schema: str) -> None:
    made = server.sql(
        f"SELECT {schema}.submit('job.sql.double', '{{\"n\": 21}}',"
        ' options => \'{"labels": {"a": "b"}}\')'
    ).strip()
    assert eventually_result(ps, made) == 42
    job = ps.get(made).record
    assert (job.request.labels, job.request.principal) == ({"a": "b"}, "sql:test")
    assert server.sql(f"SELECT count(*) FROM {schema}.inbox").strip() == "0"


@run_async
async def _commit_or_roll_back(url: str, schema: str) -> None:
    db = await asyncpg.connect(url.partition("?")[0])
    await db.execute(f"CREATE TABLE {schema}.orders (name text)")
    for name in ("kept", "undone"):
        transaction = db.transaction()
        await transaction.start()
        await db.execute(f"INSERT INTO {schema}.orders VALUES ($1)", name)
        await db.execute(f"SELECT {schema}.submit('job.sql.double', '{{\"n\": 1}}', $1)", name)
        await (transaction.commit() if name == "kept" else transaction.rollback())
    await db.close()


def test_job_and_data_commit_together_or_not_at_all(
    ps: Client, server: PostgresServer, url: str, schema: str
) -> None:
    _commit_or_roll_back(url, schema)
    assert eventually_result(ps, "kept") == 2
    last = server.sql(f"SELECT {schema}.submit('job.sql.double', '{{\"n\": 2}}')").strip()
    assert eventually_result(ps, last) == 4
    with pytest.raises(NotFound):
        ps.get("undone")


def test_a_bad_row_is_kept_with_its_reason_and_holds_up_no_other(
    ps: Client, server: PostgresServer, schema: str
) -> None:
    server.sql(
        f"SELECT {schema}.submit('job.sql.double', NULL, 'bad', options => '{{\"colour\": 1}}'),"
        f" {schema}.submit('no.such.topic', '1', 'unknown'),"
        f" {schema}.submit('job.sql.double', '{{\"n\": 4}}', 'good')"
    )
    assert eventually_result(ps, "good") == 8
    end = time.monotonic() + 30
    while time.monotonic() < end:
        kept = server.sql(f"SELECT job_id, problem FROM {schema}.inbox ORDER BY n").splitlines()
        if len(kept) == 2 and all(line.partition("|")[2] for line in kept):
            break
        time.sleep(0.02)
    assert "unknown field 'colour'" in kept[0]
    assert "no.such.topic" in kept[1]


def test_what_was_submitted_while_no_engine_ran_is_taken_at_the_next_start(
    server: PostgresServer, url: str, schema: str, tmp_path: Path
) -> None:
    with app.run(tmp_path / "data", store=url):
        pass
    server.sql(
        f"SELECT {schema}.submit('job.sql.double', jsonb_build_object('n', n), 'n' || n)"
        " FROM generate_series(1, 1200) AS n"
    )
    with app.run(tmp_path / "data", store=url) as client:
        assert eventually_result(client, "n1200") == 2400
        assert eventually_result(client, "n1") == 2
