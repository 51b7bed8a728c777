"""The engine's process dies, hangs, or outlives its parent: never more than its own answers."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.processes import children_of, command_of

from penstock.adapters.llama.runner import LlamaRunner
from penstock.testing.aio import run_async
from penstock.workloads.llm.config import ModelConfig
from penstock.workloads.llm.runner import answer
from penstock.workloads.llm.values import (
    Completion,
    CompletionRequest,
    Delta,
    EmbeddingRequest,
    LlmCode,
    LlmFailure,
    Sampling,
)

LONG = CompletionRequest(
    prompts=("Once upon a time",), max_tokens=100, sampling=Sampling(temperature=0)
)
SHORT = CompletionRequest(prompts=("The sea is",), max_tokens=3, sampling=Sampling(temperature=0))


@asynccontextmanager
async def running(model_file: Path, **more: Any) -> AsyncIterator[LlamaRunner]:
    config = {"models": (str(model_file),), "slots": 2, "context": 256, **more}
    runner = LlamaRunner(ModelConfig(**config))
    try:
        yield runner
    finally:
        await runner.close()


def children(of: int | None = None) -> list[int]:
    """The engines below a process, by their ids."""
    below = children_of(of or os.getpid())
    return [pid for pid in below if b"llama/child.py" in command_of(pid)]


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where engines have their sockets; short, as those must be."""
    with tempfile.TemporaryDirectory(prefix="pe-") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def listed(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def is_known(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


async def begun(runner: LlamaRunner, started: asyncio.Event) -> None:
    async with aclosing(runner.generate("", LONG)) as pieces:
        async for piece in pieces:
            started.set()
            assert isinstance(piece, Delta), "it was to be ended before"


@pytest.mark.seed("004", "13.6", "14.9")
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV], ids=["killed", "segfault"])
@run_async
async def test_answers_under_way_fail_and_the_next_finds_a_new_engine(
    model_file: Path, how: signal.Signals
) -> None:
    before = set(children())
    async with running(model_file) as runner:
        good = await answer(runner, "", SHORT)
        events = asyncio.Event(), asyncio.Event()
        tasks = [asyncio.ensure_future(begun(runner, event)) for event in events]
        for event in events:
            await event.wait()
        [pid] = set(children()) - before
        os.kill(pid, how)
        ended = await asyncio.gather(*tasks, return_exceptions=True)

        for one in ended:
            assert isinstance(one, LlmFailure)
            assert one.code is LlmCode.ENGINE_CRASHED
            assert how.name in one.message
        assert (await answer(runner, "", SHORT)).choices == good.choices
    assert set(children()) <= before


@run_async
async def test_answers_that_wait_for_a_slot_are_not_lost_with_the_engine(model_file: Path) -> None:
    before = set(children())
    async with running(model_file, slots=1) as runner:
        started = asyncio.Event()
        first = asyncio.ensure_future(begun(runner, started))
        await started.wait()
        inside = asyncio.ensure_future(answer(runner, "", SHORT))
        waiting = [asyncio.ensure_future(answer(runner, "", SHORT)) for _ in range(3)]
        await asyncio.sleep(0.05)
        [pid] = set(children()) - before
        os.kill(pid, signal.SIGKILL)

        with pytest.raises(LlmFailure):
            await first
        with pytest.raises(LlmFailure):
            await inside
        assert {(await one).choices[0].finish_reason for one in waiting} == {"length"}


@run_async
async def test_an_engine_that_hangs_is_ended(model_file: Path) -> None:
    before = set(children())
    async with running(model_file, stall=4.0) as runner:
        await runner.load()
        started = asyncio.Event()
        task = asyncio.ensure_future(begun(runner, started))
        await started.wait()
        [pid] = set(children()) - before
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(LlmFailure) as stalled:
            await task

        assert stalled.value.code is LlmCode.ENGINE_CRASHED
        assert "no sign of life for 4 seconds" in stalled.value.message
        assert is_gone(pid)


