"""Requests that are made to break something: each is refused by name, and costs little."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from tests.support.openai.door import door, said, saying

from penstock.api.openai.responses import ResponseBody, chat_request
from penstock.testing.aio import run_async
from penstock.workloads.llm.values import Delta, LlmCode, LlmFailure

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
SOURCE = "https://127.0.0.1:9/pics/"
"""Nobody listens there: what is allowed can't be fetched."""


def _image(url: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [_part(url)]}]}


def _part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def _block(**block: Any) -> dict[str, Any]:
    return {"max_tokens": 5, "messages": [{"role": "user", "content": [block]}]}


def _tools(**parameters: Any) -> dict[str, Any]:
    function = {"name": "f", "parameters": parameters}
    tools = [{"type": "function", "function": {**function, "name": name}} for name in "fg"]
    return {"messages": HELLO, "tools": tools, "tool_choice": "required"}


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "half an address": (CHAT, _image("https://[::1"), "is not a URL"),
    "structured outputs as text": (
        CHAT,
        {"messages": HELLO, "structured_outputs": "x"},
        "structured_outputs",
    ),
    "a deep schema as text": (
        CHAT,
        {"messages": HELLO, "json_schema": '{"items":' * 5000 + "{}" + "}" * 5000},
        "nested deeper",
    ),
    "definitions that are none": (CHAT, _tools(**{"$defs": [1]}), "$defs"),
    "a result that is a number": (
        MESSAGES,
        _block(type="tool_result", tool_use_id="x", content=5),
        "messages[0].content[0].content",
    ),
    "a vector of nothing": ("/api/embed", {"input": "x", "dimensions": 0}, "dimensions"),
    "a vector of less": ("/api/embed", {"input": "x", "dimensions": -3}, "dimensions"),
}


@pytest.mark.parametrize("name", BAD)
@run_async
async def test_a_bad_request_is_no_error_of_the_server(tmp_path: Path, name: str) -> None:
    path, body, named = BAD[name]
    async with door(tmp_path) as one:
        answer = await one.call("POST", path, {"model": "fake", **body})
    assert answer.status == 400, answer.body
    assert named in answer.body.decode()


@run_async
async def test_a_field_is_named_once_in_an_error_of_anthropics_shape(tmp_path: Path) -> None:
    async with door(tmp_path) as one:
        answer = await one.call("POST", MESSAGES, {"model": "fake", **_block(type="sound")})
    assert answer.json["error"]["message"].count("messages[0].content[0].type") == 1


OUTSIDE = (
    "https://127.0.0.1:9/pics/%2e%2e/secret.png",
    "https://127.0.0.1:9/pics/.%2E/secret.png",
    "https://127.0.0.1:9/pics/x%2f..%2f..%2fsecret.png",
    "https://127.0.0.1:9/pics/../secret.png",
    "https://127.0.0.1:9/pics-of-others/a.png",
    "https://127.0.0.1:9.evil.example/pics/a.png",
    "https://127.0.0.1/pics/a.png",
    "https://127.0.0.1:9@evil.example/pics/a.png",
    "https://user@127.0.0.1:9/pics/a.png",
    "https://[::1]:9/pics/a.png",
)


@run_async
async def test_no_image_is_fetched_from_beside_its_source(tmp_path: Path) -> None:
    async with door(tmp_path, image_sources=(SOURCE,)) as one:
        for url in OUTSIDE:
            answer = await one.call("POST", CHAT, {"model": "fake", **_image(url)})
            assert answer.status == 400
            fault = answer.json["error"]
            assert "is not" in fault["message"], url
            assert fault["param"] == "messages[0].content[0].image_url.url"
        answer = await one.call("POST", CHAT, {"model": "fake", **_image(SOURCE + "a.png")})
        assert "can't be fetched" in answer.json["error"]["message"]


def test_many_calls_in_one_request_take_little_time() -> None:
    calls: tuple[dict[str, Any], ...] = ({"type": "function_call"},) * 60_000
    began = time.process_time()
    (message,) = chat_request(ResponseBody(input=calls), {}).messages
    assert len(message.tool_calls) == 60_000
    assert time.process_time() - began < 4, "it took 20 s when each call copied all before it"


@run_async
async def test_a_response_that_is_not_finished_can_not_be_continued(tmp_path: Path) -> None:
    go_on = asyncio.Event()
    runner = saying(Delta(text="x"), go_on, said("x"))
    async with door(tmp_path, runner) as one, one.client() as client:
        events = await client.responses.create(model="fake", input="a", stream=True)
        first = await anext(aiter(events))
        assert first.type == "response.created"
        body = {"model": "fake", "input": "b", "previous_response_id": first.response.id}
        answer = await one.call("POST", RESPONSES, body)
        assert answer.status == 409, answer.body
        assert "has not ended" in answer.json["error"]["message"]
        go_on.set()
        async for _ in events:
            pass
        assert (await one.call("POST", RESPONSES, body)).status == 200


@run_async
async def test_a_response_that_does_not_exist_can_not_be_continued(tmp_path: Path) -> None:
    async with door(tmp_path) as one:
        body = {"model": "fake", "input": "b", "previous_response_id": "resp_none"}
        answer = await one.call("POST", RESPONSES, body)
    assert answer.status == 400
    error = answer.json["error"]
    assert (error["code"], error["param"]) == (
        "previous_response_not_found",
        "previous_response_id",
    )


@run_async
async def test_a_response_that_failed_says_so_when_it_is_read(tmp_path: Path) -> None:
    failure = LlmFailure(LlmCode.INVALID_PROMPT, "roles out of order")
    async with door(tmp_path, saying(failure)) as one:
        refused = await one.call("POST", RESPONSES, {"model": "fake", "input": "a"})
        assert refused.status == 400
        response_id = "resp_" + refused.headers["x-penstock-job"]
        answer = await one.call("GET", f"{RESPONSES}/{response_id}")
    assert answer.status == 200
    assert answer.json["status"] == "failed"
    assert answer.json["error"] == {"code": "invalid_prompt", "message": "roles out of order"}


@pytest.mark.parametrize("path", [MESSAGES, f"{MESSAGES}/batches"])
@run_async
async def test_what_is_not_there_is_told_in_anthropics_shape(tmp_path: Path, path: str) -> None:
    async with door(tmp_path) as one:
        answer = await one.call("GET", path)
    assert answer.status in (404, 405)
    assert answer.json["type"] == "error"
    assert set(answer.json["error"]) == {"type", "message"}
