"""A plug-in for pytest: `-p tests.support.on_servers` runs engines of tests on PostgreSQL and NATS.

Each module has a schema of its own on one server, and so has each test, so that the tests of an
embedded engine run unchanged. Their engines are found through NATS, each under a prefix of its own.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support import postgres
from tests.support.nats import NatsServer

_numbers = itertools.count(1)


class Servers:
    """A PostgreSQL and a NATS server, and what the engines of a test have there."""

    def __init__(self, folder: Path) -> None:
        self.schema = ""
        self.database = postgres.PostgresServer(folder, "fsync=off")
        try:
            self.nats = NatsServer(folder)
        except BaseException:
            self.database.stop()
            raise

    def choose(self, patch: pytest.MonkeyPatch) -> None:
        self.schema = f"run_{next(_numbers)}"
        patch.setenv("PENSTOCK_STORE", f"{self.database.url}?schema={self.schema}")
        patch.setenv("PENSTOCK_BUS__URL", self.nats.url)
        patch.setenv("PENSTOCK_BUS__PREFIX", self.schema)

    def close(self) -> None:
        self.nats.kill()
        self.database.stop()


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    if postgres.programs() is None:
        if os.environ.get("CI"):
            pytest.fail(f"in CI PostgreSQL must be there: {postgres.MISSING}")
        pytest.skip(postgres.MISSING)
    # Not below pytest's folder, which only its own user can enter.
    with tempfile.TemporaryDirectory(prefix="penstock-pg-") as folder:
        started = Servers(Path(folder))
        yield started
        started.close()


@pytest.fixture(autouse=True, scope="module")
def _engines_of_the_module(servers: Servers) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        servers.choose(patch)
        yield


@pytest.fixture(autouse=True)
def _engines_of_the_test(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    servers.choose(monkeypatch)