@run_async
async def test_closing_an_answer_frees_its_slot_at_once(model_file: Path) -> None:
    async with running(model_file, slots=1) as runner:
        await answer(runner, "", SHORT)
        async with aclosing(runner.generate("", LONG)) as pieces:
            async for _ in pieces:
                break
        began = time.monotonic()
        assert isinstance(await anext(runner.generate("", SHORT)), Delta)
        waited = time.monotonic() - began
        whole = (await answer(runner, "", LONG)).timings.predicted_ms / 1000

    assert waited < whole / 3, f"waited {waited:.2f} s of {whole:.2f} s"


@run_async
async def test_nothing_is_left_after_the_end(model_file: Path, temporary: Path) -> None:
    processes = set(children())
    async with running(model_file) as runner:
        started = asyncio.Event()
        under_way = asyncio.ensure_future(begun(runner, started))
        await started.wait()
        [pid] = set(children()) - processes
        [folder] = listed(temporary)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert [one.name for one in listed(folder)] == ["llama.sock"]
    with pytest.raises(LlmFailure):
        await under_way

    assert set(children()) <= processes
    assert not folder.exists()
    assert not is_known(pid), "a zombie was left"


PARENT = """
import asyncio, sys
from penstock.workloads.llm.values import CompletionRequest
from penstock.workloads.llm.config import ModelConfig
from penstock.adapters.llama.runner import LlamaRunner

async def main():
    runner = LlamaRunner(ModelConfig(models=(sys.argv[1],), slots=1, context=256))
    async for _ in runner.generate("", CompletionRequest(prompts=("Once",), max_tokens=250)):
        print("answering", flush=True)

asyncio.run(main())
"""


def test_the_engine_is_gone_within_a_second_of_its_parents_death(
    model_file: Path, temporary: Path
) -> None:
    environment = {**os.environ, "TMPDIR": str(temporary)}
    command = [sys.executable, "-c", PARENT, str(model_file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        [engine] = children(parent.pid)
        assert list(temporary.glob("*/llama.sock"))
        parent.kill()
        died = time.monotonic()
        while not is_gone(engine):
            assert time.monotonic() < died + 1, "it outlived its parent"
            time.sleep(0.01)
        parent.stdout.read()
    assert not listed(temporary), "its socket was left"


def test_the_folder_goes_even_if_another_thread_took_the_socket_first(temporary: Path) -> None:
    socket = temporary / "engine" / "llama.sock"
    socket.parent.mkdir()
    command = "from pathlib import Path; from penstock.adapters.llama import child;"
    command += f"child._leave(Path({str(socket)!r}))"
    ended = subprocess.run([sys.executable, "-c", command], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not listed(temporary)


@run_async
async def test_said_comes_once_and_last(model_file: Path) -> None:
    async with running(model_file) as runner:
        said = [piece async for piece in runner.generate("", SHORT)]

    assert [isinstance(piece, Completion) for piece in said] == [False] * (len(said) - 1) + [True]


@run_async
async def test_an_engine_that_always_has_embeddings_to_make_is_not_taken_for_stalled(
    model_file: Path,
) -> None:
    text = EmbeddingRequest(inputs=("a word or two",))
    async with running(model_file, stall=1.0) as runner:
        await runner.embed("", text)
        until = time.monotonic() + 2.5

        async def embed() -> None:
            while time.monotonic() < until:
                await runner.embed("", text)

        await asyncio.gather(*(embed() for _ in range(3)))


@run_async
async def test_a_grammar_that_would_overflow_its_stack_does_not_reach_the_engine(
    model_file: Path,
) -> None:
    async with running(model_file) as runner:
        await runner.load()
        before = children()
        grammar = "root ::= " + "(" * 30_000 + '"a"' + ")" * 30_000
        with pytest.raises(LlmFailure) as refused:
            await answer(runner, "", CompletionRequest(prompts=("a",), grammar=grammar))
        assert refused.value.code is LlmCode.INVALID_SCHEMA
        assert children() == before


@run_async
async def test_one_that_hangs_right_after_loading_is_ended(
    model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = set(children())

    async def hang(call: Any, slots: int) -> None:
        (pid,) = set(children()) - others
        os.kill(pid, signal.SIGSTOP)
        while True:  # all of its threads are not stopped at once
            await call("/props", None)

    monkeypatch.setattr("penstock.adapters.llama.engine.prime", hang)
    async with running(model_file, stall=1.0) as runner:
        with pytest.raises(LlmFailure, match="no sign of life"):
            await runner.load()
