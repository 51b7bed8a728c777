"""Errors in OpenAI's shape, for every way in which a request can be wrong or fail."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.support.fake_llm import FakeRunner
from tests.support.openai.door import Door, door, saying

from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import Context, Outcome, Task
from penstock.ports.store import JobQuery
from penstock.testing.aio import run_async
from penstock.workloads.llm.executor import LlmExecutor
from penstock.workloads.llm.values import EngineUnavailable, LlmCode, LlmFailure

CHAT, TEXT, VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def fault_of(answer: Any) -> dict[str, Any]:
    assert answer.headers["Content-Type"] == "application/json"
    assert list(answer.json) == ["error"]
    fault: dict[str, Any] = answer.json["error"]
    assert set(fault) == {"message", "type", "param", "code"}
    return fault


def _part(part: Mapping[str, Any], role: str = "user") -> list[Any]:
    return [{"role": role, "content": [part]}]


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "no messages": (CHAT, {"messages": []}, "messages"),
    "messages of another type": (CHAT, {"messages": "hi"}, "messages"),
    "a message of another type": (CHAT, {"messages": ["hi"]}, "messages[0]"),
    "an unknown role": (CHAT, {"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    "no role": (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
    "content of another type": (
        CHAT,
        {"messages": [{"role": "user", "content": 7}]},
        "messages[0].content",
    ),
    "sound": (
        CHAT,
        {
            "messages": _part(
                {"type": "input_audio", "input_audio": {"data": "AA", "format": "ogg"}}
            )
        },
        "messages[0].content[0].input_audio.format",
    ),
    "an image of the system": (
        CHAT,
        {
            "messages": _part(
                {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}, "system"
            )
        },
        "messages[0].content[0].image_url",
    ),
    "calls of a user": (
        CHAT,
        {"messages": [{"role": "user", "content": "x", "tool_calls": [TOOL]}]},
        "messages[0].tool_calls",
    ),
    "a model of another type": (CHAT, {"model": 3}, "model"),
    "too hot": (CHAT, {"temperature": 2.5}, "temperature"),
    "heat as text": (CHAT, {"temperature": "hot"}, "temperature"),
    "no answers": (CHAT, {"n": 0}, "n"),
    "too many answers": (CHAT, {"n": 129}, "n"),
    "two lengths": (CHAT, {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
    "too many stops": (CHAT, {"stop": ["x"] * 17}, "stop"),
    "alternatives without logprobs": (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    "too many alternatives": (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    "a large penalty": (CHAT, {"presence_penalty": 3}, "presence_penalty"),
    "an unknown format": (CHAT, {"response_format": {"type": "xml"}}, "response_format.type"),
    "a format without a schema": (
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
        "response_format.json_schema.schema",
    ),
    "format and grammar": (
        CHAT,
        {"response_format": {"type": "json_object"}, "grammar": "root ::= x"},
        "grammar",
    ),
    "a tool that is none": (CHAT, {"tools": [{"type": "magic"}]}, "tools[0].type"),
    "a choice without tools": (CHAT, {"tool_choice": "required"}, "tool_choice"),
    "a choice of no tool": (
        CHAT,
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
    ),
    "an odd timeout": (CHAT, {"timeout": -1}, "timeout"),
    "metadata of another type": (CHAT, {"metadata": {"a": 1}}, "metadata.a"),
    "metadata with a control character": (CHAT, {"metadata": {"a": "\u0000"}}, "metadata.a"),
    "a bias of no token": (CHAT, {"logit_bias": {"x": 1}}, "logit_bias.x"),
    "a large bias": (CHAT, {"logit_bias": {"7": 101}}, "logit_bias.7"),
    "an image that is none": (
        CHAT,
        {"messages": _part({"type": "image_url", "image_url": {"url": "ftp://x/y.png"}})},
        "messages[0].content[0].image_url.url",
    ),
    "too few tokens": (CHAT, {"max_tokens": -2}, "max_tokens"),
    "an engine's option out of range": (CHAT, {"mirostat": 7}, "mirostat"),
    "a choice of texts that is none": (CHAT, {"guided_choice": "yes"}, "guided_choice"),
    "two shapes": (
        CHAT,
        {"guided_json": {}, "grammar": "root ::= x"},
        "guided_json",
    ),
    "a suffix of tokens": (TEXT, {"prompt": [1], "suffix": "y"}, "suffix"),
    "audio": (CHAT, {"audio": {"voice": "alloy"}}, "audio"),
    "modalities": (CHAT, {"modalities": ["text", "audio"]}, "modalities"),
    "functions": (CHAT, {"functions": [{"name": "f"}]}, "functions"),
    "a search": (CHAT, {"web_search_options": {}}, "web_search_options"),
    "no prompt": (TEXT, {"prompt": None}, "prompt"),
    "an empty prompt": (TEXT, {"prompt": ""}, "prompt"),
    "no prompts": (TEXT, {"prompt": []}, "prompt"),
    "mixed prompts": (TEXT, {"prompt": ["a", 1]}, "prompt[1]"),
    "a prompt below zero": (TEXT, {"prompt": [-1]}, "prompt[0]"),
    "the best of more": (TEXT, {"prompt": "x", "best_of": 2}, "best_of"),
    "an echo of tokens": (TEXT, {"prompt": [1], "echo": True}, "echo"),
    "an echo with logprobs": (TEXT, {"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
    "too many prompts": (TEXT, {"prompt": ["x"] * 2049}, "prompt"),
    "no input": (VECTORS, {}, "input"),
    "an empty input": (VECTORS, {"input": ["a", ""]}, "input[1]"),
    "an unknown encoding": (VECTORS, {"input": "a", "encoding_format": "hex"}, "encoding_format"),
}


@run_async
async def test_what_can_not_be_asked_is_refused_by_name_and_no_job_is_made(tmp_path: Path) -> None:
    wrong = {}
    async with door(tmp_path) as one:
        for case, (path, fields, param) in BAD.items():
            body = {"model": "fake", **({"messages": HELLO} if path == CHAT else {}), **fields}
            body = {name: value for name, value in body.items() if name in fields or value}
            answer = await one.call("POST", path, body)
            fault = fault_of(answer)
            if (answer.status, fault["type"], fault["param"]) != (
                400,
                "invalid_request_error",
                param,
            ):
                wrong[case] = (answer.status, fault)
        assert not wrong
        assert not await one.engine.api.find(JobQuery())


RAW: dict[str, tuple[bytes, int, str]] = {
    "no JSON": (b"{", 400, "invalid_json"),
    "NaN": (b'{"model":"fake","temperature":NaN,"messages":[]}', 400, "invalid_json"),
    "an endless number": (
        b'{"model":"fake","temperature":1e999,"messages":[]}',
        400,
        "invalid_value",
    ),
    "a name twice": (b'{"model":"fake","model":"b","messages":[]}', 400, "duplicate_field"),
    "no UTF-8": (b'{"model":"\xff"}', 400, "invalid_json"),
    "a list": (b"[]", 400, "invalid_value"),
    "nothing": (b"", 400, "invalid_json"),
    "too deep": (b'{"model":' + b"[" * 100 + b"]" * 100 + b"}", 400, "too_deep"),
    "too large": (b'{"model":"' + b"x" * 3000 + b'"}', 413, "request_too_large"),
}


@run_async
async def test_bodies_that_can_not_be_read_are_refused_in_the_same_shape(tmp_path: Path) -> None:
    headers = {"Content-Type": "application/json"}
    async with door(tmp_path, max_body=2000, max_upload=2000) as one:
        for case, (body, status, code) in RAW.items():
            answer = await one.call("POST", CHAT, data=body, headers=headers)
            assert (answer.status, fault_of(answer)["code"]) == (status, code), case
        other = await one.call("POST", CHAT, data=b"{}", headers={"Content-Type": "text/plain"})
        assert (other.status, fault_of(other)["code"]) == (415, "wrong_type")


@run_async
async def test_a_model_that_nobody_serves_is_not_found_and_the_others_are_named(
    tmp_path: Path,
) -> None:
    async with door(tmp_path) as one, one.client() as client:
        with pytest.raises(openai.NotFoundError, match="this server has: fake") as caught:
            await client.chat.completions.create(model="gpt-4", messages=HELLO)
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        for name in ("../x", "a" * 5000, "fake.*"):
            with pytest.raises(openai.NotFoundError):
                await client.chat.completions.create(model=name, messages=HELLO)


FAILURES = {
    LlmCode.CONTEXT_EXCEEDED: (400, "context_length_exceeded", "messages"),
    LlmCode.INVALID_PROMPT: (400, "invalid_prompt", "messages"),
    LlmCode.INVALID_SCHEMA: (400, "invalid_schema", "response_format"),
    LlmCode.NOT_SUPPORTED: (400, "unsupported_value", "messages"),
    LlmCode.MODEL_NOT_FOUND: (404, "model_not_found", "model"),
    LlmCode.MODEL_INVALID: (500, "model_invalid", "model"),
    LlmCode.OUT_OF_MEMORY: (503, "out_of_memory", None),
    LlmCode.ENGINE_MISSING: (503, "engine_missing", None),
    LlmCode.ENGINE_CRASHED: (500, "engine_crashed", None),
    LlmCode.ENGINE_ERROR: (500, "engine_error", None),
    LlmCode.JOB_MISSING: (503, "job_missing", None),
    LlmCode.ORIGIN_MISMATCH: (500, "origin_mismatch", None),
    LlmCode.END_MODEL_UNAVAILABLE: (503, "end_model_unavailable", "model"),
    LlmCode.PREFILL_UPDATE_FAILED: (500, "prefill_update_failed", None),
    LlmCode.NO_MODEL_FOR_NEXT_LAYER: (503, "no_model_for_next_layer", "model"),
    LlmCode.NO_LOCAL_MODEL: (503, "no_local_model", "model"),
    LlmCode.JOB_UPDATE_FAILED: (500, "job_update_failed", None),
    LlmCode.PIPE_UNAVAILABLE: (503, "pipe_unavailable", "model"),
    LlmCode.NODE_LOST: (503, "node_lost", None),
    LlmCode.NODE_STALLED: (503, "node_stalled", None),
    LlmCode.NO_ROOM: (503, "no_room", None),
    LlmCode.WRONG_COMPUTATION: (502, "wrong_computation", None),
}
PASSING = {
    LlmCode.OUT_OF_MEMORY,
    LlmCode.ENGINE_CRASHED,
    LlmCode.JOB_MISSING,
    LlmCode.NO_MODEL_FOR_NEXT_LAYER,
    LlmCode.NO_LOCAL_MODEL,
    LlmCode.PIPE_UNAVAILABLE,
    LlmCode.NODE_LOST,
    LlmCode.NODE_STALLED,
    LlmCode.NO_ROOM,
    LlmCode.WRONG_COMPUTATION,
}
"""What the next try may be spared: OpenAI's clients repeat these by themselves."""


