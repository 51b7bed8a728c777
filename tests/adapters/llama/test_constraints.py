"""What an answer may be held to."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest

from penstock.adapters.llama.protocol import DEEPEST, LARGEST, check_constraints
from penstock.workloads.llm.values import (
    ChatRequest,
    CompletionRequest,
    LlmCode,
    LlmFailure,
    Message,
)


def chat(**more: Any) -> ChatRequest:
    return ChatRequest(messages=(Message(role="user", content="x"),), **more)


def grammar(text: str) -> CompletionRequest:
    return CompletionRequest(prompts=("x",), grammar=text)


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (grammar('root ::= "' + "a" * LARGEST + '"'), "grammar has 65,"),
        (grammar("root ::= " + "(" * 1001 + '"a"' + ")" * 1001), "within each other"),
        (grammar('root ::= "\\"" ' + "(" * 1001), "within each other"),
        (chat(schema={"description": "a" * LARGEST}), "schema has 65,"),
        (chat(tools=({"description": "a" * LARGEST},)), "tools has 65,"),
    ],
    ids=["long", "deep", "after-a-quote", "schema", "tools"],
)
def test_what_could_overflow_the_engine_is_refused(
    ask: ChatRequest | CompletionRequest, why: str
) -> None:
    with pytest.raises(LlmFailure, match=why) as refused:
        check_constraints(ask)

    assert refused.value.code is LlmCode.INVALID_SCHEMA


@pytest.mark.parametrize(
    "ask",
    [
        grammar("root ::= " + "(" * DEEPEST + '"a"' + ")" * DEEPEST),
        grammar('root ::= "' + "(" * 2000 + '"'),
        grammar("root ::= [" + "(" * 2000 + "]"),
        grammar('root ::= "a" # ' + "(" * 2000),
        grammar("root ::= " + '("a" | "b") ' * 2000),
        chat(schema={"type": "string"}, tools=({"type": "function"},)),
    ],
    ids=["deep", "literal", "class", "comment", "beside", "usual"],
)
def test_what_is_usual_passes(ask: ChatRequest | CompletionRequest) -> None:
    check_constraints(ask)


@pytest.mark.parametrize("text", ['"', "[", "#", '"\\', "(", "a"])
def test_a_check_takes_no_longer_than_the_text_is_long(text: str) -> None:
    began = time.perf_counter()
    with suppress(LlmFailure):
        check_constraints(grammar(text * (LARGEST // len(text))))

    assert time.perf_counter() - began < 5
