"""Every request ends, whoever it waits for: a node that is stuck, room, a pipe, a connection."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
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
from tests.workloads.pipes.live.test_losses import spoil
from tests.workloads.pipes.live.test_rooms import BLOCK

from penstock.testing.aio import run_async
from penstock.workloads.llm.values import LlmCode, LlmFailure, LlmResult
from penstock.workloads.pipes.job import Job
from penstock.workloads.pipes.node import Node


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
    connection = node.mesh.peers.get(other)
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
async def test_a_watcher_that_raises_disturbs_neither_its_answer_nor_a_connection(
    small: SmallModel,
) -> None:
    class Deaf(Heard):
        def progress(self, fraction: float | None = None, message: str = "") -> None:
            super().progress(fraction, message)
            raise RuntimeError("not now")

    async with Network(small, keep=0) as network:
        async with one_waits(network) as (node, first):
            connection, heard = node.mesh.peers.get("b"), Deaf()
            second = asyncio.ensure_future(ask(node, asked(), watch=heard))
            while not heard.notes:
                await heard.news.wait()
            assert connection is not None
            assert connection.closed is None
        for waiting in (first, second):
            assert (await waiting).choices[0].text == small.text(PROMPT, 12)


@pytest.mark.seed("000", "14.4")
@run_async
async def test_who_waits_for_room_is_told_when_the_origin_stops(small: SmallModel) -> None:
    async with Network(small, keep=0, drain=0.0) as network:
        with pytest.raises(LlmFailure) as failed:
            async with one_waits(network) as (node, waiting):
                await node.stop()
                await asyncio.wait_for(waiting, 10)
        assert failed.value.code is LlmCode.END_MODEL_UNAVAILABLE


@pytest.mark.seed("000", "14.4")
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