def test_every_failure_of_a_model_has_a_case() -> None:
    assert set(FAILURES) == set(LlmCode)


ENGINES = {LlmCode.OUT_OF_MEMORY, LlmCode.ENGINE_MISSING}
"""Never a job's fault: the model is paused."""


@run_async
async def test_a_model_whose_engine_is_unavailable_is_told_at_once_with_the_reason(
    tmp_path: Path,
) -> None:
    class Unable(FakeRunner):
        async def load(self, model: str = "", on_progress: Any = None) -> Any:
            raise EngineUnavailable(LlmCode.ENGINE_MISSING, "install libgomp1")

    async with door(tmp_path, Unable()) as one:
        async with asyncio.timeout(10):
            while not (await one.engine.api.status()).paused_topics:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        answer = await one.call("POST", CHAT, {"model": "fake", "messages": HELLO})
        assert (answer.status, fault_of(answer)["code"]) == (503, "unavailable")
        assert "ENGINE_MISSING: install libgomp1" in fault_of(answer)["message"]
        assert await one.engine.api.find(JobQuery()) == []


@pytest.mark.parametrize("code", [code for code in FAILURES if code not in ENGINES])
@run_async
async def test_a_failure_of_the_model_says_what_and_names_the_job(
    tmp_path: Path, code: LlmCode
) -> None:
    async with door(tmp_path, saying(LlmFailure(code, "that is why"))) as one:
        answer = await one.call("POST", CHAT, {"model": "fake", "messages": HELLO})
        fault = fault_of(answer)
        assert (answer.status, fault["code"], fault["param"]) == FAILURES[code]
        assert "that is why" in fault["message"]
        (job,) = await one.engine.api.find(JobQuery())
        assert answer.headers["x-penstock-job"] == job.job_id
        assert job.state is JobState.FAILED
        assert ("x-should-retry" in answer.headers) is not (code in PASSING)


