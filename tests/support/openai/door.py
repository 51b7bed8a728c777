"""An engine with the OpenAI door, a model that computes nothing, and OpenAI's own clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from openai import AsyncOpenAI, OpenAI
from tests.support.api.house import House
from tests.support.fake_llm import FakeRunner

from penstock.api.options import HttpOptions
from penstock.api.server import HttpServer
from penstock.app.engine import Engine
from penstock.config import Settings, load
from penstock.control.engine_api import EngineAuthenticator
from penstock.ports.clock import SystemClock
from penstock.ports.executor import Executor
from penstock.workloads.llm.executor import LlmExecutor
from penstock.workloads.llm.runner import ProgressListener, Runner
from penstock.workloads.llm.values import (
    Choice,
    Completion,
    Delta,
    GenerationRequest,
    LlmFailure,
    Usage,
)

Script = Callable[
    [GenerationRequest, int], Sequence[Delta | Completion | LlmFailure | asyncio.Event]
]


class Door(House):
    """A House whose models are asked through OpenAI's clients."""

    def client(self, token: str | None = None, **options: Any) -> AsyncOpenAI:
        token = self.token if token is None else token
        return AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key=token, **{"max_retries": 0, **options}
        )

    def sync_client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=self.token, max_retries=0)


class Scripted(FakeRunner):
    """Says what a script has for a request; waits where it has an Event."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script
        self.asks: list[GenerationRequest] = []

    async def generate(
        self,
        model: str,
        ask: GenerationRequest,
        choice: int = 0,
        watch: ProgressListener | None = None,
    ) -> AsyncGenerator[Delta | Completion, None]:
        self.asks.append(ask)
        self.running += 1
        try:
            for one in self._script(ask, choice):
                if isinstance(one, LlmFailure):
                    raise one
                if isinstance(one, asyncio.Event):
                    await one.wait()
                elif isinstance(one, Completion):
                    yield replace(one, choice=replace(one.choice, index=choice))
                else:
                    yield replace(one, choice=choice)
        finally:
            self.running -= 1


USED = Usage(3, 2, 1)


def said(text: str = "", usage: Usage = USED, **facts: Any) -> Completion:
    return Completion(choice=Choice(text=text, **facts), usage=usage)


def saying(*script: Delta | Completion | LlmFailure | asyncio.Event) -> Scripted:
    return Scripted(lambda ask, choice: script)


@asynccontextmanager
async def door(
    folder: Path,
    runner: Runner | None = None,
    *,
    models: Sequence[str] = ("fake",),
    executors: Sequence[Executor] | None = None,
    rules: str = "",
    flags: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Door]:
    settings = _settings(folder, rules, flags or {})
    served = executors or [LlmExecutor(runner or FakeRunner(), models)]
    async with Engine(settings, list(served), listen=False) as engine:
        http = HttpOptions(**{"port": 0, "grace": 0.5, **options})
        server = HttpServer(
            EngineAuthenticator(engine.parts.keys, engine.api), http, clock=SystemClock()
        )
        async with Door(engine, server, settings.token_file.read_text()) as one:
            yield one


def _settings(folder: Path, rules: str, flags: dict[str, Any]) -> Settings:
    given = {"data_dir": str(folder / "data"), "durability": "memory", **flags}
    if rules:
        (folder / "rules.toml").write_text(rules)
        given["rules"] = str(folder / "rules.toml")
    return load(flags=given)
