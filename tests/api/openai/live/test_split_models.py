"""Models that are split over nodes, asked through OpenAI's own client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai import APIStatusError, BadRequestError
from tests.api.openai.live.test_batches import a_line, ended, lines_of, started
from tests.support.fake_llm import FakeRunner
from tests.support.fake_pipes import HOPS, FakeHost, WatchedRunner, a_node
from tests.support.openai.door import Door, door

from penstock.core.job import Job
from penstock.core.pointer import decode_data
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import KeyRole
from penstock.ports.store import JobQuery
from penstock.testing.aio import run_async
from penstock.workloads.llm.executor import LlmExecutor
from penstock.workloads.llm.values import LlmCode, LlmResult
from penstock.workloads.pipes.config import LpConfig
from penstock.workloads.pipes.executor import PipesExecutor

HELLO: Any = [{"role": "user", "content": "hello there"}]
NODES = (a_node("a", (0, 2), model="split", end_model=True), a_node("b", (2, 4), model="split"))


@asynccontextmanager
async def split(
    folder: Path, runner: FakeRunner | None = None, model: str = "split", **options: Any
) -> AsyncIterator[Door]:
    """An engine that serves a whole model, and one that is split."""
    config = LpConfig(model=model, source=Path("m.gguf"), node_id="a", end_model=True)
    runner = runner or WatchedRunner((model,))
    pipes = PipesExecutor(config, lambda config: FakeHost(config, runner, NODES))
    whole = LlmExecutor(FakeRunner(), ["fake"])
    async with door(folder, executors=[whole, pipes], **options) as one:
        yield one


async def the_job(one: Door) -> Job:
    (job,) = await one.engine.api.find(JobQuery())
    return job


@pytest.mark.seed("000", "18.10")
@run_async
async def test_it_answers_like_a_whole_one_and_its_job_shows_the_way(tmp_path: Path) -> None:
    async with split(tmp_path) as one, one.client() as client:
        said = await client.chat.completions.create(model="split", messages=HELLO)
        assert said.choices[0].message.content == "HELLO THERE"
        assert said.system_fingerprint == "fake pipes 1"
        assert said.usage is not None
        assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (2, 2)
        job = await the_job(one)
        assert job.request.topic == "job.chat.split"
        assert job.result is not None
        result = msgspec.json.decode(decode_data(job.result.result_ptr or ""), type=LlmResult)
        assert result.hops == HOPS
        lines = await one.engine.api.read_log(job.job_id)
        assert [line.text for line in lines] == ["node c was lost; going on over node b"]


@pytest.mark.seed("000", "5.8", "18.10")
@run_async
async def test_it_is_streamed(tmp_path: Path) -> None:
    async with split(tmp_path) as one, one.client() as client:
        stream = await client.chat.completions.create(model="split", messages=HELLO, stream=True)
        text = [chunk.choices[0].delta.content async for chunk in stream if chunk.choices]
        assert "".join(filter(None, text)) == "HELLO THERE"


@run_async
async def test_all_models_are_listed_and_a_whole_one_comes_before_a_split_one(
    tmp_path: Path,
) -> None:
    async with split(tmp_path) as one, one.client() as client:
        assert [model.id async for model in client.models.list()] == ["fake", "split"]
    async with split(tmp_path, model="fake") as one, one.client() as client:
        assert [model.id async for model in client.models.list()] == ["fake"]
        said = await client.chat.completions.create(model="fake", messages=HELLO)
        assert said.system_fingerprint == "fake 1"
        assert (await the_job(one)).request.topic == "job.llm.fake"


@run_async
async def test_embeddings_are_refused(tmp_path: Path) -> None:
    async with split(tmp_path) as one, one.client() as client:
        with pytest.raises(BadRequestError, match="no embeddings") as caught:
            await client.embeddings.create(model="split", input="a")
        assert caught.value.code == "unsupported_value"


@pytest.mark.seed("000", "18.10")
@run_async
async def test_nodes_that_are_not_there_are_told_as_503_and_asked_again(tmp_path: Path) -> None:
    runner = FakeRunner(["split"], fail_with={"hello": LlmCode.PIPE_UNAVAILABLE})
    async with split(tmp_path, runner) as one, one.client(max_retries=1) as client:
        with pytest.raises(APIStatusError) as caught:
            await client.chat.completions.create(model="split", messages=HELLO)
        assert (caught.value.status_code, caught.value.code) == (503, "pipe_unavailable")
        jobs = await one.engine.api.find(JobQuery())
        assert [job.state for job in jobs] == [JobState.FAILED] * 2


@run_async
async def test_lines_of_a_batch_go_to_the_model_that_they_name(tmp_path: Path) -> None:
    async with split(tmp_path) as one, one.client() as client:
        lines = [a_line(1, model="split"), a_line(2)]
        batch = await ended(client, await started(client, *lines))
        assert batch.status == "completed"
        answers = await lines_of(client, batch.output_file_id)
        told = {answer["custom_id"]: answer["response"]["body"] for answer in answers}
        assert told["line-1"]["system_fingerprint"] == "fake pipes 1"
        assert told["line-2"]["system_fingerprint"] == "fake 1"
        jobs = await one.engine.api.find(JobQuery(child_of=batch.id))
        assert {job.request.topic for job in jobs} == {"job.chat.split", "job.llm.fake"}


@run_async
async def test_a_batch_line_for_a_model_that_nobody_serves_fails_by_name(tmp_path: Path) -> None:
    flags = {"timeouts__lease": 1}
    async with (
        split(tmp_path, flags={**flags, "timeouts__lost_grace": 1}) as one,
        one.client() as client,
    ):
        batch = await ended(client, await started(client, a_line(1, model="other")))
        assert batch.status == "completed"
        (failed,) = await lines_of(client, batch.error_file_id)
        assert failed["response"]["status_code"] == 404
        assert "other" in failed["response"]["body"]["error"]["message"]


async def shown(one: Door) -> Any:
    async with asyncio.timeout(10):
        while True:
            view = (await one.call("GET", "/v1/pipes")).json
            if view["nodes"]:
                return view
            await asyncio.sleep(0.02)


@pytest.mark.seed("000", "17.16")
@run_async
async def test_pipes_are_shown_over_http_to_who_may_operate(tmp_path: Path) -> None:
    async with split(tmp_path) as one:
        view = await shown(one)
        (pipe,) = view["pipes"]
        assert (pipe["model"], pipe["complete"], pipe["origins"]) == ("split", True, ["a"])
        assert [hop["layers"] for hop in pipe["hops"]] == ["0-1", "2-3"]
        assert [(node["node_id"], node["worker_id"]) for node in view["nodes"]] == [
            ("a", one.engine.worker_id),
            ("b", ""),
        ]
        (worker,) = (await one.call("GET", "/v1/workers")).json["workers"]
        assert worker["labels"]["pipe"] == "a.example:7000"
        assert worker["facts"]["pipes"]["pipes"] == view["pipes"]
        made = await one.engine.api.keys.create("ci", (KeyRole.SUBMIT,))
        assert (await one.call("GET", "/v1/pipes", token=made.token)).status == 403