@run_async
async def test_a_prompt_that_is_too_long_is_told_both_counts(tmp_path: Path) -> None:
    async with door(tmp_path, FakeRunner(context=5)) as one, one.client() as client:
        with pytest.raises(openai.BadRequestError, match=r"5 tokens.* 7") as caught:
            await client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": "a b c d e f g"}]
            )
        assert caught.value.code == "context_length_exceeded"


@run_async
async def test_an_answer_that_does_not_come_in_time_ends_the_job_and_is_not_repeated(
    tmp_path: Path,
) -> None:
    runner = saying(asyncio.Event())
    async with door(tmp_path, runner) as one, one.client(max_retries=2) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(
                model="fake", messages=HELLO, extra_body={"timeout": 0.2}
            )
        assert (caught.value.status_code, caught.value.code) == (408, "timeout")
        (job,) = await one.engine.api.find(JobQuery())
        assert job.job_id in str(caught.value)
        assert job.state is JobState.TIMEOUT
        assert not runner.running


@run_async
async def test_a_job_that_others_cancel_is_told_as_such(tmp_path: Path) -> None:
    runner = saying(asyncio.Event())
    async with door(tmp_path, runner) as one, one.client(max_retries=2) as client:
        waiting = asyncio.ensure_future(
            client.chat.completions.create(model="fake", messages=HELLO)
        )
        job = await _the_running(one, runner)
        await one.engine.api.cancel(job.job_id, reason="enough")
        with pytest.raises(openai.ConflictError) as caught:
            await waiting
        assert caught.value.code == "job_cancelled"


async def _the_running(one: Door, runner: Any) -> Any:
    async with asyncio.timeout(10):
        while not runner.running:  # noqa: ASYNC110 (the runner tells nobody)
            await asyncio.sleep(0.001)
    (job,) = await one.engine.api.find(JobQuery())
    return job


@run_async
async def test_a_result_that_is_no_answer_is_the_servers_fault(tmp_path: Path) -> None:
    class Odd(LlmExecutor):
        async def run(self, task: Task, ctx: Context) -> Outcome:
            if b"words" in task.payload:
                ctx.stream("no JSON")
                await asyncio.sleep(3600)
            return Outcome(JobState.SUCCEEDED, b'{"text": 7}' if b"a b" in task.payload else None)

    async with door(tmp_path, executors=[Odd(FakeRunner(), ["fake"])]) as one:
        for content in ("a b", "nothing", "words"):
            body = {"model": "fake", "messages": [{"role": "user", "content": content}]}
            answer = await one.call("POST", CHAT, {**body, "stream": content == "words"})
            assert (answer.status, fault_of(answer)["type"]) == (503, "server_error")
