"""A real model over two nodes, through the same door as a whole one: tools, schemas, embeddings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.support.pipes.networks import Network, SmallModel, ask

from penstock.testing.aio import run_async
from penstock.workloads.llm.values import (
    ChatRequest,
    Delta,
    EmbeddingRequest,
    Message,
    Sampling,
)
from penstock.workloads.pipes.node import Node
from penstock.workloads.pipes.runner import PipeRunner

pytestmark = pytest.mark.timeout(120)
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def chat(said: str, **more: Any) -> ChatRequest:
    return ChatRequest(
        messages=(Message(role="user", content=said),),
        max_tokens=64,
        sampling=Sampling(temperature=0),
        **more,
    )


async def embedded(node: Node, *texts: str) -> tuple[tuple[float, ...], ...]:
    return (await PipeRunner(node).embed("", EmbeddingRequest(inputs=texts))).vectors


def near(one: Sequence[float], other: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


@run_async
async def test_tools_are_called_answers_follow_a_schema_and_texts_become_vectors(
    model_file: Path,
) -> None:
    async with Network(SmallModel(model_file, None)) as network:
        node = await network.split(0, 15, 30)
        pieces: list[Delta] = []
        forced = await ask(
            node, chat("Will it rain in Rome?", tools=(WEATHER,), tool_choice="required"), pieces
        )
        free = await ask(node, chat("Will it rain in Rome?", tools=(WEATHER,)))
        person = await ask(node, chat("Describe Ada, who is 36.", schema=PERSON))
        vectors = await embedded(
            node, "The cat sat on the mat.", "A cat is on a mat.", "x = 17 % 4"
        )
    assert all(abs(sum(one * one for one in vector) - 1) < 1e-4 for vector in vectors)
    assert len(set(vectors)) == len(vectors) == 3
    assert near(vectors[0], vectors[1]) > near(vectors[0], vectors[2])
    [call] = forced.choices[0].tool_calls
    assert forced.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    streamed = [one for piece in pieces for one in piece.tool_calls]
    assert "".join(one.arguments for one in streamed) == call.function.arguments
    assert free.choices[0].text or free.choices[0].tool_calls
    assert set(json.loads(person.choices[0].text)) == {"name", "age"}
