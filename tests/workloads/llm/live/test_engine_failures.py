"""What can't be done has a reason of its own, and the others go on."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from penstock.adapters.llama.runner import LlamaRunner
from penstock.testing.aio import run_async
from penstock.workloads.llm.config import ModelConfig
from penstock.workloads.llm.runner import answer
from penstock.workloads.llm.values import (
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    ImagePart,
    ImageUrl,
    LlmCode,
    LlmFailure,
    Message,
    Sampling,
    TextPart,
)

if TYPE_CHECKING:
    from tests.workloads.llm.live.conftest import Kept

HI = (Message(role="user", content="Hi"),)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
PIXEL = "data:image/png;base64,iVBORw0KGgo="


def image(url: str) -> tuple[Message, ...]:
    return (Message(role="user", content=(TextPart("See"), ImagePart(ImageUrl(url)))),)


REFUSED: dict[str, tuple[ChatRequest | CompletionRequest, LlmCode, str]] = {
    "empty": (CompletionRequest(prompts=("",)), LlmCode.INVALID_PROMPT, "empty"),
    "no-tokens": (CompletionRequest(prompts=((),)), LlmCode.INVALID_PROMPT, "empty"),
    "no-unicode": (CompletionRequest(prompts=("\ud800",)), LlmCode.INVALID_PROMPT, "Unicode"),
    "strange-token": (
        CompletionRequest(prompts=((10**8,),)), LlmCode.INVALID_PROMPT, "invalid tokens",
    ),
    "schema": (
        ChatRequest(messages=HI, schema={"type": "nope"}), LlmCode.INVALID_SCHEMA,
        "unrecognized type nope",
    ),
    "raw-schema": (
        CompletionRequest(prompts=("Hi",), schema={"type": "nope"}), LlmCode.INVALID_SCHEMA, "nope"
    ),
    "reference": (
        ChatRequest(messages=HI, schema={"$ref": "#/nowhere"}), LlmCode.INVALID_SCHEMA, "nowhere"
    ),
    "grammar": (ChatRequest(messages=HI, grammar="root ::= ("), LlmCode.INVALID_SCHEMA, "grammar"),
    "no-grammar": (ChatRequest(messages=HI, grammar=" "), LlmCode.INVALID_SCHEMA, "empty"),
    "nameless-tool": (
        ChatRequest(messages=HI, tools=({"type": "function"},)), LlmCode.INVALID_SCHEMA, "name"
    ),
    "tools-and-grammar": (
        ChatRequest(messages=HI, tools=(TOOL,), grammar='root ::= "a"'), LlmCode.INVALID_SCHEMA,
        "tools",
    ),
    "image": (ChatRequest(messages=image(PIXEL)), LlmCode.NOT_SUPPORTED, "projector"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_says_why(kept: Kept, case: str) -> None:
    ask, code, why = REFUSED[case]
    with pytest.raises(LlmFailure) as refused:
        kept.answer(ask)

    assert refused.value.code is code
    assert why in refused.value.message


def test_tools_that_may_not_be_used_are_no_obstacle(kept: Kept) -> None:
    ask = ChatRequest(messages=HI, tools=(TOOL,), tool_choice="none", max_tokens=1)
    assert kept.answer(ask).usage.completion_tokens == 1


@pytest.mark.parametrize("max_tokens", [1, 50], ids=str)
def test_a_prompt_over_the_context_names_both_counts(kept: Kept, max_tokens: int) -> None:
    with pytest.raises(LlmFailure) as refused:
        kept.answer(CompletionRequest(prompts=("word " * 300,), max_tokens=max_tokens))

    failure = refused.value
    assert failure.code is LlmCode.CONTEXT_EXCEEDED
    assert failure.facts["context"] == 256
    assert failure.facts["prompt_tokens"] >= 300
    assert "256" in failure.message
    assert str(failure.facts["prompt_tokens"]) in failure.message


def test_one_that_fails_does_not_disturb_the_others(kept: Kept) -> None:
    good = CompletionRequest(
        prompts=("The sea is",), max_tokens=12, sampling=Sampling(temperature=0)
    )

    async def together() -> list[Any]:
        asks = [good, *(ask for ask, _, _ in REFUSED.values()), good]
        return await asyncio.gather(
            *(answer(kept.runner, "", ask) for ask in asks), return_exceptions=True
        )

    alone = kept.answer(good).choices
    first, *refused, last = kept.run(together())
    assert first.choices == last.choices == alone
    assert all(isinstance(one, LlmFailure) for one in refused)


@pytest.mark.parametrize(
    ("inputs", "code"),
    [
        (("good", ""), LlmCode.INVALID_PROMPT),
        (("good", "word " * 300), LlmCode.CONTEXT_EXCEEDED),
        ((("\ud800"),), LlmCode.INVALID_PROMPT),
        (((10**8,),), LlmCode.INVALID_PROMPT),
    ],
    ids=["empty", "long", "no-unicode", "strange-token"],
)
def test_texts_that_have_no_vector_say_why(kept: Kept, inputs: Any, code: LlmCode) -> None:
    with pytest.raises(LlmFailure) as refused:
        kept.run(kept.runner.embed("", EmbeddingRequest(inputs=inputs)))

    assert refused.value.code is code


def test_an_unknown_model_is_told_with_those_there_are(kept: Kept) -> None:
    with pytest.raises(LlmFailure) as unknown:
        kept.run(answer(kept.runner, "gpt-9", ChatRequest(messages=HI)))

    assert unknown.value.code is LlmCode.MODEL_NOT_FOUND
    assert "SmolLM2-135M-Instruct" in unknown.value.message


def test_a_model_is_found_by_a_part_of_its_name(kept: Kept) -> None:
    facts = kept.run(kept.runner.load("smollm2"))

    assert facts.name == "SmolLM2-135M-Instruct"
    assert (facts.loaded, facts.slots, facts.context) == (True, 8, 256)
    assert (facts.tools, facts.vision) == (False, False)
    assert 90 << 20 < facts.memory < 600 << 20


BAD = {
    "missing": (None, LlmCode.MODEL_NOT_FOUND),
    "no-gguf": (b"this is text, and not a model", LlmCode.MODEL_INVALID),
    "empty": (b"", LlmCode.MODEL_INVALID),
    "cut-off": (b"cut", LlmCode.MODEL_INVALID),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_fails_its_own_model_only(tmp_path: Path, model_file: Path, case: str) -> None:
    content, code = BAD[case]
    bad = tmp_path / "bad.gguf"
    if case == "cut-off":
        with model_file.open("rb") as whole:
            bad.write_bytes(whole.read(1 << 22))
    elif content is not None:
        bad.write_bytes(content)

    @run_async
    async def check() -> None:
        runner = LlamaRunner(ModelConfig(models=(str(bad), str(model_file)), slots=1, context=256))
        with pytest.raises(LlmFailure) as failed:
            await runner.load()
        assert failed.value.code is code
        assert "bad" in failed.value.message
        assert [one.name for one in await runner.models()] == [model_file.stem]
        await runner.close()

    check()


@pytest.mark.seed("004", "6.9")
def test_damage_that_only_the_engine_sees_is_told_in_its_words(
    tmp_path: Path, model_file: Path
) -> None:
    damaged = tmp_path / "damaged.gguf"
    data = model_file.read_bytes()
    damaged.write_bytes(data.replace(b"blk.7.attn_q.weight", b"blk.7.attn_X.weight", 1))

    @run_async
    async def check() -> None:
        runner = LlamaRunner(ModelConfig(models=(str(damaged),), slots=1, context=256))
        with pytest.raises(LlmFailure) as failed:
            await runner.load()
        await runner.close()
        assert failed.value.code is LlmCode.MODEL_INVALID
        assert failed.value.message.endswith("be read: tensor 'blk.7.attn_q.weight' not found")

    check()


@run_async
async def test_a_file_that_went_away_is_not_found(tmp_path: Path, model_file: Path) -> None:
    file = tmp_path / "short-lived.gguf"
    shutil.copyfile(model_file, file)
    runner = LlamaRunner(ModelConfig(models=(str(file),), slots=1, context=256))
    await runner.models()
    file.unlink()
    with pytest.raises(LlmFailure) as failed:
        await runner.load("short-lived")
    await runner.close()

    assert failed.value.code is LlmCode.MODEL_NOT_FOUND


@pytest.mark.seed("004", "6.8")
@run_async
async def test_a_model_over_the_limit_names_both_numbers(model_file: Path) -> None:
    runner = LlamaRunner(ModelConfig(models=(str(model_file),), memory=100 << 20))
    with pytest.raises(LlmFailure) as failed:
        await runner.load()
    await runner.close()

    assert failed.value.code is LlmCode.OUT_OF_MEMORY
    assert failed.value.facts["limit"] == 100 << 20 < failed.value.facts["memory"]
    assert "100 MiB" in failed.value.message


@pytest.mark.seed("004", "13.12")
@run_async
async def test_an_engine_that_is_not_installed_says_how_to(
    model_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "xllamacpp.py").write_text("raise ImportError('libgomp.so.1: cannot open it')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    runner = LlamaRunner(ModelConfig(models=(str(model_file),), slots=1, context=256))
    with pytest.raises(LlmFailure) as failed:
        await runner.load()
    await runner.close()

    assert failed.value.code is LlmCode.ENGINE_MISSING
    assert "libgomp1" in failed.value.message
    assert "xllamacpp" not in sys.modules, "the engine is loaded in its own process alone"
