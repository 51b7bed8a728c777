"""What was found by looking for it: each test failed before what it tells of was mended."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from tests.pipes.networks import Network, SmallModel, ask, asked, ranges, whole
from tests.pipes.test_losses import spoil

from penstock.core.llm import LlmCode, LlmFailure
from penstock.testing.aio import run_async

# -- frames -----------------------------------------------------------------------------------


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


# -- requests that hang -----------------------------------------------------------------------


@run_async
async def test_an_origin_that_is_stuck_itself_answers_by_the_deadline(small: SmallModel) -> None:
    async with Network(small, step_timeout=0.5) as network:
        node = await network.split(0, 3, 6)
        going_on = threading.Event()
        spoil(node, lambda _: going_on.wait() and None)
        try:
            with pytest.raises(LlmFailure) as failed:
                await asyncio.wait_for(ask(node, asked()), 10)
        finally:
            going_on.set()
        assert failed.value.code is LlmCode.NODE_STALLED
        assert "a itself is stuck" in failed.value.message
