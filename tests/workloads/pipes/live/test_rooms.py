"""Caches: bounded, given back at once, waited for with a reason, and used again by a next turn."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import Any

import pytest
from msgspec import structs
from tests.support.pipes.networks import (
    PROMPT,
    Heard,
    Network,
    SmallModel,
    ask,
    asked,
    ranges,
    until,
    whole,
)
from tests.workloads.pipes.live.test_losses import FIRST, LAST, MIDDLE, note_layers, with_copies

from penstock.testing.aio import run_async
from penstock.workloads.llm.values import Delta, LlmCode, LlmFailure, LlmResult
from penstock.workloads.pipes import node as nodes
from penstock.workloads.pipes import origin
from penstock.workloads.pipes.node import Node
from penstock.workloads.pipes.wire.messages import Open

BLOCK = 64 * 3 * 2 * 2 * 8 * 4
"""Bytes of 64 tokens in three layers of the small model."""


def used(network: Network) -> dict[str, int]:
    return {name: node.record.cache_used for name, node in network.nodes.items()}


def nothing(network: Network) -> dict[str, int]:
    return dict.fromkeys(network.nodes, 0)


def open_jobs(network: Network) -> int:
    return sum(node.record.jobs for node in network.nodes.values())


@pytest.mark.seed("000", "17.11", "18.8")
@run_async
async def test_after_the_end_no_cache_is_in_use_and_no_job_is_open(small: SmallModel) -> None:
    async with Network(small, keep=0) as network:
        node = await network.split(0, 2, 4, 6)
        await ask(node, asked())
        await until(lambda: used(network) == nothing(network), node)
        assert open_jobs(network) == 0
        assert all(one.record.cache_kept == 0 for one in network.nodes.values())


@run_async
async def test_a_caller_who_leaves_frees_every_cache(small: SmallModel) -> None:
    async with Network(small) as network:
        node = await network.split(0, 3, 6)
        async with aclosing(node.generate(asked(count=400))) as pieces:
            await anext(aiter(pieces))
            assert min(used(network).values()) > 0
        await until(lambda: used(network) == nothing(network), node)
        assert open_jobs(network) == 0
        result = await ask(node, asked())
        assert result.choices[0].text == small.text(PROMPT, 12)


@pytest.mark.seed("000", "18.8")
@run_async
async def test_a_next_turn_computes_only_what_is_new(small: SmallModel) -> None:
    async with Network(small) as network:
        node = await network.split(0, 3, 6)
        first = await ask(node, asked(count=10))
        turn = (*PROMPT, *small.generated(PROMPT, 10), 170, 171, 172)
        second = await ask(node, asked(turn, 10))
        assert first.usage.cached_tokens == 0
        assert second.usage.cached_tokens == len(PROMPT) + 9
        assert second.choices[0].text == small.text(turn, 10)


@run_async
async def test_a_turn_that_begins_otherwise_uses_what_is_the_same(small: SmallModel) -> None:
    async with Network(small) as network:
        node = await network.split(0, 3, 6)
        await ask(node, asked(count=10))
        turn = (*PROMPT[:30], 180, 181, 182)
        result = await ask(node, asked(turn, 10))
        assert result.usage.cached_tokens == 30
        assert result.choices[0].text == small.text(turn, 10)


@run_async
async def test_a_kept_cache_that_a_node_gave_up_is_computed_again(small: SmallModel) -> None:
    async with Network(small) as network:
        node = await network.split(0, 3, 6)
        await ask(node, asked(count=10))
        other = network.nodes["b"]
        await until(lambda: other.record.cache_kept > 0, other)
        other._pool.forget(float("inf"))
        result = await ask(node, asked(count=10))
        assert result.usage.cached_tokens == 0
        assert result.choices[0].text == small.text(PROMPT, 10)


@pytest.mark.seed("000", "17.11")
@run_async
async def test_without_room_a_job_waits_with_a_reason_and_then_runs(small: SmallModel) -> None:
    async with Network(small, cache=BLOCK, keep=0) as network:
        node = await network.split(0, 3, 6)
        heard = Heard()
        async with aclosing(node.generate(asked(count=20))) as pieces:
            await anext(aiter(pieces))
            waiting = asyncio.ensure_future(ask(node, asked(count=12), watch=heard))
            while not heard.notes:
                await heard.news.wait()
            assert "waits for room on a" in heard.notes[0]
            assert not waiting.done()
        result = await waiting
        assert result.choices[0].text == small.text(PROMPT, 12)


async def preferring_b(
    network: Network, monkeypatch: pytest.MonkeyPatch, **more: dict[str, Any]
) -> Node:
    """`b` and `c` have copies of the middle, and every job would go over `b`."""
    monkeypatch.setattr(nodes, "loads", lambda _: {"c": 100.0})
    node = await network.origin(FIRST)
    for name, layers in (("b", MIDDLE), ("c", MIDDLE), ("d", LAST)):
        await network.add(name, layers, **more.get(name, {}))
    await until(lambda: len(node.records()) == 4, node)
    route = await whole(node)
    assert [hop.node_id for hop in route.hops] == ["a", "b", "d"]
    return node


def nodes_of(result: LlmResult) -> set[str]:
    return {hop.node for hop in result.hops}


@run_async
async def test_a_full_node_is_passed_over_where_a_copy_of_its_layers_is_free(
    small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Network(small, keep=0) as network:
        node = await preferring_b(network, monkeypatch, b={"max_jobs": 1})
        heard = Heard()
        async with aclosing(node.generate(asked(count=400))) as pieces:
            await anext(aiter(pieces))
            result = await ask(node, asked(), watch=heard)
            assert network.nodes["b"].record.jobs == 1
        assert result.choices[0].text == small.text(PROMPT, 12)
        assert nodes_of(result) == {"a", "c", "d"}
        assert not heard.logs
        assert not [note for note in heard.notes if "waits" in note]
        await until(lambda: used(network) == nothing(network), node)
        assert open_jobs(network) == 0
        assert nodes_of(await ask(node, asked())) == {"a", "b", "d"}


@run_async
async def test_a_node_whose_cache_is_too_small_for_the_job_is_passed_over_too(
    small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Network(small, keep=0) as network:
        node = await preferring_b(network, monkeypatch, b={"cache": 1})
        result = await ask(node, asked())
        assert result.choices[0].text == small.text(PROMPT, 12)
        assert nodes_of(result) == {"a", "c", "d"}


@run_async
async def test_with_every_copy_full_a_job_waits_with_a_reason_and_then_runs(
    small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Network(small, keep=0) as network:
        full = {"max_jobs": 1}
        node = await preferring_b(network, monkeypatch, b=full, c=full)
        heard = Heard()
        async with aclosing(node.generate(asked(count=400))) as first:
            await anext(aiter(first))
            async with aclosing(node.generate(asked(count=400))) as second:
                await anext(aiter(second))
                waiting = asyncio.ensure_future(ask(node, asked(), watch=heard))
                while not heard.notes:
                    await heard.news.wait()
                assert "waits for room on c" in heard.notes[0]
                assert not waiting.done()
            result = await waiting
        assert result.choices[0].text == small.text(PROMPT, 12)
        assert nodes_of(result) == {"a", "c", "d"}


@run_async
async def test_a_next_turn_past_a_full_node_computes_only_that_nodes_layers_again(
    small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Network(small, speculation=False) as network:
        node = await preferring_b(network, monkeypatch)
        await ask(node, asked(count=10))
        b = network.nodes["b"]._admission
        b._config = structs.replace(b._config, max_jobs=0)
        layers: list[tuple[int, int, int]] = []
        for one in network.nodes.values():
            note_layers(one, layers)
        turn = (*PROMPT, *small.generated(PROMPT, 10), 170, 171, 172)
        result = await ask(node, asked(turn, 10))
        assert result.choices[0].text == small.text(turn, 10)
        assert nodes_of(result) == {"a", "c", "d"}
        computed = [sum(n for first, end, n in layers if first <= at < end) for at in range(6)]
        whole_turn, cached = len(turn) + 9, len(PROMPT) + 9
        assert computed == [whole_turn - cached] * 2 + [whole_turn] * 2 + [whole_turn - cached] * 2


@run_async
async def test_an_answer_that_needs_more_room_than_its_node_has_goes_on_over_a_copy(
    small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "UNSAID", 8)
    async with Network(small, context=128) as network:
        # 64 tokens in two layers, and no more.
        node = await preferring_b(network, monkeypatch, b={"cache": BLOCK * 2 // 3})
        heard, told = Heard(), list[Delta]()
        result = await ask(node, asked(count=None), told, watch=heard)
        assert result.choices[0].text == small.text(PROMPT, 88)
        assert "".join(piece.text for piece in told) == result.choices[0].text
        assert nodes_of(result) == {"a", "b", "c", "d"}
        assert not heard.logs


@run_async
async def test_many_jobs_share_a_small_cache_and_none_is_lost(small: SmallModel) -> None:
    async with Network(small, cache=2 * BLOCK, keep=1.0, open_timeout=50.0) as network:
        node = await network.split(0, 2, 4, 6)
        prompts = [tuple(range(50 + n, 70 + n)) for n in range(12)]
        results = await asyncio.gather(*(ask(node, asked(prompt, 8)) for prompt in prompts))
        texts = [result.choices[0].text for result in results]
        assert texts == [small.text(prompt, 8) for prompt in prompts]


@pytest.mark.seed("000", "18.3")
@run_async
async def test_a_job_that_waits_too_long_for_room_is_told_so(small: SmallModel) -> None:
    async with Network(small, cache=7 * BLOCK, keep=0, open_timeout=0.3) as network:
        node = await network.split(0, 3, 6)
        async with aclosing(node.generate(asked(count=400))) as pieces:
            await anext(aiter(pieces))
            with pytest.raises(LlmFailure) as failed:
                await ask(node, asked())
        assert failed.value.code is LlmCode.NO_ROOM
        assert "a is full" in failed.value.message


@pytest.mark.seed("000", "17.1")
@run_async
async def test_more_than_may_wait_are_refused_at_once(small: SmallModel) -> None:
    async with Network(small, max_jobs=1, max_waiting=1, keep=0) as network:
        node = await network.split(0, 3, 6)
        heard = Heard()
        async with aclosing(node.generate(asked(count=300))) as pieces:
            await anext(aiter(pieces))
            waiting = asyncio.ensure_future(ask(node, asked(), watch=heard))
            while not heard.notes:
                await heard.news.wait()
            with pytest.raises(LlmFailure) as failed:
                await ask(node, asked())
        assert failed.value.code is LlmCode.NO_ROOM
        assert (await waiting).choices[0].text == small.text(PROMPT, 12)


@run_async
async def test_a_job_that_no_cache_could_ever_hold_is_refused(small: SmallModel) -> None:
    async with Network(small, cache=BLOCK) as network:
        node = await network.split(0, 6)
        with pytest.raises(LlmFailure) as failed:
            await ask(node, asked(count=400))
        assert failed.value.code is LlmCode.NO_ROOM


@run_async
async def test_a_prompt_that_is_too_long_says_both_numbers(small: SmallModel) -> None:
    async with Network(small, context=64) as network:
        node = await network.split(0, 3, 6)
        with pytest.raises(LlmFailure) as failed:
            await ask(node, asked([40] * 64))
        assert failed.value.code is LlmCode.CONTEXT_EXCEEDED
        assert failed.value.facts == {"prompt_tokens": 64, "context": 64}
        assert open_jobs(network) == 0


@pytest.mark.seed("000", "15.9")
@run_async
async def test_an_answer_ends_where_the_context_ends(small: SmallModel) -> None:
    async with Network(small, context=64) as network:
        node = await network.split(0, 3, 6)
        result = await ask(node, asked(PROMPT, 500))
        assert result.usage.completion_tokens == 64 - len(PROMPT)
        assert result.choices[0].finish_reason == "length"


@run_async
async def test_an_answer_of_no_given_length_does_not_take_the_whole_context(
    small: SmallModel,
) -> None:
    async with Network(small, context=1024) as network:
        node = await network.split(0, 3, 6)
        async with aclosing(node.generate(asked(count=None))) as pieces:
            await anext(aiter(pieces))
            assert 0 < max(used(network).values()) < 16 * BLOCK


@run_async
async def test_an_answer_of_no_given_length_gets_more_room_when_it_needs_it(
    small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "UNSAID", 8)
    async with Network(small, context=128, keep=0) as network:
        node = await network.split(0, 3, 6)
        told: list[Delta] = []
        result = await ask(node, asked(count=None), told)
        assert result.choices[0].text == small.text(PROMPT, 88)
        assert "".join(piece.text for piece in told) == result.choices[0].text
        assert result.choices[0].finish_reason == "length"
        assert {hop.passes for hop in result.hops} == {88}
        await until(lambda: used(network) == nothing(network), node)


@run_async
async def test_an_answer_that_gets_no_more_room_ends_there_and_says_so(
    small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(origin, "UNSAID", 8)
    async with Network(small, keep=0, open_timeout=0.3) as network:
        node = await network.origin(*ranges(0, 3))
        await network.add("b", *ranges(3, 6), cache=2 * BLOCK)
        await whole(node)
        heard = Heard()
        async with aclosing(node.generate(asked(count=20))) as pieces:
            await anext(aiter(pieces))
            result = await ask(node, asked(count=None), watch=heard)
        assert result.choices[0].finish_reason == "length"
        assert result.choices[0].text == small.text(PROMPT, 16)
        assert "the answer ends here: b is full" in heard.logs[-1]


@run_async
async def test_an_answer_of_no_given_length_fits_into_the_smallest_context_of_its_nodes(
    small: SmallModel,
) -> None:
    async with Network(small) as network:
        node = await network.origin(*ranges(0, 3), context=512)
        await network.add("b", *ranges(3, 6), context=64)
        await whole(node)
        result = await ask(node, asked(count=None))
        assert result.choices[0].text == small.text(PROMPT, 64 - len(PROMPT))
        assert result.choices[0].finish_reason == "length"


@run_async
async def test_time_that_a_job_waited_for_one_node_counts_for_the_next(small: SmallModel) -> None:
    async with Network(small, keep=0, open_timeout=30.0) as network:
        node = await network.origin(*ranges(0, 3), cache=BLOCK)
        b = await network.add("b", *ranges(3, 6))
        await whole(node)
        opened, left, heard = b._admission.open, list[float](), Heard()

        def seen(sender: str, message: Open) -> None:
            left.append(message.deadline)
            opened(sender, message)

        b._admission.open = seen  # type: ignore[method-assign]
        async with aclosing(node.generate(asked(count=20))) as pieces:
            await anext(aiter(pieces))
            waiting = asyncio.ensure_future(ask(node, asked(), watch=heard))
            while not heard.notes:
                await heard.news.wait()
            assert "waits for room on a" in heard.notes[0]
            began = time.monotonic()
            await node.changed(0.1)
            waited = time.monotonic() - began
        await waiting
        assert left[1] <= 30.0 - waited


@run_async
async def test_the_loss_of_an_origin_frees_its_jobs_on_the_others(small: SmallModel) -> None:
    async with Network(small, silence=2.0) as network:
        node = await network.split(0, 3, 6)
        other: Node = network.nodes["b"]
        pieces = node.generate(asked(count=400))
        await anext(aiter(pieces))
        assert other.record.jobs == 1
        await node.mesh.stop("gone")
        await until(lambda: other.record.jobs == 0 and other.record.cache_used == 0, other)
        await pieces.aclose()


@run_async
async def test_of_many_kept_caches_one_way_that_is_cut_is_tried_once(small: SmallModel) -> None:
    async with Network(small) as network:
        node = await with_copies(network)
        for n in range(6):  # each leaves a cache that the next turn could go on from
            first = await ask(node, asked((*PROMPT, 200 + n), 2))
        [middle] = {hop.node for hop in first.hops} & {"b", "c"}
        reached = network.nodes[middle].mesh.send

        def unreached(to: str, *what: Any) -> bool:
            return to != "d" and reached(to, *what)

        network.nodes[middle].mesh.send = unreached  # type: ignore[method-assign, assignment]
        result = await ask(node, asked((*PROMPT, 300), 4))
        assert result.choices[0].text == small.text((*PROMPT, 300), 4)
        assert middle not in {hop.node for hop in result.hops}
