"""A model that is split says what the whole one says."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.support.pipes.networks import (
    LAYERS,
    PROMPT,
    Network,
    SmallModel,
    ask,
    asked,
    ranges,
    whole,
)

from penstock.testing.aio import run_async
from penstock.workloads.llm.values import ChatRequest, Delta, LlmFailure, Message, Sampling

CUTS = {1: (0, 6), 2: (0, 3, 6), 3: (0, 2, 4, 6), 5: (0, 1, 2, 4, 5, 6)}


@pytest.mark.seed("000", "1.4", "4.1", "5.1", "10.4", "18.9")
@pytest.mark.parametrize("nodes", CUTS)
@pytest.mark.parametrize("chunk", [256, 7])
def test_greedy_text_is_that_of_transformers(small: SmallModel, nodes: int, chunk: int) -> None:
    @run_async
    async def run() -> None:
        async with Network(small, prefill_chunk_size=chunk) as network:
            node = await network.split(*CUTS[nodes])
            result = await ask(node, asked())
            assert result.choices[0].text == small.text(PROMPT, 12)
            assert {hop.node for hop in result.hops} == set(network.nodes)

    run()


@pytest.mark.seed("000", "17.7")
@run_async
async def test_jobs_that_are_computed_together_say_what_each_says_alone(small: SmallModel) -> None:
    prompts = [tuple(range(50 + n, 70 + 5 * n)) for n in range(8)]
    async with Network(small, prefill_chunk_size=16) as network:
        node = await network.split(0, 2, 4, 6)
        results = await asyncio.gather(*(ask(node, asked(prompt, 10)) for prompt in prompts))
        for prompt, result in zip(prompts, results, strict=True):
            assert result.choices[0].text == small.text(prompt, 10)


@run_async
async def test_others_go_on_while_a_huge_prompt_is_read(small: SmallModel) -> None:
    async with Network(small) as network:
        node = await network.split(0, 6)
        huge = ChatRequest(messages=(Message(role="user", content="ab c" * 400_000),))
        reading, turns = asyncio.ensure_future(ask(node, huge)), 0
        while not reading.done():
            turns += 1
            await asyncio.sleep(0.001)
        with pytest.raises(LlmFailure, match="CONTEXT_EXCEEDED"):
            await reading
        assert turns > 20


@pytest.mark.seed("000", "5.8")
@run_async
async def test_pieces_together_are_the_answer(small: SmallModel) -> None:
    async with Network(small) as network:
        node = await network.split(0, 3, 6)
        told: list[Delta] = []
        result = await ask(node, asked(count=30), told)
        assert "".join(piece.text for piece in told) == result.choices[0].text
        assert result.choices[0].finish_reason == "length"
        assert result.usage.completion_tokens == 30


@pytest.mark.seed("000", "10.6")
@run_async
async def test_the_same_seed_gives_the_same_text_whatever_runs_beside_it(small: SmallModel) -> None:
    hot = Sampling(temperature=1.5, seed=11)
    async with Network(small, keep=0) as network:
        node = await network.split(0, 3, 6)
        alone = await ask(node, asked(count=20, sampling=hot))
        beside, *_ = await asyncio.gather(
            ask(node, asked(count=20, sampling=hot)),
            *(ask(node, asked(range(60 + n, 80), 15)) for n in range(4)),
        )
        other = await ask(node, asked(count=20, sampling=Sampling(temperature=1.5, seed=12)))
        assert beside.choices[0].text == alone.choices[0].text != other.choices[0].text


@run_async
async def test_the_first_layers_never_leave_the_origin(small: SmallModel) -> None:
    async with Network(small, local_layers=2) as network:
        node = await network.origin()
        await network.add("b", *ranges(0, LAYERS))
        await whole(node)
        result = await ask(node, asked())
        assert [(hop.node, hop.layers) for hop in result.hops] == [
            ("a", "ends"),
            ("a", "0-1"),
            ("b", f"2-{LAYERS - 1}"),
        ]


@run_async
async def test_many_prompts_that_leave_at_once_are_more_than_one_frame(tmp_path: Path) -> None:
    wide = SmallModel.made(tmp_path / "wide", hidden_size=256, num_hidden_layers=1)
    async with Network(wide, step_timeout=5.0, local_layers=0, pass_tokens=64) as network:
        node = await network.origin()
        await network.add("b", *ranges(0, 1))
        await whole(node)
        prompts = [tuple(range(40 + n, 240 + n)) for n in range(8)]
        results = await asyncio.gather(*(ask(node, asked(prompt, 1)) for prompt in prompts))
        texts = [result.choices[0].text for result in results]
        assert texts == [wide.text(prompt, 1) for prompt in prompts]


@run_async
async def test_a_chunk_may_be_larger_than_a_pass_and_than_what_others_send(tmp_path: Path) -> None:
    wide = SmallModel.made(tmp_path / "wide", hidden_size=1024, num_hidden_layers=2)
    async with Network(wide, step_timeout=5.0, pass_tokens=4) as network:
        node = await network.origin(*ranges(0, 1), prefill_chunk_size=400)
        await network.add("b", *ranges(1, 2), prefill_chunk_size=16)
        await whole(node)
        prompt = tuple(range(40, 430))
        result = await ask(node, asked(prompt, 2))
        assert result.choices[0].text == wide.text(prompt, 2)
