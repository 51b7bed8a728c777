"""Nodes that leave, stall, lie or fail: a job goes another way, or ends with the reason."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
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
from penstock.workloads.llm.values import Completion, Delta, LlmCode, LlmFailure
from penstock.workloads.pipes.job import Job
from penstock.workloads.pipes.model.segment import Segment
from penstock.workloads.pipes.node import Node
from penstock.workloads.pipes.routes import NoRoute
from penstock.workloads.pipes.views import view_of

FIRST, MIDDLE, LAST = ranges(0, 2, 4, 6)
LONG = 40


async def with_copies(network: Network, **more: Any) -> Node:
    """`b` and `c` both have the middle, `d` the end."""
    node = await network.origin(FIRST, **more)
    for name, layers in (("b", MIDDLE), ("c", MIDDLE), ("d", LAST)):
        await network.add(name, layers, **more)
    await whole(node)
    await until(lambda: len(node.records()) == 4, node)
    return node


async def broken_off(
    node: Node, do: Callable[[set[str]], Any], watch: Heard
) -> tuple[str, Completion]:
    """What is said when, after the third piece, something is done to the nodes of the way."""
    text, said, count = "", None, 0
    async for piece in node.generate(asked(count=LONG), watch=watch):
        if isinstance(piece, Delta):
            text += piece.text
            count += 1
            if count == 3:
                assert node.origin is not None
                [generation] = node.origin._generations.values()
                done = do(generation.nodes)
                if asyncio.iscoroutine(done):
                    await done
        else:
            said = piece
    assert said is not None
    return text, said


def spoil(node: Node, how: Callable[[Job], None]) -> None:
    """Have a node do something to every job after its layers."""
    for segment in node._holding.segments:
        computed = segment.process_jobs

        def process(jobs: list[Job], end: int, computed: Any = computed) -> None:
            computed(jobs, end)
            for job in jobs:
                how(job)

        segment.process_jobs = process  # type: ignore[method-assign, assignment]


@pytest.mark.seed("000", "15.5", "18.4")
@run_async
async def test_a_node_that_leaves_is_replaced_and_no_token_is_repeated_or_skipped(
    small: SmallModel,
) -> None:
    async with Network(small, drain=0.0) as network:
        node = await with_copies(network)
        heard = Heard()

        async def leave(nodes: set[str]) -> None:
            await network.nodes[min(nodes & {"b", "c"})].stop()

        text, said = await broken_off(node, leave, heard)
        assert text == said.choice.text == small.text(PROMPT, LONG)
        assert said.usage.completion_tokens == LONG
        assert "goes on another way" in heard.logs[0]


def counted(network: Network) -> dict[str, int]:
    """How many positions each node has computed, of all jobs together."""
    positions = dict.fromkeys(network.nodes, 0)
    for name, node in network.nodes.items():

        def count(job: Job, name: str = name) -> None:
            positions[name] += job.count

        spoil(node, count)
    return positions


@run_async
async def test_after_a_loss_only_the_lost_part_is_computed_again(small: SmallModel) -> None:
    async with Network(small, drain=0.0, speculation=False) as network:
        node = await with_copies(network)
        positions = counted(network)
        lost: list[str] = []

        async def leave(nodes: set[str]) -> None:
            lost.append(min(nodes & {"b", "c"}))
            await network.nodes[lost[0]].stop()

        text, said = await broken_off(node, leave, Heard())
        assert text == said.choice.text == small.text(PROMPT, LONG)
        [other] = {"b", "c"} - set(lost)
        once = len(PROMPT) + LONG - 1
        assert positions[other] == once
        # And the step that was under way when the node was lost.
        assert once <= positions["a"] <= once + 1
        assert once <= positions["d"] <= once + 1
        computed = {hop.node: hop.tokens for hop in said.hops if hop.layers != "ends"}
        assert computed[other] == once
        assert max(computed["a"], computed["d"]) < LONG


@run_async
async def test_a_node_that_takes_on_more_layers_computes_only_the_new_ones_again(
    small: SmallModel,
) -> None:
    """`d` takes the place of `b`, and then that of `c`, whose layers come after those."""
    async with Network(small, drain=0.0, speculation=False) as network:
        node = await network.split(0, 2, 4, 6)
        text, count, layers = "", 0, list[tuple[int, int, int]]()
        async for piece in node.generate(asked(count=LONG)):
            if isinstance(piece, Delta):
                text, count = text + piece.text, count + 1
                if count == 3:
                    d = await network.add("d", *ranges(2, 6))
                    await until(lambda: len(node.records()) == 4, node)
                    note_layers(d, layers)
                    await network.nodes["b"].stop()
                elif count == 20:
                    await network.nodes["c"].stop()
            else:
                said = piece
        assert text == said.choice.text == small.text(PROMPT, LONG)
        once = len(PROMPT) + LONG - 1
        for layer in range(2, 6):
            computed = sum(count for first, end, count in layers if first <= layer < end)
            assert once <= computed <= once + 1


def note_layers(node: Node, layers: list[tuple[int, int, int]]) -> None:
    """Of each pass: its first layer, the layer after its last, and its positions."""
    for segment in node._holding.segments:
        computed = segment.process_jobs

        def process(jobs: list[Job], end: int, computed: Any = computed) -> None:
            layers.extend((job.current_layer, end, job.count) for job in jobs)
            computed(jobs, end)

        segment.process_jobs = process  # type: ignore[method-assign, assignment]


@run_async
async def test_a_node_that_drains_finishes_what_it_has(small: SmallModel) -> None:
    async with Network(small, drain=30.0) as network:
        node = await network.split(0, 3, 6)
        heard = Heard()
        stopping: list[asyncio.Task[None]] = []

        def leave(nodes: set[str]) -> None:
            stopping.append(asyncio.ensure_future(network.nodes["b"].stop()))

        text, _ = await broken_off(node, leave, heard)
        assert text == small.text(PROMPT, LONG)
        assert not heard.logs
        await stopping[0]
        assert isinstance(node.find(frozenset()), NoRoute)


@pytest.mark.seed("000", "17.1")
@run_async
async def test_without_a_copy_the_loss_of_a_node_ends_the_job_with_the_reason(
    small: SmallModel,
) -> None:
    async with Network(small, drain=0.0) as network:
        node = await network.split(0, 3, 6)
        with pytest.raises(LlmFailure) as failed:
            await broken_off(node, lambda _: network.nodes["b"].stop(), Heard())
        assert failed.value.code is LlmCode.NODE_LOST
        assert "b was lost" in failed.value.message
        assert node.record.jobs == 0


@run_async
async def test_a_node_that_comes_back_takes_part_again(small: SmallModel) -> None:
    async with Network(small, drain=0.0) as network:
        node = await network.split(0, 3, 6)
        await network.nodes["b"].stop()
        await until(lambda: isinstance(node.find(frozenset()), NoRoute), node)
        await network.add("b", *ranges(3, 6))
        result = await ask(node, asked())
        assert result.choices[0].text == small.text(PROMPT, 12)


@run_async
async def test_a_stalled_node_is_found_by_deadline_and_left_aside(small: SmallModel) -> None:
    async with Network(small, step_timeout=1.0) as network:
        node = await with_copies(network)
        heard, going_on = Heard(), threading.Event()

        def stall(nodes: set[str]) -> None:
            spoil(network.nodes[min(nodes & {"b", "c"})], lambda _: going_on.wait() and None)

        try:
            text, _ = await broken_off(node, stall, heard)
        finally:
            going_on.set()
        assert text == small.text(PROMPT, LONG)
        assert "no step came back" in heard.logs[0]


@run_async
async def test_a_slow_node_is_given_the_time_that_its_speed_asks_for(
    small: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt takes six times as long as a step usually may."""
    computed = Segment.run

    def slowly(
        it: Segment, layers: Any, parts: Any, states: torch.Tensor, first: int, end: int
    ) -> torch.Tensor:
        time.sleep(0.002 * len(states) * (end - first))
        return computed(it, layers, parts, states, first, end)

    monkeypatch.setattr(Segment, "run", slowly)
    async with Network(small, step_timeout=0.4) as network:
        node = await network.split(0, 3, 6)
        prompt = tuple(range(40, 240))
        answering, states = asyncio.ensure_future(ask(node, asked(prompt, 2))), set[str]()
        while not answering.done():
            states |= shown(node)
            await node.changed(0.05)
        assert (await answering).choices[0].text == small.text(prompt, 2)
        assert states == {"a ready", "b ready"}


