"""Text of a real model: the same prompts as in the spool, whole characters, held answers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from penstock.adapters.llama.runner import LlamaRunner
from penstock.testing.aio import run_async
from penstock.workloads.llm.config import ModelConfig
from penstock.workloads.llm.runner import answer
from penstock.workloads.llm.values import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Message,
    Sampling,
    TextPart,
    TokenizeRequest,
)
from penstock.workloads.pipes.text.tokenizing import Text
from penstock.workloads.pipes.weights.source import open_source

USER = Message(role="user", content="What is 17 times 250, and why?")
SAID = Message(role="assistant", content="Well, ")
PROMPTS: tuple[GenerationRequest, ...] = (
    CompletionRequest(prompts=("The capital of France is",)),
    CompletionRequest(prompts=("def f(x):\n    return  x ** 2\t# 123456 numbers\n\n\n",)),
    CompletionRequest(prompts=("日本語のテキスト 😀🌟 naïve Привет",)),
    CompletionRequest(prompts=("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",)),
    CompletionRequest(prompts=(" two  spaces ", (504, 3575, 282))),
    ChatRequest(messages=(USER,)),
    ChatRequest(messages=(Message(role="developer", content="Be brief."), USER, SAID, USER)),
    ChatRequest(messages=(USER, SAID)),
    ChatRequest(messages=(Message(role="user", content=(TextPart("a"), TextPart("b"))),)),
    ChatRequest(messages=(Message(role="user"), Message(role="tool", content="wet"))),
)


@pytest.fixture(scope="module")
def tokenizer(model_file: Path) -> Any:
    return open_source(model_file).tokenizer()


@pytest.fixture(scope="module")
def text(model_file: Path, tokenizer: Any) -> Text:
    source = open_source(model_file)
    return Text(tokenizer, source.config, source.generation)


def test_an_answer_ends_with_its_turn_or_its_text(text: Text) -> None:
    assert text.ends == {2, 0}


@pytest.mark.usefixtures("llama_cpp")
@run_async
async def test_a_prompt_has_as_many_tokens_as_in_the_spool(model_file: Path, text: Text) -> None:
    runner = LlamaRunner(ModelConfig(models=(str(model_file),), slots=2, context=256))
    counts = [(await answer(runner, "", _short(ask))).usage.prompt_tokens for ask in PROMPTS]
    await runner.close()

    assert counts == [
        sum(len(text.prompt_of(ask, choice)) for choice in range(_prompts(ask))) for ask in PROMPTS
    ]


def _short(ask: GenerationRequest) -> GenerationRequest:
    return replace(ask, max_tokens=1)


def _prompts(ask: GenerationRequest) -> int:
    return len(ask.prompts) if isinstance(ask, CompletionRequest) else 1


def test_text_and_tokens_are_the_same_prompt(text: Text) -> None:
    whole, tokens = "The capital of France is", (504, 3575, 282, 4649, 314)
    assert text.prompt_of(CompletionRequest(prompts=(whole,))) == list(tokens)
    assert text.prompt_of(CompletionRequest(prompts=(tokens,))) == list(tokens)


def test_pieces_of_random_tokens_make_up_what_the_tokenizer_makes_of_all(
    text: Text, tokenizer: Any
) -> None:
    chance = random.Random(4)
    told: set[int] = set(tokenizer.encode("😀🌟🎉 日本語のテキスト 漢字 한국어 👩‍👩‍👧"))
    for _ in range(300):
        tokens = [
            chance.choice(sorted(told)) if chance.random() < 0.5 else chance.randrange(3, 49152)
            for _ in range(chance.randrange(1, 40))
        ]
        writer = text.writer(PROMPTS[0], len(tokens))
        pieces = [piece.text for token in tokens if (piece := writer.add(token))]
        whole = tokenizer.decode(tokens, skip_special_tokens=True)

        assert "".join(pieces) == writer.said().text
        assert whole in (writer.said().text, writer.said().text + "\ufffd")
        assert writer.finished == "length"


def test_an_answer_follows_its_schema(text: Text) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "東京"]}, "size": {"type": "boolean"}},
        "required": ["city", "size"],
        "additionalProperties": False,
    }
    ask = CompletionRequest(prompts=("x",), schema=schema, sampling=Sampling(seed=1, temperature=1))
    sampler, writer = text.sampler(ask), text.writer(ask, 200)
    noise = torch.Generator().manual_seed(1)
    ids = [5]
    while writer.finished is None:
        ids.append(sampler.choose(torch.randn(49152, generator=noise), ids).token)
        writer.add(ids[-1])

    assert writer.finished == "stop"
    assert json.loads(writer.said().text)["city"] in ("Oslo", "東京")


def test_tokens_and_text_become_each_other(text: Text) -> None:
    tokens, _ = text.tokens_and_text(TokenizeRequest(text="Hello, brave new world"))
    assert (
        text.tokens_and_text(TokenizeRequest(tokens=tuple(tokens)))[1] == "Hello, brave new world"
    )
    chat = ChatRequest(messages=(Message(role="user", content="Hi"),))
    asked = TokenizeRequest(messages=chat.messages)
    assert text.tokens_and_text(asked)[0] == text.prompt_of(chat)
