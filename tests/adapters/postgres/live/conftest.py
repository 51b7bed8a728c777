"""One PostgreSQL server for the tests of a process; each test has a schema of its own."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import postgres

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def server() -> Iterator[postgres.PostgresServer]:
    if postgres.programs() is None:
        if os.environ.get("CI"):
            pytest.fail(f"in CI PostgreSQL must be there: {postgres.MISSING}")
        pytest.skip(postgres.MISSING)
    # Not below pytest's folder, which only its own user can enter.
    with tempfile.TemporaryDirectory(prefix="penstock-pg-") as folder:
        server = postgres.PostgresServer(Path(folder), "fsync=off")
        yield server
        server.stop()


@pytest.fixture
def url(server: postgres.PostgresServer) -> str:
    """A database without anything in it."""
    return f"{server.url}?schema=test_{next(_numbers)}"
