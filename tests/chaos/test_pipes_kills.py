"""Nodes of a pipe that are killed, stopped or started anew in the middle of an answer."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from tests.support.chaos.pipes_network import Asked, NodeProcess, Processes
from tests.support.chaos.pipes_nodes import Ended, Failed, Lost
from tests.support.pipes.networks import PROMPT, SmallModel, ranges

from penstock.testing.aio import run_async

pytestmark = pytest.mark.timeout(120)

FIRST, MIDDLE, LAST = ranges(0, 2, 4, 6)
LONG = 120
BEGUN = 3


async def with_copies(network: Processes, **more: Any) -> NodeProcess:
    """An origin `a`, `b` and `c` that both have the middle, and `d` with the end."""
    origin = await network.origin(FIRST, **more)
    for name, layers in (("b", MIDDLE), ("c", MIDDLE), ("d", LAST)):
        await network.add(name, layers, **more)
    await origin.until(lambda now: now.whole and len(now.nodes) == 4)
    return origin


async def without_copies(network: Processes, **more: Any) -> NodeProcess:
    origin = await network.origin(FIRST, **more)
    await network.add("b", *ranges(2, 6), **more)
    await origin.until(lambda now: now.whole)
    return origin


async def begun(origin: NodeProcess, count: int = LONG) -> Asked:
    """An answer in its middle."""
    asked = origin.ask(PROMPT, count)
    await origin.wrote(asked, BEGUN)
    return asked


async def used(network: Processes) -> NodeProcess:
    """Which of the two copies has the job."""
    for name in ("b", "c"):
        if (await network.nodes[name].now()).jobs:
            return network.nodes[name]
    raise AssertionError("no copy has the job")


def check_whole(asked: Asked, model: SmallModel) -> None:
    """Each token once, in what came piece by piece and in the end."""
    text = model.text(PROMPT, LONG)
    assert isinstance(asked.end, Ended), asked.end
    assert (asked.text, asked.end.text) == (text, text)
    assert (asked.tokens, asked.end.tokens) == (LONG, LONG)


@pytest.mark.seed("000", "18.4")
@run_async
async def test_after_kill_9_of_a_node_the_answer_goes_on_over_its_copy(
    small: SmallModel, pipe_nursery: str
) -> None:
    async with Processes(pipe_nursery, small.folder) as network:
        origin = await with_copies(network)
        asked = await begun(origin)
        killed = await used(network)
        await killed.kill()
        await origin.ended(asked)
        check_whole(asked, small)
        [heard] = asked.heard
        assert killed.node_id in heard
        assert "goes on another way" in heard
        await network.free()


@pytest.mark.seed("000", "17.1", "18.3")
@run_async
async def test_after_kill_9_of_a_node_without_a_copy_the_answer_ends_with_the_reason(
    small: SmallModel, pipe_nursery: str
) -> None:
    async with Processes(pipe_nursery, small.folder) as network:
        origin = await without_copies(network)
        asked = await begun(origin)
        await network.nodes["b"].kill()
        end = await origin.ended(asked)
        assert isinstance(end, Failed)
        assert end.code == "NODE_LOST"
        assert "b was lost" in end.reason
        assert small.text(PROMPT, LONG).startswith(asked.text)
        await network.free()


@run_async
async def test_a_stopped_node_is_found_by_its_silence_and_is_a_harmless_member_afterwards(
    small: SmallModel, pipe_nursery: str
) -> None:
    async with Processes(pipe_nursery, small.folder, silence=2.0) as network:
        origin = await with_copies(network)
        asked = await begun(origin)
        stopped = await used(network)
        stopped.signal(signal.SIGSTOP)
        await origin.ended(asked)
        check_whole(asked, small)
        assert "silent" in asked.heard[0]
        stopped.signal(signal.SIGCONT)
        await origin.until(lambda now: len(now.nodes) == 4)
        await network.free()
        again = origin.ask(PROMPT, LONG)
        await origin.ended(again)
        check_whole(again, small)


@run_async
async def test_a_stopped_node_is_found_by_deadline_and_disturbs_nothing_when_it_goes_on(
    small: SmallModel, pipe_nursery: str
) -> None:
    async with Processes(pipe_nursery, small.folder, silence=60.0, step_timeout=1.5) as network:
        origin = await with_copies(network)
        asked = await begun(origin)
        stopped = await used(network)
        stopped.signal(signal.SIGSTOP)
        await origin.ended(asked)
        check_whole(asked, small)
        assert "no step came back" in asked.heard[0]
        again = await begun(origin)
        stopped.signal(signal.SIGCONT)
        await origin.ended(again)
        check_whole(again, small)
        check_whole(asked, small)
        await network.free()


@run_async
async def test_kill_9_of_an_origin_frees_its_jobs_at_once_and_disturbs_no_other(
    small: SmallModel, pipe_nursery: str
) -> None:
    async with Processes(pipe_nursery, small.folder, silence=60.0) as network:
        origin = await with_copies(network)
        other = await network.origin(FIRST, node_id="z", local_layers=len(FIRST))
        await other.until(lambda now: now.whole and len(now.nodes) == 5)
        many = [origin.ask([20 + n, *PROMPT], LONG) for n in range(4)]
        for asked in many:
            await origin.wrote(asked, BEGUN)
        beside = await begun(other)
        await origin.kill()
        for name in "bcd":
            await network.nodes[name].said(Lost, lambda lost: lost.node_id == "a")
        await other.ended(beside)
        check_whole(beside, small)
        assert not beside.heard
        await network.free()


@run_async
async def test_a_stopped_origin_loses_its_room_and_its_answer_goes_on_when_it_does(
    small: SmallModel, pipe_nursery: str
) -> None:
    async with Processes(pipe_nursery, small.folder, silence=2.0) as network:
        origin = await without_copies(network)
        asked = await begun(origin)
        origin.signal(signal.SIGSTOP)
        holder = network.nodes["b"]
        assert "silent" in (await holder.said(Lost)).reason
        await holder.until(lambda now: not (now.jobs or now.used))
        origin.signal(signal.SIGCONT)
        await origin.ended(asked)
        check_whole(asked, small)
        await network.free()


@run_async
async def test_a_node_that_is_started_anew_under_its_id_takes_part_again(
    small: SmallModel, pipe_nursery: str
) -> None:
    async with Processes(pipe_nursery, small.folder) as network:
        origin = await without_copies(network)
        asked = await begun(origin)
        await network.nodes.pop("b").kill()
        await network.add("b", *ranges(2, 6))
        # It may be back before anybody missed it: then the answer goes on over the new one.
        if isinstance(await origin.ended(asked), Ended):
            check_whole(asked, small)
        await origin.until(lambda now: now.whole)
        again = origin.ask(PROMPT, LONG)
        await origin.ended(again)
        check_whole(again, small)
        await network.free()


@run_async
async def test_an_origin_that_is_started_anew_under_its_id_is_served_again(
    small: SmallModel, pipe_nursery: str
) -> None:
    async with Processes(pipe_nursery, small.folder) as network:
        origin = await without_copies(network)
        await begun(origin)
        await network.nodes.pop("a").kill()
        origin = await network.origin(FIRST)
        await origin.until(lambda now: now.whole)
        asked = origin.ask(PROMPT, LONG)
        await origin.ended(asked)
        check_whole(asked, small)
        await network.free()
