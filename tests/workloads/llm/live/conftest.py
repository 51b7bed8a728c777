"""A runner that is kept over many tests: loading a model takes longer than most of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from penstock.adapters.llama.runner import LlamaRunner
from penstock.workloads.llm.config import ModelConfig
from penstock.workloads.llm.runner import answer
from penstock.workloads.llm.values import Delta, GenerationRequest, LlmResult

T = TypeVar("T")


class Kept:
    """A runner in an event loop of its own."""

    def __init__(self, config: ModelConfig) -> None:
        self.runner = LlamaRunner(config)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def answer(self, ask: GenerationRequest, told: list[Delta] | None = None) -> LlmResult:
        return self.run(answer(self.runner, "", ask, None if told is None else told.append))

    def close(self) -> None:
        self.run(self.runner.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="session")
def kept(model_file: Path) -> Iterator[Kept]:
    """The small model, with eight slots."""
    kept = Kept(ModelConfig(models=(str(model_file),), slots=8, context=256))
    yield kept
    kept.close()
