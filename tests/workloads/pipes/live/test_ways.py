"""Ways that break and are there again: a job waits for one where there may be one, and goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest
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

from penstock.testing.aio import run_async
from penstock.workloads.llm.values import Delta, LlmCode, LlmFailure
from penstock.workloads.pipes.node import Node

FIRST, MIDDLE, LAST = ranges(0, 2, 4, 6)
LONG = 200


class Turns(Heard):
    """Has an origin compute a token when the one before it was read, and not long before."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self._turns = threading.Semaphore(1)
        for segment in node._holding.segments:
            segment.process_jobs = partial(self._wait, segment.process_jobs)  # type: ignore[method-assign]

    def _wait(self, compute: Callable[..., None], *args: Any) -> None:
        self._turns.acquire(timeout=0.2)  # a token may be a part of a character
        compute(*args)

    def read(self) -> None:
        self._turns.release()

    def log(self, text: str, level: str = "info") -> None:
        super().log(text, level)
        self._turns.release()  # what was said so far is computed again


async def disturbed(node: Node, after: dict[int, Callable[[], object]]) -> tuple[str, list[str]]:
    """What is said, and what is told beside it, when after so many tokens something is done."""
    text, count, turns = "", 0, Turns(node)
    async with aclosing(node.generate(asked(count=LONG), watch=turns)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Delta):
                text += piece.text
                count += 1
                if count in after:
                    done = after.pop(count)()
                    if asyncio.iscoroutine(done):
                        await done
            turns.read()
    assert not after
    return text, turns.logs


def cut(one: Node, other: Node) -> None:
    """The connection between two breaks, and both find out."""
    connection = one.mesh.peers.get(other.node_id)
    assert connection is not None
    assert connection._transport is not None
    connection._transport.abort()


def nothing_open(network: Network) -> bool:
    records = [node.record for node in network.nodes.values()]
    return not any(record.jobs or record.cache_used for record in records)


@pytest.mark.parametrize("pair", ["ab", "bd"])
@run_async
async def test_when_a_connection_breaks_and_is_there_again_the_same_way_is_gone_on(
    pair: str, small: SmallModel
) -> None:
    async with Network(small, keep=0) as network:
        node = await network.origin(FIRST)
        for name, layers in (("b", MIDDLE), ("d", LAST)):
            await network.add(name, layers)
        await whole(node)
        one, other = (network.nodes[name] for name in pair)
        text, told = await disturbed(node, {3: lambda: cut(one, other)})
        assert text == small.text(PROMPT, LONG)
        assert told
        await until(lambda: nothing_open(network), node)


@run_async
async def test_a_job_outlives_both_copies_of_its_layers_if_they_are_started_anew_in_turn(
    small: SmallModel,
) -> None:
    async with Network(small, drain=0.0) as network:
        node = await network.origin(FIRST)
        await network.add("b", *ranges(2, 6))

        async def other(comes: str, goes: str) -> None:
            await network.add(comes, *ranges(2, 6))
            await until(lambda: node.knows(comes), node)
            await network.nodes[goes].stop()

        await whole(node)
        turns = [("c", "b"), ("b", "c"), ("c", "b"), ("b", "c"), ("c", "b"), ("b", "c")]
        after = {3 + 5 * n: lambda turn=turn: other(*turn) for n, turn in enumerate(turns)}
        text, told = await disturbed(node, after)
        assert text == small.text(PROMPT, LONG)
        # It may have moved on already when a copy stops; but both were lost under it.
        assert {"b", "c"} <= {line.split()[2] for line in told}


@run_async
async def test_an_answer_goes_on_when_the_network_has_given_lost_layers_to_another(
    small: SmallModel,
) -> None:
    async with Network(small, drain=0.0, keep=0) as network:
        node = await network.origin(FIRST)
        await network.add("b", None)
        await network.add("c", None)
        await until(lambda: len(node.records()) == 3, node)
        route = await whole(node)
        lost = next(hop.node_id for hop in reversed(route.hops) if hop.node_id != "a")
        text, told = await disturbed(node, {3: network.nodes[lost].stop})
        assert text == small.text(PROMPT, LONG)
        assert told


@run_async
async def test_a_job_that_has_said_nothing_waits_for_the_next_node_when_its_own_is_lost(
    small: SmallModel,
) -> None:
    async with Network(small, drain=0.0, keep=0, max_jobs=1) as network:
        # What waits is to wait for room on the other node, not on the origin.
        node = await network.origin(*ranges(0, 3), max_jobs=8, node_id="z")
        first = await network.add("b", *ranges(3, 6))
        await whole(node)
        heard = Heard()
        async with aclosing(node.generate(asked(count=400))) as pieces:
            await anext(aiter(pieces))
            waiting = asyncio.ensure_future(ask(node, asked(), watch=heard))
            while "waits for room on b" not in "".join(heard.notes):
                await heard.news.wait()
                heard.news.clear()
            await first.stop()
            with pytest.raises(LlmFailure) as failed:
                async for _ in pieces:
                    pass
            assert failed.value.code is LlmCode.NODE_LOST
        while "no node can compute layers 3-5" not in "".join(heard.notes):
            await heard.news.wait()
            heard.news.clear()
        await network.add("c", *ranges(3, 6))
        assert (await waiting).choices[0].text == small.text(PROMPT, 12)


@run_async
async def test_two_that_never_reach_each_other_end_a_job_with_that_reason(
    small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Network(small) as network:
        node = await network.origin(FIRST)
        for name, layers in (("b", MIDDLE), ("d", LAST)):
            await network.add(name, layers)
        await whole(node)
        mesh = network.nodes["b"].mesh
        send = mesh.send
        monkeypatch.setattr(mesh, "send", lambda to, *frame: to != "d" and send(to, *frame))
        with pytest.raises(LlmFailure) as failed:
            await ask(node, asked())
        assert failed.value.code is LlmCode.NODE_LOST
        assert "d can't be reached from b" in failed.value.message
        assert node.record.jobs == 0
