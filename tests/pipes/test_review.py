"""What was found by looking for it: each test failed before what it tells of was mended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.pipes.networks import (
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
from tests.pipes.test_losses import spoil, with_copies
from tests.pipes.test_rooms import BLOCK

from penstock.core.llm import LlmCode, LlmFailure, LlmResult, Piece
from penstock.testing.aio import run_async
from penstock.workloads.pipes.job import Job
from penstock.workloads.pipes.node import Node

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

        def wait(job: Job) -> None:
            going_on.wait()

        spoil(node, wait)
        try:
            with pytest.raises(LlmFailure) as failed:
                await asyncio.wait_for(ask(node, asked()), 10)
        finally:
            going_on.set()
        assert failed.value.code is LlmCode.NODE_STALLED
        assert "a itself is stuck" in failed.value.message


@run_async
async def test_deadlines_are_looked_at_even_after_a_look_that_failed(small: SmallModel) -> None:
    async with Network(small, step_timeout=0.5) as network:
        node = await network.split(0, 3, 6)
        failed_once, going_on = asyncio.Event(), threading.Event()
        publish = node.mesh.publish

        def fail_once(record: Any) -> None:
            if failed_once.is_set():
                publish(record)
            else:
                failed_once.set()
                raise ValueError("a record that nobody takes")

        def wait(job: Job) -> None:
            going_on.wait()

        node.mesh.publish = fail_once  # type: ignore[method-assign]
        await failed_once.wait()
        spoil(network.nodes["b"], wait)
        try:
            with pytest.raises(LlmFailure) as failed:
                await asyncio.wait_for(ask(node, asked()), 10)
        finally:
            going_on.set()
        assert failed.value.code is LlmCode.NODE_STALLED


@asynccontextmanager
async def one_waits(network: Network) -> AsyncIterator[tuple[Node, asyncio.Task[LlmResult]]]:
    """The origin `a`, and an answer of it for which `b` has no room before this ends."""
    node = await network.origin(*ranges(0, 3), cache=64 << 20)
    await network.add("b", *ranges(3, 6), cache=2 * BLOCK)
    await whole(node)
    heard = Heard()
    async with aclosing(node.generate(asked(count=80))) as pieces:
        await anext(aiter(pieces))
        waiting = asyncio.ensure_future(ask(node, asked(), watch=heard))
        while not heard.notes:
            await heard.news.wait()
        assert "waits for room on b" in heard.notes[0]
        yield node, waiting


def cut(node: Node, other: str) -> None:
    """Break the connection, as a network does."""
    connection = node.mesh._membership.peers.get(other)
    assert connection is not None
    assert connection._transport is not None
    connection._transport.abort()


@run_async
async def test_who_waits_for_room_when_the_connection_breaks_asks_anew(small: SmallModel) -> None:
    async with Network(small, keep=0) as network:
        async with one_waits(network) as (node, waiting):
            cut(node, "b")
            await until(lambda: network.nodes["b"].record.jobs == 0, node)
            result = await asyncio.wait_for(waiting, 20)
        assert result.choices[0].text == small.text(PROMPT, 12)


@run_async
async def test_a_spot_check_whose_connection_breaks_is_made_anew(small: SmallModel) -> None:
    async with Network(small, spot_check=1.0) as network:
        node = await network.split(0, 3, 6)
        other = network.nodes["b"]
        received, checks = other._receiver.receive, []

        def lose_the_first(payload: memoryview, sender: str) -> None:
            checks.append(sender)
            if len(checks) > 1:
                received(payload, sender)
            else:
                cut(node, "b")

        other._receiver.receive = lose_the_first  # type: ignore[method-assign]
        result = await asyncio.wait_for(ask(node, asked()), 20)
        assert result.choices[0].text == small.text(PROMPT, 12)


@run_async
async def test_a_watcher_that_raises_disturbs_neither_its_answer_nor_a_connection(
    small: SmallModel,
) -> None:
    class Deaf(Heard):
        def progress(self, fraction: float | None = None, message: str = "") -> None:
            super().progress(fraction, message)
            raise RuntimeError("not now")

    async with Network(small, keep=0) as network:
        async with one_waits(network) as (node, first):
            connection, heard = node.mesh._membership.peers.get("b"), Deaf()
            second = asyncio.ensure_future(ask(node, asked(), watch=heard))
            while not heard.notes:
                await heard.news.wait()
            assert connection is not None
            assert connection.closed is None
        for waiting in (first, second):
            assert (await waiting).choices[0].text == small.text(PROMPT, 12)


@run_async
async def test_who_waits_for_room_is_told_when_the_origin_stops(small: SmallModel) -> None:
    async with Network(small, keep=0, drain=0.0) as network:
        with pytest.raises(LlmFailure) as failed:
            async with one_waits(network) as (node, waiting):
                await node.stop()
                await asyncio.wait_for(waiting, 10)
        assert failed.value.code is LlmCode.END_MODEL_UNAVAILABLE


@run_async
async def test_who_waits_for_a_pipe_is_told_when_the_origin_leaves(small: SmallModel) -> None:
    async with Network(small) as network:
        node, heard = await network.origin(*ranges(0, 3)), Heard()
        waiting = asyncio.ensure_future(ask(node, asked(), watch=heard))
        while not heard.notes:
            await heard.news.wait()
        await node.stop()
        for answer in (waiting, asyncio.ensure_future(ask(node, asked()))):
            with pytest.raises(LlmFailure) as failed:
                await asyncio.wait_for(answer, 10)
            assert failed.value.code is LlmCode.END_MODEL_UNAVAILABLE


# -- kept caches ------------------------------------------------------------------------------


@run_async
async def test_a_next_turn_does_not_go_over_a_node_that_lied_meanwhile(small: SmallModel) -> None:
    async with Network(small) as network:
        node = await with_copies(network)
        assert node.origin is not None
        first = await ask(node, asked(count=10))
        [liar] = {hop.node for hop in first.hops} & {"b", "c"}
        node.origin.distrusted[liar] = "it computes something else"
        turn = (*PROMPT, *small.generated(PROMPT, 10), 170, 171, 172)
        second = await ask(node, asked(turn, 10))
        assert liar not in {hop.node for hop in second.hops}
        assert second.usage.cached_tokens == 0
        assert second.choices[0].text == small.text(turn, 10)


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


# -- layers that move -------------------------------------------------------------------------


@run_async
async def test_who_waits_for_room_goes_where_the_layers_are_then(small: SmallModel) -> None:
    async with Network(small, keep=0) as network:
        async with one_waits(network) as (node, waiting):
            moves, moved = network.nodes["b"], ranges(5, 6)
            await network.add("c", *ranges(3, 5))
            await moves._holding.hold(moved)
            while len((await whole(node)).hops) < 3:
                await node.changed(0.05)
        result = await waiting
        assert result.choices[0].text == small.text(PROMPT, 12)
        assert {(hop.node, hop.layers) for hop in result.hops} >= {("b", "5-5"), ("c", "3-4")}


@run_async
async def test_an_origin_whose_own_layers_moved_while_a_job_waited_finds_another_way(
    small: SmallModel,
) -> None:
    async with Network(small, keep=0) as network:
        node = await network.origin(*ranges(0, 3), node_id="z", cache=64 << 20)
        await network.add("b", *ranges(3, 6), cache=2 * BLOCK)
        await whole(node)
        heard = Heard()
        async with aclosing(node.generate(asked(count=80))) as pieces:
            await anext(aiter(pieces))
            waiting = asyncio.ensure_future(ask(node, asked(), watch=heard))
            while not heard.notes:
                await heard.news.wait()
            await network.add("c", *ranges(1, 3))
            await until(lambda: len(node.records()) == 3, node)
            await node._holding.hold(ranges(0, 1))
        result = await waiting
        assert result.choices[0].text == small.text(PROMPT, 12)


@run_async
async def test_running_answers_keep_the_layers_that_they_began_with(small: SmallModel) -> None:
    async with Network(small, keep=0) as network:
        node = await network.split(0, 3, 6)
        text = ""
        async for piece in node.generate(asked(count=30)):
            if isinstance(piece, Piece):
                text += piece.text
                await network.nodes["b"]._holding.hold(ranges(len(text) % 3, 6))
        assert text == small.text(PROMPT, 30)


@run_async
async def test_a_node_that_can_not_read_its_layers_is_planned_without(small: SmallModel) -> None:
    async with Network(small) as network:
        node = await network.add("b", None)

        def unread(number: int) -> Any:
            raise OSError("the disk is gone")

        node._source.layer = unread  # type: ignore[method-assign, assignment]
        origin = await network.origin(None)
        await until(lambda: node.record.unfit, node)
        assert "the disk is gone" in node.record.unfit
        result = await ask(origin, asked())
        assert result.choices[0].text == small.text(PROMPT, 12)
