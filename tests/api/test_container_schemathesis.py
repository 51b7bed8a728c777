"""Every operation of a container worker's document, driven with what it allows and what not.

No input may make the server fail, and every answer must be one that the document tells of.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any, cast

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
from tests.support.api.container_house import (
    ContainerHouse,
    MemoryFacade,
    container_house,
)

from penstock.api.container.facade import ContainerFacade
from penstock.api.container.server import INFO, operations
from penstock.api.openapi import document

schema = schemathesis.openapi.from_dict(document(operations(cast("ContainerFacade", None)), INFO))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    unsupported_method,
]


class Behind:
    """A server in a thread of its own, as the client here is a blocking one."""

    def __init__(self) -> None:
        self._ready, self._over = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.house: ContainerHouse | None = None

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        api = MemoryFacade(most_queued=10_000)
        api.add("a-job")
        api.start("a-job")
        api.write("a-job", "stdout", "grüße".encode() * 10)
        api.leave("a-job", {"a.txt": b"hello"})
        api.end("a-job")
        async with container_house(api, limits={"head_timeout": 60.0}) as self.house:
            self._ready.set()
            await self._over.wait()

    def __enter__(self) -> ContainerHouse:
        self._thread.start()
        assert self._ready.wait(20)
        assert self.house is not None
        return self.house

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(20)


@pytest.fixture(scope="module")
def server() -> Iterator[ContainerHouse]:
    with Behind() as one:
        yield one


@pytest.fixture(scope="module")
def session(server: ContainerHouse) -> Iterator[requests.Session]:
    with requests.Session() as one:
        yield one


@schema.parametrize()
@seed(20_250_101)
@settings(
    max_examples=15,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_input_makes_the_server_fail(
    case: Any, server: ContainerHouse, session: requests.Session
) -> None:
    path = case.path_parameters or {}
    for name, known in (("job_id", "a-job"), ("path", "a.txt")):
        if isinstance(path.get(name), str) and len(path[name]) % 2:
            path[name] = known  # half of the time something that there is
    if "wait" in (case.query or {}):
        case.query["wait"] = 0.01 if isinstance(case.query["wait"], float) else "x"
    case.call_and_validate(base_url=server.server.url, session=session, checks=CHECKS, timeout=20)
