"""How a job ends, as its metadata and files tell it."""

from __future__ import annotations

import asyncio
import json

import pytest

from penstock.testing.aio import run_async
from penstock.workloads.llm.values import (
    ChatRequest,
    Choice,
    EmbeddingResult,
    LlmCode,
    LlmFailure,
    LlmResult,
    Message,
    Sampling,
    Timings,
    TokenLogprob,
    Usage,
)
from penstock.workloads.spool.server.processor import (
    DEADLINE,
    TIMEOUT,
    SpoolOutcome,
    TimeIsUp,
    answered,
    embedded,
    model_for,
    refused,
    within,
)

ASK = ChatRequest(messages=(Message(role="user", content="x"),), sampling=Sampling(seed=3))


def result(**choice: object) -> LlmResult:
    return LlmResult(
        model="m",
        engine="e 1",
        choices=(Choice(**choice),),  # type: ignore[arg-type]
        usage=Usage(5, 4, 2),
        timings=Timings(100.0, 2000.0),
    )


@pytest.mark.seed("004", "13.8")
def test_an_answer_tells_what_it_took() -> None:
    outcome = answered(ASK, result(text="hé", finish_reason="length"), 9.0)
    assert outcome.files == {"result.txt": "hé".encode()}
    assert outcome.facts == {
        "model": "m",
        "engine": "e 1",
        "prompt_tokens": 5,
        "cached_tokens": 2,
        "completion_tokens": 4,
        "finish_reason": "length",
        "tokens_per_second": 2.0,
        "seed": 3,
    }
    assert outcome.error == ""


def test_an_empty_answer_is_done_and_tells_why_it_ended() -> None:
    outcome = answered(ASK, result(text="", finish_reason="stop"), 1.0)
    assert outcome.files == {"result.txt": b""}
    assert outcome.facts["finish_reason"] == "stop"


def test_more_than_text_is_kept_too() -> None:
    probable = (TokenLogprob("a", -0.5),)
    files = answered(ASK, result(text="a", logprobs=probable), 1.0).files
    assert json.loads(files["answer.json"])["choices"][0]["logprobs"][0]["logprob"] == -0.5


def test_an_embedding_has_ten_numbers_a_line_of_six_digits() -> None:
    def embedding_of(*vector: float) -> SpoolOutcome:
        return embedded(EmbeddingResult(model="m", engine="e", vectors=(vector,), usage=Usage(2)))

    lines = embedding_of(*[1 / 3] * 12).files["embedding.json"].decode().splitlines()
    assert lines[:3] == ["{", '  "dim": 12,', '  "vector": [']
    assert lines[3] == "    " + ", ".join(["0.333333"] * 10) + ","
    outcome = embedding_of(1e-9, -2.5)
    assert json.loads(outcome.files["embedding.json"])["vector"] == [1e-9, -2.5]
    assert list(outcome.files) == ["embedding.json"]
    assert "completion_tokens" not in outcome.facts


@pytest.mark.seed("004", "14.3")
def test_an_overlong_prompt_always_names_both_counts() -> None:
    failure = LlmFailure(LlmCode.CONTEXT_EXCEEDED, "too long", prompt_tokens=900, context=512)
    outcome = refused(failure)
    assert "900" in outcome.error
    assert "512" in outcome.error
    assert outcome.facts == {"prompt_tokens": 900}
    told = LlmFailure(LlmCode.CONTEXT_EXCEEDED, "900 is over 512", prompt_tokens=900, context=512)
    assert refused(told).error == "900 is over 512"


@run_async
async def test_what_takes_too_long_is_ended_and_what_comes_too_late_not_begun() -> None:
    async with within(None, DEADLINE, "late"), within(60.0, TIMEOUT, "long"):
        pass
    with pytest.raises(TimeIsUp, match=r"longer than 0\.01 s") as late:
        async with within(0.01, TIMEOUT, "it ran for longer than 0.01 s"):
            await asyncio.sleep(60)
    assert late.value.code == "TIMEOUT"
    with pytest.raises(TimeIsUp, match="deadline") as late:
        async with within(0.0, DEADLINE, "its deadline passed"):
            raise AssertionError("it was begun")
    assert late.value.code == "DEADLINE_EXCEEDED"


@run_async
async def test_a_timeout_of_something_else_is_not_the_jobs() -> None:
    with pytest.raises(TimeoutError, match="of the engine"):
        async with within(60.0, TIMEOUT, "long"):
            raise TimeoutError("of the engine")


def test_a_model_is_chosen_by_name_then_by_a_part_that_only_one_has() -> None:
    names = ["Qwen-1B", "Qwen-1B-code", "Smol"]
    assert model_for("Qwen-1B", names) == "Qwen-1B"
    assert model_for("CODE", names) == "Qwen-1B-code"
    with pytest.raises(LlmFailure, match="may be Qwen-1B or Qwen-1B-code"):
        model_for("qwen", names)
    with pytest.raises(LlmFailure, match="no model 'x'; there is none"):
        model_for("x", [])
