"""One engine with a real model, for all tests of real clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from tests.support.openai.door import Door, door

from penstock.app.llm import make_executor
from penstock.ports.engine_api import KeyRole
from penstock.ports.store import JobQuery
from penstock.workloads.llm.config import ModelConfig


class Running:
    """An engine in a thread of its own: the model is loaded once for all tests."""

    def __init__(self, folder: Path, model_file: Path) -> None:
        self._folder, self._file = folder, model_file
        self._ready, self._over = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self.door: Door | None = None

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        config = ModelConfig(models=(str(self._file),), slots=4, context=1024, threads=2)
        executor = make_executor(None, {"models": config})
        async with door(self._folder, executors=[executor]) as self.door:
            self._ready.set()
            await self._over.wait()

    def __enter__(self) -> Running:
        self._thread.start()
        assert self._ready.wait(50)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(50)

    @property
    def url(self) -> str:
        assert self.door is not None
        return self.door.url

    @property
    def token(self) -> str:
        assert self.door is not None
        return self.door.token

    def tenant(self, name: str) -> OpenAI:
        """The client of somebody who may submit for this tenant only."""
        assert self.door is not None
        made = self.door.key(name, KeyRole.SUBMIT, tenant=name)
        token = asyncio.run_coroutine_threadsafe(made, self._loop).result(20)
        return OpenAI(base_url=f"{self.door.url}/v1", api_key=token, max_retries=0)

    def jobs(self) -> list[Any]:
        assert self.door is not None
        asked = self.door.engine.api.find(JobQuery(limit=1000))
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result(20)

    def ended(self, job_id: str) -> Any:
        assert self.door is not None
        asked = self.door.engine.api.wait(job_id, 20)
        return asyncio.run_coroutine_threadsafe(asked, self._loop).result(30)


@pytest.fixture(scope="package")
def running(tmp_path_factory: pytest.TempPathFactory, model_file: Path) -> Iterator[Running]:
    with Running(tmp_path_factory.mktemp("real"), model_file) as one:
        yield one


@pytest.fixture
def client(running: Running) -> Iterator[OpenAI]:
    assert running.door is not None
    with running.door.sync_client() as one:
        yield one


@pytest.fixture
def model(client: OpenAI) -> str:
    (found,) = client.models.list()
    return found.id
