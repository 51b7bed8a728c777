"""Several real models in one memory."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from tests.support.processes import children_of

from penstock.adapters.llama.process import resident
from penstock.adapters.llama.runner import LlamaRunner
from penstock.testing.aio import run_async
from penstock.workloads.llm.config import ModelConfig
from penstock.workloads.llm.runner import answer
from penstock.workloads.llm.values import CompletionRequest, EmbeddingRequest, LlmFailure, Sampling

SHORT = CompletionRequest(prompts=("The sea is",), max_tokens=3, sampling=Sampling(temperature=0))
LONG = CompletionRequest(
    prompts=("Once upon a time",), max_tokens=60, sampling=Sampling(temperature=0)
)


@pytest.fixture
def shelf(tmp_path: Path, model_file: Path) -> Path:
    """Two models of different names."""
    for name in ("one", "two"):
        (tmp_path / f"{name}.gguf").symlink_to(model_file)
    return tmp_path


def runner_of(shelf: Path, **more: Any) -> LlamaRunner:
    return LlamaRunner(ModelConfig(models_dir=shelf, slots=1, context=256, **more))


async def loaded(runner: LlamaRunner) -> list[str]:
    return [one.name for one in await runner.models() if one.loaded]


@run_async
async def test_two_models_are_loaded_when_they_are_asked_for(shelf: Path) -> None:
    runner = runner_of(shelf)
    assert [one.name for one in await runner.models()] == ["one", "two"]
    assert await loaded(runner) == []
    first, second = await asyncio.gather(answer(runner, "one", SHORT), answer(runner, "two", SHORT))
    assert await loaded(runner) == ["one", "two"]
    await runner.unload("one")
    assert await loaded(runner) == ["two"]
    await runner.close()

    assert first.choices == second.choices


@run_async
async def test_a_name_that_several_have_a_part_of_is_none_of_them(
    shelf: Path, model_file: Path
) -> None:
    (shelf / "two-and-a-half.gguf").symlink_to(model_file)
    runner = runner_of(shelf)
    with pytest.raises(LlmFailure, match="'tw' may be two or two-and-a-half"):
        await runner.load("tw")
    (shelf / "three.gguf").symlink_to(model_file)
    names = [one.name for one in await runner.models()]
    await runner.close()

    assert names == ["one", "three", "two", "two-and-a-half"], "a new file is seen"


@run_async
async def test_an_idle_model_makes_room_and_a_used_one_is_waited_for(shelf: Path) -> None:
    estimate = (await runner_of(shelf).models())[0].memory
    runner = runner_of(shelf, memory=estimate * 3 // 2)
    await answer(runner, "one", SHORT)
    assert await loaded(runner) == ["one"]

    await answer(runner, "two", SHORT)
    assert await loaded(runner) == ["two"]

    order: list[str] = []
    async with aclosing(runner.generate("two", LONG)) as pieces:
        await anext(pieces)
        stages: list[str] = []
        waiting = asyncio.ensure_future(runner.load("one", lambda _, what: stages.append(what)))
        waiting.add_done_callback(lambda _: order.append("one is loaded"))
        async for _ in pieces:
            pass
        order.append("two has answered")
    await waiting
    assert order == ["two has answered", "one is loaded"]
    assert "waiting for memory" in stages
    assert await loaded(runner) == ["one"]
    await runner.close()


@run_async
async def test_unloading_gives_the_memory_back_once_its_answers_have_ended(shelf: Path) -> None:
    runner = LlamaRunner(ModelConfig(models_dir=shelf, slots=1, context=100))
    told: list[tuple[float, str]] = []
    facts = await runner.load("one", lambda done, what: told.append((done, what)))
    before = _engines()
    async with aclosing(runner.generate("one", LONG)) as pieces:
        await anext(pieces)
        unloading = asyncio.ensure_future(runner.unload("one"))
        said = [piece async for piece in pieces]
    await unloading
    after = _engines()
    await runner.close()

    assert len(said) > 20, "it was let to end"
    assert facts.context == 256, "what it really has"
    assert sum(before.values()) - sum(after.values()) > 100 << 20 < facts.memory
    assert told[0][0] == 0.0
    assert told[-1] == (1.0, "loaded")
    assert [done for done, _ in told] == sorted(done for done, _ in told)


@run_async
async def test_a_model_that_nobody_uses_is_unloaded_after_a_while(shelf: Path) -> None:
    runner = runner_of(shelf, idle=0.1)
    await answer(runner, "one", SHORT)
    async with asyncio.timeout(10):
        while await loaded(runner):  # noqa: ASYNC110 - it goes without telling anybody
            await asyncio.sleep(0.02)
    assert (await answer(runner, "one", SHORT)).choices[0].text
    await runner.close()


@run_async
async def test_vectors_and_answers_of_one_model_come_side_by_side(shelf: Path) -> None:
    runner = runner_of(shelf)
    result, vectors = await asyncio.gather(
        answer(runner, "one", SHORT), runner.embed("one", EmbeddingRequest(inputs=("a", "b", "c")))
    )
    assert len(_engines()) >= 2
    await runner.unload("one")
    await runner.close()

    assert result.choices[0].text
    assert len(vectors.vectors) == 3


def _engines() -> dict[int, int]:
    """The engines below this process, and the memory of each."""
    return {pid: resident(pid) for pid in children_of(os.getpid()) if _is_engine(pid)}


def _is_engine(pid: int) -> bool:
    try:
        return b"llama/child.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
