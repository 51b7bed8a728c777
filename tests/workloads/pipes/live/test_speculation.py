"""Speculative decoding over nodes: the same text, in fewer round trips."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tests.support.pipes.networks import (
    PROMPT,
    TOKENS,
    Network,
    SmallModel,
    ask,
    asked,
    ranges,
    tokens,
    until,
    whole,
)

from penstock.testing.aio import run_async
from penstock.workloads.llm.values import Delta, LlmResult, Sampling
from penstock.workloads.pipes.text.speculation import Lookup, StepTimes

LONG = 40
CUTS = [(0, 6), (0, 3, 6), (0, 2, 4, 6)]


class Oracle:
    """Proposes what the model will say, but every fifth token is wrong."""

    def __init__(self) -> None:
        self.answers: list[list[int]] = []

    def __call__(self, ids: Sequence[int], most: int) -> list[int]:
        said = list(ids[len(PROMPT) :])
        for answer in self.answers:
            if answer[: len(said)] == said:
                ahead = answer[len(said) : len(said) + most]
                return [t if (len(said) + n) % 5 else 3 for n, t in enumerate(ahead)]
        return []


@pytest.fixture
def oracle(monkeypatch: pytest.MonkeyPatch) -> Oracle:
    """Over links so slow that all steps take the same."""
    made = Oracle()
    monkeypatch.setattr(StepTimes, "of", lambda *_: 1.0)
    monkeypatch.setattr(Lookup, "__call__", lambda _, ids, most: made(ids, most))
    return made


def passes(result: LlmResult) -> int:
    """Of the head: one for each round trip."""
    return next(hop.passes for hop in result.hops if hop.layers == "ends")


def ids_of(result: LlmResult) -> list[int]:
    return [TOKENS.index(token) for token in tokens(result)]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@run_async
async def test_greedy_answers_are_those_of_transformers_in_fewer_round_trips(
    small: SmallModel, oracle: Oracle, cuts: tuple[int, ...]
) -> None:
    oracle.answers = [small.generated(PROMPT, LONG)]
    async with Network(small) as network:
        node = await network.split(*cuts)
        result = await ask(node, asked(count=LONG))
    assert result.choices[0].text == small.text(PROMPT, LONG)
    assert result.usage.completion_tokens == LONG
    assert passes(result) < LONG / 2


@pytest.mark.parametrize(
    "more",
    [
        {"sampling": Sampling(temperature=1.5, seed=7)},
        {"sampling": Sampling(temperature=0, repeat_penalty=1.3)},
        {"grammar": "root ::= [a-m]*"},
    ],
    ids=["sampled", "penalised", "grammar"],
)
@run_async
async def test_an_answer_is_the_same_with_and_without(
    small: SmallModel, oracle: Oracle, more: dict[str, Any]
) -> None:
    async with Network(small) as network:
        node = await network.split(0, 3, 6)
        plain = await ask(node, asked(count=LONG, **more))
        oracle.answers = [ids_of(plain)]
        fast = await ask(node, asked(count=LONG, **more))
    assert fast.choices[0].text == plain.choices[0].text
    assert tokens(fast) == tokens(plain)
    assert passes(fast) < passes(plain)


@run_async
async def test_a_stop_string_among_accepted_tokens_ends_the_answer_there(
    small: SmallModel, oracle: Oracle
) -> None:
    oracle.answers = [small.generated(PROMPT, LONG)]
    text = small.text(PROMPT, LONG)
    stop = text[14:18]
    async with Network(small) as network:
        node = await network.split(0, 3, 6)
        result = await ask(node, asked(count=LONG, stop=(stop,)))
        again = await ask(node, asked(count=LONG))  # from the cache that the first one left
    assert result.choices[0].text == text[: text.index(stop)]
    assert result.choices[0].finish_reason == "stop"
    assert again.choices[0].text == text


@run_async
async def test_jobs_together_speculate_each_for_itself(small: SmallModel, oracle: Oracle) -> None:
    prompts = [PROMPT, (*PROMPT[:-1], 81), (*PROMPT[:-1], 82)]
    oracle.answers = [small.generated(prompt, LONG) for prompt in prompts]
    async with Network(small) as network:
        node = await network.split(0, 2, 4, 6)
        results = await asyncio.gather(*(ask(node, asked(one, LONG)) for one in prompts))
    for prompt, result in zip(prompts, results, strict=True):
        assert result.choices[0].text == small.text(prompt, LONG)
        assert passes(result) < LONG


@run_async
async def test_a_node_that_is_lost_between_two_steps_changes_no_token(
    small: SmallModel, oracle: Oracle
) -> None:
    oracle.answers = [small.generated(PROMPT, LONG)]
    first, middle, last = ranges(0, 2, 4, 6)
    async with Network(small, drain=0.0) as network:
        node = await network.origin(first)
        for name, layers in (("b", middle), ("c", middle), ("d", last)):
            await network.add(name, layers)
        await whole(node)
        await until(lambda: len(node.records()) == 4, node)
        text, count = "", 0
        async for piece in node.generate(asked(count=LONG)):
            if isinstance(piece, Delta):
                text += piece.text
                count += 1
                if count == 7:
                    assert node.origin is not None
                    [generation] = node.origin._generations.values()
                    await network.nodes[min(generation.nodes & {"b", "c"})].stop()
        assert text == small.text(PROMPT, LONG)


@run_async
async def test_it_can_be_switched_off(small: SmallModel, oracle: Oracle) -> None:
    oracle.answers = [small.generated(PROMPT, LONG)]
    async with Network(small, speculation=False) as network:
        node = await network.split(0, 3, 6)
        result = await ask(node, asked(count=LONG))
    assert passes(result) == LONG
