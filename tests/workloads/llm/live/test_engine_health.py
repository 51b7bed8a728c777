"""The health of a real engine: loading, ready, ill and gone."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import msgspec
import pytest
from tests.support.waiting import soon

from penstock.adapters.llama.runner import LlamaRunner
from penstock.app.engine import Engine
from penstock.config import load
from penstock.core.job import JobRequest
from penstock.core.pointer import encode_data
from penstock.lifecycles.canonical import JobState
from penstock.testing.aio import run_async
from penstock.workloads.llm.config import ModelConfig
from penstock.workloads.llm.executor import LlmExecutor
from penstock.workloads.llm.health import EngineState
from penstock.workloads.llm.values import CompletionRequest

JOBS = 300


def a_job() -> JobRequest:
    ask = CompletionRequest(prompts=("Once",), max_tokens=1)
    pointer = encode_data(msgspec.json.encode(ask))
    return JobRequest(job_id="", topic="job.llm.m", context_ptr=pointer)


@pytest.mark.usefixtures("llama_cpp")
@run_async
async def test_an_engine_is_gone_then_loading_then_ready_and_gone_again(model_file: Path) -> None:
    runner = LlamaRunner(ModelConfig(models=(str(model_file),), slots=1, context=256))
    name = (await runner.models())[0].name
    states = [runner.health.of(name).state]
    loading = asyncio.ensure_future(runner.load(name))
    await soon(lambda: runner.health.of(name).state is not EngineState.GONE, "it begins")
    states.append(runner.health.of(name).state)
    await loading
    states.append(runner.health.of(name).state)
    await runner.unload(name)
    states.append(runner.health.of(name).state)
    await runner.close()
    assert states == ["gone", "loading", "ready", "gone"]


@pytest.mark.usefixtures("llama_cpp")
@run_async
async def test_three_hundred_jobs_wait_out_an_engine_that_can_not_load_and_then_finish(
    tmp_path: Path, model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.workloads.llm.health._FIRST_DELAY", 0.2)
    monkeypatch.setattr("penstock.workloads.llm.health._LONGEST_DELAY", 0.2)
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF, and nothing else")
    runner = LlamaRunner(ModelConfig(models=(str(file),), slots=4, context=256))
    settings = load(flags={"data_dir": str(tmp_path / "data"), "limits__max_attempts": 1})
    async with Engine(settings, [LlmExecutor(runner, ["m"])], listen=False) as engine:
        jobs = await engine.api.submit([a_job() for _ in range(JOBS)])
        await soon(lambda: runner.health.of("m").is_ill, "it is ill")
        await asyncio.sleep(1.0)
        assert (await engine.api.status()).tally.get(JobState.FAILED, 0) == 0
        assert "MODEL_INVALID" in await engine.api.why(jobs[-1].job_id)
        whole = tmp_path / "whole.gguf"
        shutil.copyfile(model_file, whole)
        whole.replace(file)
        for job in jobs:
            ended = await engine.api.wait(job.job_id, 120)
            assert ended.state is JobState.SUCCEEDED
        assert runner.health.of("m").state is EngineState.READY
