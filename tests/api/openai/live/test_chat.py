"""What OpenAI's client gets for a chat, from an engine whose model is scripted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from tests.support.fake_llm import FakeRunner
from tests.support.openai.door import Door, Scripted, door, said, saying

from penstock.core.job import Priority
from penstock.ports.engine_api import KeyRole
from penstock.ports.store import JobQuery
from penstock.testing.aio import run_async
from penstock.workloads.llm.values import (
    ChatRequest,
    Sampling,
    TokenLogprob,
    ToolCall,
    ToolFunction,
    TopLogprob,
    Usage,
)

HELLO: list[Any] = [{"role": "user", "content": "hello you"}]


async def asked(one: Door, runner: Scripted, **fields: Any) -> ChatRequest:
    """What the model was asked for a request."""
    async with one.client() as client:
        await client.chat.completions.create(**{"model": "fake", "messages": HELLO, **fields})
    found = runner.asks[-1]
    assert isinstance(found, ChatRequest)
    return found


@run_async
async def test_a_chat_is_answered_with_its_text_reason_and_usage(tmp_path: Path) -> None:
    runner = saying(said("Hi!", Usage(11, 2, 7), finish_reason="length"))
    async with door(tmp_path, runner) as one, one.client() as client:
        answer = await client.chat.completions.create(model="fake", messages=HELLO)
        assert (answer.object, answer.model) == ("chat.completion", "fake")
        (choice,) = answer.choices
        assert (choice.index, choice.finish_reason) == (0, "length")
        assert (choice.message.role, choice.message.content) == ("assistant", "Hi!")
        assert choice.logprobs is None
        usage = answer.usage
        assert usage is not None
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (11, 2, 13)
        assert usage.prompt_tokens_details is not None
        assert usage.prompt_tokens_details.cached_tokens == 7
        assert answer.system_fingerprint == "fake 1"


@run_async
async def test_the_clients_that_block_are_served_too(tmp_path: Path) -> None:
    def talk(one: Door) -> tuple[Any, list[Any]]:
        with one.sync_client() as client:
            whole = client.chat.completions.create(model="fake", messages=HELLO)
            parts = client.chat.completions.create(model="fake", messages=HELLO, stream=True)
            return whole, [part.choices[0].delta.content for part in parts]

    async with door(tmp_path) as one:
        whole, parts = await asyncio.to_thread(talk, one)
        assert whole.choices[0].message.content == "HELLO YOU"
        assert parts == ["", "HELLO", " YOU", None]


@run_async
async def test_each_request_is_a_job_that_its_answer_names(tmp_path: Path) -> None:
    async with door(tmp_path) as one, one.client() as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="fake", messages=HELLO, user="ann", metadata={"trace": "7"}
        )
        answer = raw.parse()
        job_id = raw.headers["x-penstock-job"]
        assert answer.id == f"chatcmpl-{job_id}"
        assert answer._request_id == job_id
        (job,) = await one.engine.api.find(JobQuery())
        assert (job.job_id, job.state) == (job_id, "SUCCEEDED")
        assert job.request.topic == "job.llm.fake"
        assert job.request.priority is Priority.INTERACTIVE
        assert job.request.labels == {"user": "ann", "trace": "7"}
        assert job.request.timeout == 600
        events = [entry.event for entry in await one.engine.api.history(job_id)]
        assert events[0] == "accept"
        assert events[-1] == "succeed"


@run_async
async def test_the_same_key_is_the_same_job(tmp_path: Path) -> None:
    runner = FakeRunner()
    async with door(tmp_path, runner) as one, one.client() as client:
        header = {"Idempotency-Key": "k1"}
        create = client.chat.completions.create
        first = await create(model="fake", messages=HELLO, extra_headers=header)
        again = await create(model="fake", messages=HELLO, extra_headers=header)
        assert first == again
        assert len(runner.asked) == 1


@run_async
async def test_all_that_shapes_the_answer_reaches_the_model(tmp_path: Path) -> None:
    runner = saying(said("x"))
    async with door(tmp_path, runner) as one:
        chat = await asked(
            one,
            runner,
            max_completion_tokens=9,
            temperature=0.5,
            top_p=0.9,
            seed=-1,
            stop=["a", "b"],
            presence_penalty=1.0,
            frequency_penalty=-1.0,
            extra_body={"top_k": 4, "min_p": 0.1, "repeat_penalty": 1.1, "grammar": "root ::= x"},
        )
        assert chat.max_tokens == 9
        assert chat.stop == ("a", "b")
        assert chat.grammar == "root ::= x"
        assert chat.sampling == Sampling(
            temperature=0.5,
            top_p=0.9,
            top_k=4,
            min_p=0.1,
            repeat_penalty=1.1,
            presence_penalty=1.0,
            frequency_penalty=-1.0,
            seed=(1 << 32) - 2,
        )
        chat = await asked(one, runner, max_tokens=5, stop="end", n=None)
        assert (chat.max_tokens, chat.stop, chat.n) == (5, ("end",), 1)


@run_async
async def test_n_answers_come_in_their_order(tmp_path: Path) -> None:
    runner = Scripted(lambda ask, choice: [said(f"answer {choice}", Usage(5, 2, 0))])
    async with door(tmp_path, runner) as one, one.client() as client:
        answer = await client.chat.completions.create(model="fake", messages=HELLO, n=3)
        assert [(c.index, c.message.content) for c in answer.choices] == [
            (0, "answer 0"),
            (1, "answer 1"),
            (2, "answer 2"),
        ]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 6)


@run_async
async def test_logprobs_are_told_with_their_alternatives(tmp_path: Path) -> None:
    token = TokenLogprob("Hi", -0.1, (72, 105), (TopLogprob("Ho", -2.5, (72, 111)),))
    runner = saying(said("Hi", logprobs=(token,)))
    async with door(tmp_path, runner) as one, one.client() as client:
        answer = await client.chat.completions.create(
            model="fake", messages=HELLO, logprobs=True, top_logprobs=1
        )
        assert runner.asks[-1].logprobs == 1
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert logprobs.content[0].bytes == [72, 105]
        assert logprobs.content[0].top_logprobs[0].token == "Ho"


class Person(BaseModel):
    name: str
    age: int


@run_async
async def test_an_answer_can_be_held_to_a_schema(tmp_path: Path) -> None:
    runner = saying(said('{"name":"Ann","age":7}'))
    async with door(tmp_path, runner) as one, one.client() as client:
        answer = await client.chat.completions.parse(
            model="fake", messages=HELLO, response_format=Person
        )
        assert answer.choices[0].message.parsed == Person(name="Ann", age=7)
        schema = runner.asks[-1].schema
        assert schema is not None
        assert set(schema["properties"]) == {"name", "age"}
        chat = await asked(one, runner, response_format={"type": "json_object"})
        assert chat.json_object
        chat = await asked(one, runner, response_format={"type": "text"})
        assert not chat.json_object


TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}},
}


@run_async
async def test_tools_are_passed_on_and_their_calls_told(tmp_path: Path) -> None:
    calls = tuple(
        ToolCall(id=f"c{n}", function=ToolFunction("weather", '{"city":"Bern"}')) for n in (1, 2)
    )
    runner = saying(said("", tool_calls=calls, finish_reason="tool_calls"))
    async with door(tmp_path, runner) as one, one.client() as client:
        answer = await client.chat.completions.create(
            model="fake",
            messages=HELLO,
            tools=[TOOL],
            tool_choice="auto",
        )
        (choice,) = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert choice.message.tool_calls is not None
        assert [call.id for call in choice.message.tool_calls] == ["c1", "c2"]
        ask = runner.asks[-1]
        assert isinstance(ask, ChatRequest)
        assert ask.tools == (TOOL,)
        assert (ask.tool_choice, ask.parallel_tool_calls) == ("auto", None)
        only = await client.chat.completions.create(
            model="fake", messages=HELLO, tools=[TOOL], parallel_tool_calls=False
        )
        assert [call.id for call in only.choices[0].message.tool_calls or ()] == ["c1"]
        ask = runner.asks[-1]
        assert isinstance(ask, ChatRequest)
        assert ask.parallel_tool_calls is False


@run_async
async def test_a_conversation_with_every_role_and_an_image_reaches_the_model(
    tmp_path: Path,
) -> None:
    image = "data:image/png;base64,iVBORw0KGgo="
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": "be short"},
        {"role": "system", "content": "be kind"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "what is it?"},
                {"type": "image_url", "image_url": {"url": image, "detail": "low"}},
            ],
        },
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "c", "content": "a cat"},
    ]
    runner = saying(said("a cat"))
    async with door(tmp_path, runner) as one:
        chat = await asked(one, runner, messages=messages)
        roles = [message.role for message in chat.messages]
        assert roles == ["developer", "system", "user", "assistant", "tool"]
        assert len(chat.messages[2].content or "") == 2
        assert chat.messages[3].tool_calls[0].function.name == "f"


@run_async
async def test_reasoning_is_told_beside_the_answer(tmp_path: Path) -> None:
    runner = saying(said("42", reasoning="let me see"))
    async with door(tmp_path, runner) as one, one.client() as client:
        answer = await client.chat.completions.create(model="fake", messages=HELLO)
        assert answer.choices[0].message.model_extra == {"reasoning_content": "let me see"}


@pytest.mark.parametrize(
    "field", ["store", "service_tier", "safety_identifier", "prompt_cache_key", "prediction"]
)
@run_async
async def test_what_would_not_change_the_answer_is_passed_over(tmp_path: Path, field: str) -> None:
    async with door(tmp_path) as one, one.client() as client:
        answer = await client.chat.completions.create(
            model="fake", messages=HELLO, extra_body={field: "auto", "logit_bias": {}}
        )
        assert answer.choices[0].message.content == "HELLO YOU"


@run_async
async def test_a_large_conversation_becomes_a_blob_and_so_does_its_answer(tmp_path: Path) -> None:
    words = "word " * 4000
    async with door(tmp_path) as one:
        token = await one.key("ann", KeyRole.SUBMIT, tenant="acme")
        async with one.client(token) as client:
            answer = await client.chat.completions.create(
                model="fake", messages=[{"role": "user", "content": words}]
            )
        assert answer.choices[0].message.content == words.strip().upper()
        (job,) = await one.engine.api.find(JobQuery())
        assert job.request.context_ptr.startswith("blob:")
        assert job.request.tenant == "acme"
