from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.support.nats import NatsServer


@pytest.fixture(scope="module")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One server for all tests of a file."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    yield server
    server.kill()