def shown(node: Node) -> set[str]:
    """As `penstock node status` shows the nodes."""
    return {f"{one.node_id} {one.state}" for one in view_of(node.records()).nodes}


@run_async
async def test_a_stuck_node_is_shown_as_stalled_and_new_jobs_wait_for_it(small: SmallModel) -> None:
    async with Network(small, step_timeout=0.5, open_timeout=20.0) as network:
        node = await network.split(0, 3, 6)
        going_on, heard = threading.Event(), Heard()
        spoil(network.nodes["b"], lambda _: going_on.wait() and None)
        try:
            with pytest.raises(LlmFailure, match="no step came back"):
                await ask(node, asked())
            assert shown(node) == {"a ready", "b stalled"}
            waiting = asyncio.ensure_future(ask(node, asked(), watch=heard))
            while not heard.notes:
                await heard.news.wait()
            assert "b (3-5) is stalled" in heard.notes[0]
        finally:
            going_on.set()
        assert (await waiting).choices[0].text == small.text(PROMPT, 12)


@pytest.mark.seed("000", "17.1", "18.3")
@run_async
async def test_a_stalled_node_without_a_copy_ends_the_job(small: SmallModel) -> None:
    async with Network(small, step_timeout=0.5) as network:
        node = await network.split(0, 3, 6)
        going_on = threading.Event()
        spoil(network.nodes["b"], lambda _: going_on.wait() and None)
        try:
            with pytest.raises(LlmFailure) as failed:
                await ask(node, asked())
        finally:
            going_on.set()
        assert failed.value.code is LlmCode.NODE_STALLED


