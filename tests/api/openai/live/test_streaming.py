"""Answers in parts: as they come, never twice, and ended when nobody reads them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import openai
import pytest
from openai import APIError, AsyncOpenAI, AsyncStream
from openai.types.chat import ChatCompletionChunk
from tests.support.fake_llm import FakeRunner
from tests.support.openai.door import Door, Scripted, door, said, saying
from tests.support.waiting import soon

from penstock.core.job import TopicDefaults
from penstock.lifecycles.canonical import JobState
from penstock.ports.executor import Context, Interrupted, Outcome, Task
from penstock.ports.store import JobQuery
from penstock.testing.aio import run_async
from penstock.workloads.llm.values import (
    Choice,
    Delta,
    LlmCode,
    LlmFailure,
    LlmResult,
    TokenLogprob,
    ToolCall,
    ToolDelta,
    ToolFunction,
    Usage,
)

HELLO: list[Any] = [{"role": "user", "content": "hello you"}]
Chunks = AsyncStream[ChatCompletionChunk]


async def begun(client: AsyncOpenAI, **fields: Any) -> Chunks:
    given = {"model": "fake", "messages": HELLO, "stream": True, **fields}
    stream: Chunks = await client.chat.completions.create(**given)
    return stream


async def text_of(stream: Chunks) -> str:
    return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])


async def the_job(one: Door) -> Any:
    (job,) = await one.engine.api.find(JobQuery())
    return job


@run_async
async def test_a_stream_begins_goes_on_ends_and_tells_its_usage(tmp_path: Path) -> None:
    runner = saying(Delta(text="Hel"), Delta(text="lo"), said("Hello", Usage(4, 2, 1)))
    async with door(tmp_path, runner) as one, one.client() as client:
        stream = await begun(client, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        assert {chunk.id for chunk in chunks} == {f"chatcmpl-{(await the_job(one)).job_id}"}
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
        deltas = [chunk.choices[0].delta for chunk in chunks[:-1]]
        assert [(d.role, d.content) for d in deltas] == [
            ("assistant", ""),
            (None, "Hel"),
            (None, "lo"),
            (None, None),
        ]
        reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
        assert reasons == [None, None, None, "stop"]
        last = chunks[-1]
        assert (last.choices, [chunk.usage for chunk in chunks[:-1]]) == ([], [None] * 4)
        assert last.usage is not None
        assert (last.usage.prompt_tokens, last.usage.total_tokens) == (4, 6)
        raw = await one.call(
            "POST", "/v1/chat/completions", {"model": "fake", "messages": HELLO, "stream": True}
        )
        assert raw.headers["Content-Type"].startswith("text/event-stream")
        assert raw.headers["x-penstock-job"]
        assert raw.body.endswith(b"data: [DONE]\n\n")
        assert b"usage" not in raw.body


@run_async
async def test_each_piece_is_sent_before_the_next_is_made(tmp_path: Path) -> None:
    gates = [asyncio.Event(), asyncio.Event()]
    runner = saying(Delta(text="a"), gates[0], Delta(text="b"), gates[1], said("ab"))
    async with door(tmp_path, runner) as one, one.client() as client, asyncio.timeout(20):
        stream = await begun(client)
        assert (await anext(stream)).choices[0].delta.role == "assistant"
        assert (await anext(stream)).choices[0].delta.content == "a"
        gates[0].set()
        assert (await anext(stream)).choices[0].delta.content == "b"
        gates[1].set()
        assert [chunk.choices[0].finish_reason async for chunk in stream] == ["stop"]


@run_async
async def test_answers_side_by_side_keep_their_numbers(tmp_path: Path) -> None:
    runner = Scripted(lambda ask, n: [Delta(text=f"{n}-"), Delta(text="x"), said(f"{n}-x")])
    async with door(tmp_path, runner) as one, one.client() as client:
        texts = {0: "", 1: "", 2: ""}
        async for chunk in await begun(client, n=3):
            (choice,) = chunk.choices
            texts[choice.index] += choice.delta.content or ""
        assert texts == {0: "0-x", 1: "1-x", 2: "2-x"}


@run_async
async def test_logprobs_and_tool_calls_come_in_parts(tmp_path: Path) -> None:
    token = TokenLogprob("Hi", -0.5)
    call = ToolCall(id="c1", function=ToolFunction("f", '{"a":1}'))
    script = (
        Delta(text="Hi", logprobs=(token,)),
        Delta(tool_calls=(ToolDelta(index=0, id="c1", name="f"),)),
        Delta(tool_calls=(ToolDelta(index=0, arguments='{"a"'),)),
        Delta(tool_calls=(ToolDelta(index=0, arguments=":1}"),)),
        said("Hi", tool_calls=(call,), logprobs=(token,), finish_reason="tool_calls"),
    )
    async with door(tmp_path, saying(*script)) as one, one.client() as client:
        chunks = [chunk.choices[0] async for chunk in await begun(client, logprobs=True)]
        told = [one.logprobs.content for one in chunks if one.logprobs and one.logprobs.content]
        assert [[token.token for token in tokens] for tokens in told] == [["Hi"]]
        calls = [call for one in chunks for call in one.delta.tool_calls or ()]
        assert [(c.id, c.function.name) for c in calls if c.function and c.id] == [("c1", "f")]
        arguments = "".join(c.function.arguments or "" for c in calls if c.function)
        assert arguments == '{"a":1}'
        assert chunks[-1].finish_reason == "tool_calls"


@run_async
async def test_what_no_piece_told_comes_with_the_end(tmp_path: Path) -> None:
    runner = saying(Delta(text="Hel"), said("Hello"))
    async with door(tmp_path, runner) as one, one.client() as client:
        assert await text_of(await begun(client)) == "Hello"


# -- what goes wrong ----------------------------------------------------------------------


@run_async
async def test_a_failure_before_the_first_piece_has_a_status(tmp_path: Path) -> None:
    failure = LlmFailure(LlmCode.CONTEXT_EXCEEDED, "9000 tokens; room for 4096")
    async with door(tmp_path, saying(failure)) as one, one.client() as client:
        with pytest.raises(openai.BadRequestError) as caught:
            await begun(client)
        assert caught.value.code == "context_length_exceeded"
        assert caught.value.param == "messages"
        assert caught.value.request_id == (await the_job(one)).job_id


@run_async
async def test_a_failure_within_a_stream_is_its_last_event(tmp_path: Path) -> None:
    failure = LlmFailure(LlmCode.ENGINE_ERROR, "it broke")
    async with door(tmp_path, saying(Delta(text="Hel"), failure)) as one, one.client() as client:
        stream = await begun(client)
        told = []
        with pytest.raises(APIError, match="it broke") as caught:
            async for chunk in stream:
                told.append(chunk.choices[0].delta.content)
        assert told == ["", "Hel"]
        assert caught.value.code == "engine_error"
        assert (await the_job(one)).state == "FAILED"


@run_async
async def test_a_reader_that_leaves_cancels_the_job_and_frees_its_slot(tmp_path: Path) -> None:
    runner = saying(Delta(text="a"), asyncio.Event())
    async with door(tmp_path, runner) as one, one.client() as client, asyncio.timeout(20):
        stream = await begun(client)
        await anext(stream)
        assert runner.running == 1
        await stream.close()
        job = await one.engine.api.wait((await the_job(one)).job_id, 10)
        assert job.state is JobState.CANCELLED
        await soon(lambda: not runner.running)
        await soon(lambda: not one.server.waiting)
        (worker,) = await one.engine.api.workers()
        assert worker.held == 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@run_async
async def test_a_client_that_leaves_before_anything_is_told_cancels_the_job(
    tmp_path: Path, stream: bool
) -> None:
    runner = saying(asyncio.Event())
    async with door(tmp_path, runner) as one, one.client(timeout=30) as client:
        waiting = asyncio.ensure_future(begun(client, stream=stream))
        await soon(lambda: runner.running)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        job = await one.engine.api.wait((await the_job(one)).job_id, 10)
        assert job.state is JobState.CANCELLED
        await soon(lambda: not runner.running)


@run_async
async def test_who_gave_a_key_finds_the_answer_when_coming_back(tmp_path: Path) -> None:
    gate = asyncio.Event()
    runner = saying(Delta(text="a"), gate, said("ab"))
    async with door(tmp_path, runner) as one, one.client() as client, asyncio.timeout(20):
        header = {"Idempotency-Key": "mine"}
        stream = await begun(client, extra_headers=header)
        await anext(stream)
        await stream.close()
        await soon(lambda: not one.server.waiting)
        gate.set()
        assert await text_of(await begun(client, extra_headers=header)) == "ab"
        assert len(runner.asks) == 1


@run_async
async def test_a_closing_server_breaks_a_stream_off_where_it_can_be_noticed(
    tmp_path: Path,
) -> None:
    runner = saying(Delta(text="a"), asyncio.Event())
    async with door(tmp_path, runner) as one, one.client() as client, asyncio.timeout(20):
        stream = await begun(client)
        await anext(stream)
        await one.server.close()
        with pytest.raises(openai.APIConnectionError):
            async for _ in stream:
                pass
        job = await one.engine.api.wait((await the_job(one)).job_id, 10)
        assert job.state is JobState.CANCELLED


# -- a second attempt ---------------------------------------------------------------------


class Unsteady:
    """An executor whose worker gives each job back once, after some of its words."""

    topics = ("job.llm.fake",)
    topic_defaults: Mapping[str, TopicDefaults] = MappingProxyType(
        {"job.llm.fake": TopicDefaults(idempotent=True)}
    )
    resumable = False

    def __init__(self, first: Sequence[str], second: Sequence[str], whole: str) -> None:
        self._attempts, self._whole = [first, second], whole

    def check(self, topic: str, payload: bytes) -> None: ...

    async def run(self, task: Task, ctx: Context) -> Outcome:
        for word in self._attempts[min(ctx.attempt, 2) - 1]:
            ctx.stream(msgspec.json.encode(Delta(text=word)).decode())
        if ctx.attempt == 1:
            await asyncio.sleep(0.05)  # what it said is on its way
            raise Interrupted("its worker stops")
        result = LlmResult(model="fake", engine="e", choices=(Choice(text=self._whole),))
        return Outcome(JobState.SUCCEEDED, msgspec.json.encode(result))

    async def close(self) -> None: ...


STEADY = {
    "goes on where it was": (("one ", "two "), ("one two ", "three")),
    "in other pieces": (("one two th",), ("o", "ne two thr", "ee")),
    "without pieces": (("one ",), ()),
}


@pytest.mark.parametrize("case", STEADY)
@run_async
async def test_a_second_attempt_repeats_nothing(tmp_path: Path, case: str) -> None:
    executor = Unsteady(*STEADY[case], "one two three")
    async with door(tmp_path, executors=[executor]) as one, one.client() as client:
        async with asyncio.timeout(20):
            assert await text_of(await begun(client)) == "one two three"
        assert (await the_job(one)).attempt == 2


CHANGED = {
    "other words": (("one ", "two "), ("one ", "too "), "one too"),
    "less": (("one ", "two "), ("one ",), "one "),
    "other without pieces": (("one ",), (), "uno"),
}


@pytest.mark.parametrize("case", CHANGED)
@run_async
async def test_a_second_attempt_that_says_otherwise_ends_the_stream_with_an_error(
    tmp_path: Path, case: str
) -> None:
    async with door(tmp_path, executors=[Unsteady(*CHANGED[case])]) as one, one.client() as client:
        async with asyncio.timeout(20):
            with pytest.raises(APIError, match="became another one"):
                await text_of(await begun(client))


@run_async
async def test_many_streams_at_once_are_told_apart(tmp_path: Path) -> None:
    async with door(tmp_path, FakeRunner(delay=0.001)) as one, one.client() as client:

        async def talk(number: int) -> str:
            messages = [{"role": "user", "content": f"number {number} of many"}]
            return await text_of(await begun(client, messages=messages))

        async with asyncio.timeout(40):
            told = await asyncio.gather(*(talk(number) for number in range(40)))
        assert told == [f"NUMBER {number} OF MANY" for number in range(40)]
