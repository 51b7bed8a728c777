"""What executors tell of themselves reaches the engine, when it is new."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.app.engine import Engine
from penstock.config import load
from penstock.core.job import TopicDefaults
from penstock.lifecycles.canonical import JobState
from penstock.ports.bus import (
    HANDSHAKE,
    HEARTBEAT,
    AnyMessage,
    Handshake,
    MemoryBus,
    Welcomed,
    WorkerFacts,
    jobs_of,
)
from penstock.ports.executor import Context, Outcome, Task
from penstock.testing.aio import run_async
from penstock.testing.clock import LoopClock, VirtualLoop
from penstock.worker.worker import Worker, WorkerOptions
from penstock.workloads.pipes.status import status_of


class Telling:
    """An executor with facts and labels."""

    resumable = False

    def __init__(self, facts: Mapping[str, Any] | None = None) -> None:
        self.topics: tuple[str, ...] = ("job.a",)
        self.topic_defaults: Mapping[str, TopicDefaults] = {}
        self.labels = {"pipe": "10.0.0.1:7000", "gpu": "none"}
        self.told = dict(facts or {"count": 1})
        self.asked = 0

    def check(self, topic: str, payload: bytes) -> None:
        pass

    def facts(self) -> Mapping[str, Any]:
        self.asked += 1
        return dict(self.told)

    async def run(self, task: Task, ctx: Context) -> Outcome:
        return Outcome(JobState.SUCCEEDED)

    async def close(self) -> None:
        pass


class Speechless(Telling):
    def facts(self) -> Mapping[str, Any]:
        raise RuntimeError("not now")


class WorkerFactsBench:
    """A worker, and what it says of itself."""

    def __init__(self, *executors: Telling) -> None:
        self.bus = MemoryBus()
        self.said: list[AnyMessage] = []
        for subject in (HANDSHAKE, HEARTBEAT):
            self.bus.subscribe(subject, self._hear)
        options = WorkerOptions(worker_id="w", labels={"gpu": "a100"})
        clock = LoopClock(asyncio.get_running_loop())
        self.worker = Worker(self.bus, MemoryBlobs(), executors, clock, options)
        self.task = asyncio.ensure_future(self.worker.run())

    async def _hear(self, messages: list[AnyMessage]) -> None:
        self.said.extend(messages)

    async def welcome(self) -> None:
        await asyncio.sleep(0.05)
        self.bus.publish(jobs_of("w"), [Welcomed(self.worker.session)])

    def facts(self) -> list[Mapping[str, Any]]:
        return [message.facts for message in self.said if isinstance(message, WorkerFacts)]

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        await self.bus.close()


def on_virtual_time(test: Any) -> Any:
    def run() -> None:
        loop = VirtualLoop()
        try:
            loop.run_until_complete(test())
        finally:
            loop.close()

    run.__name__ = test.__name__
    return run


@on_virtual_time
async def test_facts_are_told_when_they_are_new_and_at_most_once_a_second() -> None:
    executor = Telling()
    site = WorkerFactsBench(executor)
    await asyncio.sleep(3)
    assert site.facts() == []  # nobody knows the worker yet
    await site.welcome()
    await asyncio.sleep(5)
    assert site.facts() == [{"count": 1}]
    before = executor.asked
    for count in range(100):
        executor.told["count"] = count
        await asyncio.sleep(0.1)
    assert 9 <= executor.asked - before <= 11
    await asyncio.sleep(2)
    assert site.facts()[-1] == {"count": 99}
    await site.end()


@on_virtual_time
async def test_two_executors_that_tell_of_the_same_are_both_heard() -> None:
    whole = Telling({"models": {"job.llm.a": {}}, "count": 1})
    split = Telling({"models": {"job.chat.b": {}}})
    split.topics = ("job.b",)
    site = WorkerFactsBench(whole, split)
    await site.welcome()
    await asyncio.sleep(2)
    assert site.facts() == [{"models": {"job.llm.a": {}, "job.chat.b": {}}, "count": 1}]
    await site.end()


@on_virtual_time
async def test_an_engine_that_welcomes_anew_is_told_anew() -> None:
    site = WorkerFactsBench(Telling())
    for _ in range(3):
        await site.welcome()
        await asyncio.sleep(2)
    assert site.facts() == [{"count": 1}] * 3
    await site.end()


@on_virtual_time
async def test_an_executor_that_fails_to_tell_keeps_no_other_from_it() -> None:
    site = WorkerFactsBench(Speechless(), Telling())
    await site.welcome()
    await asyncio.sleep(2)
    assert site.facts() == [{"count": 1}]
    assert not site.task.done()
    await site.end()


@on_virtual_time
async def test_a_worker_has_the_labels_of_its_executors_unless_it_says_otherwise() -> None:
    site = WorkerFactsBench(Telling())
    await asyncio.sleep(0.05)
    (hello,) = (message for message in site.said if isinstance(message, Handshake))
    assert hello.labels == {"pipe": "10.0.0.1:7000", "gpu": "a100"}
    await site.end()


PIPES = {
    "pipes": [{"model": "m", "num_layers": 4, "complete": True, "origins": ["a"]}],
    "nodes": [
        {"node_id": "a", "address": "10.0.0.1:7000", "state": "ready", "worker_id": "w"},
        {"node_id": "b", "address": "10.0.0.2:7000", "state": "ready"},
    ],
}


async def shown(engine: Engine) -> Any:
    async with asyncio.timeout(10):
        while not (view := status_of(await engine.api.workers())).nodes:  # noqa: ASYNC110 nothing tells
            await asyncio.sleep(0.02)
    return view


@run_async
async def test_an_engine_shows_what_its_own_worker_tells(tmp_path: Path) -> None:
    settings = load(flags={"data_dir": str(tmp_path), "durability": "memory"})
    async with Engine(settings, [Telling({"pipes": PIPES, "count": 3})], listen=False) as engine:
        view = await shown(engine)
        assert [pipe.model for pipe in view.pipes] == ["m"]
        assert [node.node_id for node in view.nodes] == ["a", "b"]
        (worker,) = await engine.api.workers()
        assert worker.facts == {"pipes": PIPES, "count": 3}


@pytest.mark.parametrize("odd", [7, {"pipes": "x"}, {"nodes": [{"node_id": 3}]}])
@run_async
async def test_facts_that_are_not_understood_are_shown_as_they_are_and_harm_nobody(
    tmp_path: Path, odd: Any
) -> None:
    settings = load(flags={"data_dir": str(tmp_path), "durability": "memory"})
    async with Engine(settings, [Telling({"pipes": odd})], listen=False) as engine:
        async with asyncio.timeout(10):
            while not (await engine.api.workers())[0].facts:  # noqa: ASYNC110 nothing tells
                await asyncio.sleep(0.02)
        assert status_of(await engine.api.workers()).nodes == ()
