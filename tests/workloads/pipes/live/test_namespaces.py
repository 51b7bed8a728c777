"""Hosts with real networks between them: slow, lossy, and cut for a while."""

from __future__ import annotations

import asyncio

import pytest
from tests.conftest import needs_namespaces
from tests.support.chaos.pipes_network import Asked, NodeProcess
from tests.support.chaos.pipes_nodes import Ended, Lost
from tests.support.pipes.hosts import Hosts, Wire
from tests.support.pipes.networks import PROMPT, SmallModel, ranges

from penstock.testing.aio import run_async

pytestmark = pytest.mark.timeout(120)

FIRST, MIDDLE, LAST = ranges(0, 2, 4, 6)
COUNT = 40


@pytest.fixture(autouse=True)
def _namespaces() -> None:
    needs_namespaces()


async def nodes(network: Hosts, copies: str = "") -> NodeProcess:
    """`a` with the text, `b` with the middle and `d` with the end; `c` and `e` are their copies."""
    origin = await network.origin(FIRST)
    for name, layers in (("b", MIDDLE), ("c", MIDDLE), ("d", LAST), ("e", LAST)):
        if name in "bd" + copies:
            await network.add(name, layers)
    await origin.until(lambda now: now.whole and len(now.nodes) == 3 + len(copies))
    return origin


async def begun(origin: NodeProcess) -> Asked:
    asked = origin.ask(PROMPT, COUNT)
    await origin.wrote(asked, 3)
    return asked


async def check(origin: NodeProcess, asked: Asked, model: SmallModel) -> Ended:
    end = await origin.ended(asked)
    assert isinstance(end, Ended), end
    assert end.text == asked.text == model.text(PROMPT, COUNT)
    assert asked.tokens == COUNT
    return end


@run_async
async def test_over_slow_and_lossy_networks_an_answer_is_the_same(
    small: SmallModel, pipe_nursery: str
) -> None:
    wire = Wire(delay=0.02, loss=0.02)
    async with Hosts(pipe_nursery, small.folder, wire, prefill_chunk_size=8) as network:
        origin = await nodes(network)
        asked = [origin.ask(PROMPT, COUNT) for _ in range(3)]
        for one in asked:
            await check(origin, one, small)
            assert not one.heard
        assert wire.dropped
        await network.free()


@run_async
async def test_a_cut_that_is_shorter_than_the_silence_is_only_waited_for(
    small: SmallModel, pipe_nursery: str
) -> None:
    async with Hosts(pipe_nursery, small.folder, Wire(delay=0.005)) as network:
        origin = await nodes(network)
        asked = await begun(origin)
        network.cut("a", "b")
        network.cut("b", "d")
        await asyncio.sleep(2.0)
        assert not asked.ends
        network.wire.mend()
        await check(origin, asked, small)
        assert not asked.heard
        for node in network.nodes.values():
            assert not [event for event in node.events if isinstance(event, Lost)]


@run_async
async def test_behind_a_cut_that_is_longer_the_copy_goes_on_and_the_node_is_back_after_it(
    small: SmallModel, pipe_nursery: str
) -> None:
    async with Hosts(pipe_nursery, small.folder, Wire(delay=0.005), silence=2.0) as network:
        origin = await nodes(network, "c")
        asked = await begun(origin)
        [used] = [name for name in "bc" if (await network.nodes[name].now()).jobs]
        for other in "abcd":
            network.cut(used, other)
        end = await check(origin, asked, small)
        assert used not in end.nodes
        assert "silent" in asked.heard[0]
        lost = await network.nodes[used].said(Lost, lambda lost: lost.node_id == "a")
        assert "silent" in lost.reason
        network.wire.mend()
        await origin.until(lambda now: len(now.nodes) == 4)
        await network.free()
        await check(origin, origin.ask(PROMPT, COUNT), small)


@run_async
async def test_a_cut_between_two_others_is_gone_around_though_the_origin_sees_both(
    small: SmallModel, pipe_nursery: str
) -> None:
    async with Hosts(pipe_nursery, small.folder, Wire(delay=0.005), silence=2.0) as network:
        origin = await nodes(network, "e")
        asked = await begun(origin)
        [used] = [name for name in "de" if (await network.nodes[name].now()).jobs]
        network.cut("b", used)
        end = await check(origin, asked, small)
        assert {"b", used} - {*end.nodes} == {used}
        assert not [event for event in origin.events if isinstance(event, Lost)]
        # The next ones know, as soon as b has told the others.
        for _ in range(5):
            again = origin.ask(PROMPT, COUNT)
            await check(origin, again, small)
            if not again.heard:
                break
        assert not again.heard
        await network.free()


@run_async
async def test_steps_that_come_after_the_job_went_another_way_are_refused_and_counted(
    small: SmallModel, pipe_nursery: str
) -> None:
    settings = {"silence": 60.0, "step_timeout": 1.5}
    async with Hosts(pipe_nursery, small.folder, Wire(delay=0.005), **settings) as network:
        origin = await nodes(network, "c")
        asked = await begun(origin)
        [used] = [name for name in "bc" if (await network.nodes[name].now()).jobs]
        network.cut(used, "d")
        await check(origin, asked, small)
        assert "no step came back" in asked.heard[0]
        last = network.nodes["d"]
        before = (await last.now()).refused.get("unknown_job", 0)
        network.wire.mend()
        await last.until(lambda now: now.refused.get("unknown_job", 0) > before)
        assert len(asked.ends) == 1
        await network.free()
