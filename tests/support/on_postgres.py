"""A plug-in for pytest: `-p tests.support.on_postgres` runs every engine of a test on PostgreSQL.

Each test has a schema of its own on one server, so the tests of one engine run unchanged.
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.postgres import PostgresServer

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def postgres_of_all() -> Iterator[PostgresServer]:
    with tempfile.TemporaryDirectory(prefix="penstock-pg-") as folder:
        server = PostgresServer(Path(folder), "fsync=off")
        yield server
        server.stop()


@pytest.fixture(autouse=True)
def _engines_on_postgres(postgres_of_all: PostgresServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_STORE", f"{postgres_of_all.url}?schema=run_{next(_numbers)}")
