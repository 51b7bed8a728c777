"""Completions, embeddings and models, through OpenAI's client."""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path
from struct import unpack

import openai
import pytest
from tests.support.fake_llm import FakeRunner
from tests.support.openai.door import Scripted, door, said, saying

from penstock.testing.aio import run_async
from penstock.workloads.llm.values import CompletionRequest, Delta, TokenLogprob, TopLogprob, Usage


@run_async
async def test_a_text_goes_on_for_sixteen_tokens_unless_told_otherwise(tmp_path: Path) -> None:
    runner = saying(said("and so on", Usage(2, 3, 0)))
    async with door(tmp_path, runner) as one, one.client() as client:
        answer = await client.completions.create(model="fake", prompt="once upon")
        assert answer.object == "text_completion"
        assert answer.id.startswith("cmpl-")
        assert [(c.text, c.finish_reason) for c in answer.choices] == [("and so on", "stop")]
        assert answer.usage is not None
        assert answer.usage.total_tokens == 5
        assert runner.asks[-1].max_tokens == 16
        await client.completions.create(model="fake", prompt="x", max_tokens=3, best_of=1)
        assert runner.asks[-1].max_tokens == 3


@run_async
async def test_prompts_may_be_texts_or_tokens_and_answers_keep_their_order(tmp_path: Path) -> None:
    runner = Scripted(lambda ask, choice: [said(f" {choice}")])
    async with door(tmp_path, runner) as one, one.client() as client:
        cases: list[tuple[object, tuple[object, ...]]] = [
            (["a", "b"], ("a", "b")),
            ([1, 2, 3], ((1, 2, 3),)),
            ([[1, 2], [3]], ((1, 2), (3,))),
        ]
        for given, prompts in cases:
            answer = await client.completions.create(model="fake", prompt=given, n=2)  # type: ignore[call-overload]
            ask = runner.asks[-1]
            assert isinstance(ask, CompletionRequest)
            assert ask.prompts == prompts
            numbers = range(2 * len(prompts))
            assert [(c.index, c.text) for c in answer.choices] == [(n, f" {n}") for n in numbers]


@run_async
async def test_a_prompt_can_be_told_before_its_answer(tmp_path: Path) -> None:
    async with door(tmp_path) as one, one.client() as client:
        answer = await client.completions.create(
            model="fake", prompt=["a b", "c"], n=2, echo=True, stream=False
        )
        assert [c.text for c in answer.choices] == ["a bA B", "a bA B", "cC", "cC"]
        stream = await client.completions.create(model="fake", prompt="a b", echo=True, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "a bA B"


@run_async
async def test_completions_tell_logprobs_in_their_own_form(tmp_path: Path) -> None:
    tokens = (
        TokenLogprob("an", -0.5, None, (TopLogprob("an", -0.5), TopLogprob("or", -1.5))),
        TokenLogprob("d", -0.25),
    )
    pieces = [Delta(text=token.token, logprobs=(token,)) for token in tokens]
    runner = saying(*pieces, said("and", logprobs=tokens))
    async with door(tmp_path, runner) as one, one.client() as client:
        answer = await client.completions.create(model="fake", prompt="x", logprobs=2)
        told = answer.choices[0].logprobs
        assert told is not None
        assert (told.tokens, told.token_logprobs) == (["an", "d"], [-0.5, -0.25])
        assert told.text_offset == [0, 2]
        assert told.top_logprobs == [{"an": -0.5, "or": -1.5}, {}]
        stream = await client.completions.create(
            model="fake",
            prompt="x",
            logprobs=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        offsets = [
            offset
            for chunk in chunks
            for choice in chunk.choices
            if choice.logprobs
            for offset in choice.logprobs.text_offset or ()
        ]
        assert offsets == [0, 2]
        assert chunks[-1].usage is not None


# -- embeddings ---------------------------------------------------------------------------


@run_async
async def test_vectors_come_as_numbers_and_as_bytes(tmp_path: Path) -> None:
    async with door(tmp_path, FakeRunner()) as one, one.client() as client:
        by_default = await client.embeddings.create(model="fake", input=["aa", "ee"])
        floats = await client.embeddings.create(
            model="fake", input=["aa", "ee"], encoding_format="float", dimensions=4
        )
        assert [vector.index for vector in floats.data] == [0, 1]
        for left, right in zip(by_default.data, floats.data, strict=True):
            assert left.embedding == pytest.approx(right.embedding, abs=1e-6)
        assert (floats.object, floats.usage.prompt_tokens) == ("list", 2)
        raw = await one.call(
            "POST",
            "/v1/embeddings",
            {"model": "fake", "input": "aa", "encoding_format": "base64"},
        )
        packed = b64decode(raw.json["data"][0]["embedding"])
        assert unpack("<4f", packed) == pytest.approx(floats.data[0].embedding, abs=1e-6)


@run_async
async def test_tokens_can_be_embedded_too(tmp_path: Path) -> None:
    async with door(tmp_path) as one, one.client() as client:
        assert len((await client.embeddings.create(model="fake", input=[1, 2])).data) == 1
        assert len((await client.embeddings.create(model="fake", input=[[1], [2]])).data) == 2


# -- models -------------------------------------------------------------------------------


@run_async
async def test_the_models_that_workers_serve_are_listed(tmp_path: Path) -> None:
    names = ("smollm2-135m", "Qwen3-0.6B.Q8_0")
    async with door(tmp_path, FakeRunner(names), models=names) as one, one.client() as client:
        found = [model async for model in client.models.list()]
        assert [model.id for model in found] == sorted(names)
        assert {model.object for model in found} == {"model"}
        again = await client.models.retrieve("Qwen3-0.6B.Q8_0")
        assert again == found[0]
        with pytest.raises(openai.NotFoundError, match="this server has") as caught:
            await client.models.retrieve("org/other")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