@pytest.mark.seed("000", "17.1")
@run_async
async def test_an_exception_on_a_node_ends_its_job_with_that_reason_and_no_other(
    small: SmallModel,
) -> None:
    async with Network(small) as network:
        node = await network.split(0, 3, 6)
        spoiled: list[bytes] = []

        def fail(job: Job) -> None:
            if len(job.hops) and job.job_id in spoiled:
                raise RuntimeError("a bit fell over")

        spoil(network.nodes["b"], fail)

        def mark(nodes: set[str]) -> None:
            assert node.origin is not None
            spoiled.extend(node.origin._generations)

        with pytest.raises(LlmFailure) as failed:
            await broken_off(node, mark, Heard())
        assert "a bit fell over" in failed.value.message
        result = await ask(node, asked())
        assert result.choices[0].text == small.text(PROMPT, 12)


@run_async
async def test_what_is_no_number_is_refused_and_another_copy_computes_it(small: SmallModel) -> None:
    def spoiled(job: Job) -> None:
        assert job.data is not None
        job.data = job.data * float("nan")

    async with Network(small) as network:
        node = await with_copies(network)
        heard = Heard()

        def lie(nodes: set[str]) -> None:
            spoil(network.nodes[min(nodes & {"b", "c"})], spoiled)

        text, _ = await broken_off(node, lie, heard)
        assert text == small.text(PROMPT, LONG)
        assert "NaN or infinity" in heard.logs[0]


@pytest.mark.seed("000", "17.15")
@run_async
async def test_other_weights_under_the_same_name_make_no_pipe(
    small: SmallModel, tmp_path: Path
) -> None:
    other = SmallModel.made(tmp_path / "other")
    with torch.no_grad():
        other.model.model.layers[4].mlp.up_proj.weight.mul_(1.01)
    other.model.save_pretrained(other.folder)
    async with Network(small, open_timeout=0.5) as network:
        node = await network.origin(*ranges(0, 3))
        await network.add("b", *ranges(3, 6), source=other.folder)
        await until(lambda: len(node.records()) == 2, node)
        with pytest.raises(LlmFailure) as failed:
            await ask(node, asked())
        assert failed.value.code is LlmCode.PIPE_UNAVAILABLE
        assert "layers 4 of b have other weights" in failed.value.message


@pytest.mark.seed("000", "14.2")
@run_async
async def test_an_incomplete_pipe_says_what_is_missing(small: SmallModel) -> None:
    async with Network(small, open_timeout=0.3) as network:
        node = await network.origin(*ranges(0, 3))
        heard = Heard()
        with pytest.raises(LlmFailure) as failed:
            await ask(node, asked(), watch=heard)
        assert failed.value.code is LlmCode.PIPE_UNAVAILABLE
        assert "layers 3-5" in failed.value.message
        assert "layers 3-5" in heard.notes[0]


@run_async
async def test_a_job_that_waits_for_a_pipe_goes_when_it_is_whole(small: SmallModel) -> None:
    async with Network(small) as network:
        node = await network.origin(*ranges(0, 3))
        heard = Heard()
        waiting = asyncio.ensure_future(ask(node, asked(), watch=heard))
        while not heard.notes:
            await heard.news.wait()
        await network.add("b", *ranges(3, 6))
        assert (await waiting).choices[0].text == small.text(PROMPT, 12)


@run_async
async def test_auto_nodes_are_given_the_layers_that_are_missing(small: SmallModel) -> None:
    async with Network(small) as network:
        node = await network.origin(None)
        await network.add("b", None)
        await network.add("c", None)
        result = await ask(node, asked())
        assert result.choices[0].text == small.text(PROMPT, 12)


@run_async
async def test_when_an_auto_node_leaves_the_others_take_its_layers(small: SmallModel) -> None:
    async with Network(small, drain=0.0) as network:
        node = await network.origin(None)
        await network.add("b", None)
        await network.add("c", None)
        await ask(node, asked())
        await network.nodes["c"].stop()
        await until(lambda: "c" not in {one.node_id for one in node.records()}, node)
        result = await ask(node, asked())
        assert result.choices[0].text == small.text(PROMPT, 12)
        assert {hop.node for hop in result.hops} <= {"a", "b"}
