"""The door's operations, driven by their document, with a model that answers what it is asked."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, seed, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.support.openai.door import Door, door

from penstock.api.openai import OPERATIONS
from penstock.api.openai.endpoints import BATCHED
from penstock.api.openapi import document

pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
PATHS = {*BATCHED, "/v1/models", "/v1/models/{model}"}
schema = schemathesis.openapi.from_dict(document([one for one in OPERATIONS if one.path in PATHS]))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Door]:
    folder = tmp_path_factory.mktemp("driven")
    ready, over = threading.Event(), asyncio.Event()
    found: list[Any] = []

    async def run() -> None:
        async with door(folder, head_timeout=60.0) as one:
            found.extend([one, asyncio.get_running_loop()])
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert ready.wait(20)
    yield found[0]
    found[1].call_soon_threadsafe(over.set)
    thread.join(20)


@schema.parametrize()
@seed(20_250_101)
@settings(
    max_examples=8,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_request_makes_the_door_fail_or_hang(case: Any, server: Door) -> None:
    if isinstance(case.body, dict) and isinstance(case.body.get("model"), str):
        case.body["model"] = "fake"
        case.body.pop("timeout", None)
    with requests.Session() as session:
        session.headers["Authorization"] = f"Bearer {server.token}"
        case.call_and_validate(base_url=server.url, session=session, checks=CHECKS, timeout=20)
