"""An engine that is stopped while a model answers: the next one answers."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec.structs import replace
from tests.support.fake_llm import FakeRunner
from tests.support.waiting import soon

from penstock.app.engine import Engine
from penstock.config import load
from penstock.core.job import JobRequest
from penstock.core.pointer import decode_data, encode_data
from penstock.lifecycles.canonical import JobState
from penstock.testing.aio import run_async
from penstock.workloads.llm.executor import LlmExecutor
from penstock.workloads.llm.values import LlmResult

ASK = {"kind": "chat", "messages": [{"role": "user", "content": "one two"}], "stream": True}


def engine(folder: Path, runner: FakeRunner) -> Engine:
    settings = load(flags={"data_dir": str(folder)})
    return Engine(settings, [LlmExecutor(runner, ["fake"])], listen=False)


@run_async
async def test_an_answer_that_outlasts_the_drain_is_made_by_the_next_engine(
    tmp_path: Path,
) -> None:
    runner = FakeRunner(delay=3600)
    async with engine(tmp_path, runner) as first:
        assert first._local is not None
        first._local.options = replace(first._local.options, drain_timeout=0.01)
        pointer = encode_data(msgspec.json.encode(ASK))
        request = JobRequest(job_id="", topic="job.llm.fake", context_ptr=pointer)
        (job,) = await first.api.submit((request,))
        await soon(lambda: runner.running == 1)
    assert runner.running == 0
    assert runner.closed

    async with engine(tmp_path, FakeRunner()) as second:
        ended = await second.api.wait(job.job_id, 30)
    assert (ended.state, ended.attempt) == (JobState.SUCCEEDED, 2)
    assert ended.result is not None
    said = msgspec.json.decode(decode_data(ended.result.result_ptr or ""), type=LlmResult)
    assert said.choices[0].text == "ONE TWO"
