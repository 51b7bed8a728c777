"""Every operation of the OpenAPI document, driven with what it allows and what it does not.

No input may make the server fail, and every answer must be one that the document tells of.
"""

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
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from tests.support.api.house import House, house

from penstock.api.openapi import document
from penstock.api.operation import Pace
from penstock.api.operations import OPERATIONS

# The engine is in this process, too, and draws lots of its own when a run has failed.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")
schema = schemathesis.openapi.from_dict(document(OPERATIONS))
ENDLESS = {operation.id for operation in OPERATIONS if operation.pace is Pace.STREAMS}
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: Any) -> Any:
    """Half of the time something that there is."""
    for name, known in _known(context).items():
        given = (path_parameters or {}).get(name)
        if isinstance(given, str) and len(given) % 2:
            path_parameters[name] = known
    return path_parameters


def _known(context: Any) -> dict[str, str]:
    path = context.operation.path
    if path.startswith("/v1/runs/"):
        return {"job_id": RUNS[0], "stage": "double"} if RUNS else {}
    return {"job_id": "a-job"} | ({"name": "many"} if path.startswith("/v1/pipelines/") else {})


RUNS: list[str] = []
"""A run that there is, once the server is up."""


@schemathesis.serializer("application/x-ndjson")
def _lines(context: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "replace")


class Behind:
    """A server in a thread of its own, as the client here is a blocking one."""

    def __init__(self, folder: Any) -> None:
        self._folder = folder
        self._ready, self._over = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.house: House | None = None

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with house(self._folder, head_timeout=60.0) as self.house:
            job = await self.house.submit(job_id="a-job")
            assert job["job_id"] == "a-job"
            run = await self.house.call("POST", "/v1/pipelines/many/runs")
            assert run.status == 202
            RUNS[:] = [run.json["job_id"]]
            self._ready.set()
            await self._over.wait()

    def __enter__(self) -> House:
        self._thread.start()
        assert self._ready.wait(20)
        assert self.house is not None
        return self.house

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(20)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with Behind(tmp_path_factory.mktemp("driven")) as one:
        yield one


@pytest.fixture(scope="module")
def session(server: House) -> Iterator[requests.Session]:
    with requests.Session() as one:
        one.headers["Authorization"] = f"Bearer {server.token}"
        yield one


@schema.parametrize()
@seed(20_250_101)
@settings(
    max_examples=10,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_input_makes_the_server_fail(
    case: Any, server: House, session: requests.Session
) -> None:
    identity = case.operation.definition.raw.get("operationId")
    if identity in ENDLESS and case.method == "GET":
        kwargs = case.as_transport_kwargs(base_url=server.url)
        kwargs.pop("cookies", None)
        with session.request(**kwargs, stream=True, timeout=20) as response:
            assert response.status_code < 500, response.text
        return
    case.call_and_validate(base_url=server.url, session=session, checks=CHECKS, timeout=70)
