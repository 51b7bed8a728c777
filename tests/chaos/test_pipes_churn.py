"""Many jobs while nodes come and go."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Callable, Mapping

import pytest
from tests.support.chaos.pipes_network import Asked, NodeProcess, Processes
from tests.support.chaos.pipes_nodes import LEFT, Ended, Failed
from tests.support.pipes.networks import SmallModel, ranges

from penstock.testing.aio import run_async
from penstock.workloads.pipes.config import LayerRange

pytestmark = pytest.mark.timeout(120)

FIRST, MIDDLE, LAST = ranges(0, 2, 4, 6)
HELD = {"a": FIRST, "b": MIDDLE, "c": MIDDLE, "d": LAST, "e": LAST}
PACE = 0.15
"""Seconds between the beginnings of two jobs."""
LEAVES = 7
"""Of so many who ask, one leaves before the end."""
SETTINGS = {
    "silence": 2.0,
    "step_timeout": 4.0,
    "open_timeout": 10.0,
    "drain": 1.0,
    "prefill_chunk_size": 16,
}
DEADLINE = 30.0
"""Seconds that any job may take: ways, steps and waiting together, and a busy machine."""
FAILURES = {"NODE_LOST", "NODE_STALLED", "PIPE_UNAVAILABLE"}
"""When all copies of a layer are gone at once."""


class Weather:
    """Kills, stops and starts nodes, one of these at a time. The same seed does the same."""

    def __init__(
        self, network: Processes, nodes: str, held: Mapping[str, LayerRange | None], seed: str
    ) -> None:
        self._network, self._nodes, self._held = network, nodes, held
        self._chance = random.Random(seed)
        self.done: list[str] = []
        self.is_over = False

    async def rage(self) -> None:
        """What it has begun it brings to its end."""
        while not self.is_over:
            await asyncio.sleep(self._chance.uniform(0.1, 0.6))
            name = self._chance.choice(self._nodes)
            how = self._chance.choice([self._kill, self._kill, self._freeze, self._leave])
            self.done.append(f"{how.__name__} {name}")
            await how(name)

    async def _kill(self, name: str) -> None:
        await self._network.nodes[name].kill()
        await self._start(name)

    async def _leave(self, name: str) -> None:
        await self._network.nodes[name].stop()
        await self._start(name)

    async def _freeze(self, name: str) -> None:
        node = self._network.nodes[name]
        node.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(self._chance.uniform(0.2, 3.0))
        finally:
            node.signal(signal.SIGCONT)

    async def _start(self, name: str) -> None:
        await self._network.nodes.pop(name).close()
        await asyncio.sleep(self._chance.uniform(0.0, 0.5))
        await self._network.add(name, self._held[name])


class Crowd:
    """Asks one question after another, and leaves some of the answers."""

    def __init__(self, origin: NodeProcess, jobs: int) -> None:
        self._origin, self._jobs = origin, jobs
        self.asked: list[tuple[Asked, tuple[int, ...], int]] = []

    async def ask(self, last: Callable[[], None]) -> None:
        """Until all have ended; `last` is told when the last was asked."""
        waiting = []
        for number in range(self._jobs):
            prompt = tuple(range(20 + 7 * (number % 5), 30 + 17 * (number % 5)))
            count = (15, 40, 80)[number // 5 % 3]
            asked = self._origin.ask(prompt, count)
            self.asked.append((asked, prompt, count))
            leaves = number % LEAVES == LEAVES - 1
            waiting.append(asyncio.ensure_future(self._follow(asked, leaves)))
            await asyncio.sleep(PACE)
        last()
        await asyncio.gather(*waiting)

    async def _follow(self, asked: Asked, leaves: bool) -> None:
        if leaves:
            await self._origin.comes(lambda: asked.tokens > 2 or asked.ends)
            if not asked.ends:
                self._origin.hang_up(asked)
        await self._origin.ended(asked)

    def check(self, model: SmallModel) -> list[Failed]:
        """Each ended once, in time, and with what the whole model says; those that failed."""
        failed = []
        for asked, prompt, count in self.asked:
            text = model.text(prompt, count)
            assert asked.took < DEADLINE
            if isinstance(asked.end, Ended):
                assert asked.end.text == asked.text == text, (prompt, count)
            else:
                assert text.startswith(asked.text), (prompt, count)
                assert asked.end.code in FAILURES | {LEFT}, asked.end
                if asked.end.code != LEFT:
                    failed.append(asked.end)
        return failed


@pytest.mark.seed("000", "17.13")
@pytest.mark.parametrize(
    ("jobs", "held", "groups"),
    [
        pytest.param(50, HELD, ("bc", "de"), id="layers as told"),
        pytest.param(25, dict.fromkeys(HELD), ("bcde",), id="layers as the network decides"),
    ],
)
@run_async
async def test_each_of_many_jobs_ends_once_and_in_time_while_nodes_come_and_go(
    small: SmallModel,
    pipe_nursery: str,
    jobs: int,
    held: Mapping[str, LayerRange | None],
    groups: tuple[str, ...],
) -> None:
    seed = int(os.environ.get("PENSTOCK_SEED", "0")) or random.randrange(1 << 32)
    async with Processes(pipe_nursery, small.folder, **SETTINGS) as network:
        for name, layers in held.items():
            await network.add(name, layers, end_model=name == "a")
        origin = network.nodes["a"]
        calm = await origin.until(lambda now: now.whole and len(now.nodes) == len(held))
        weathers = [Weather(network, nodes, held, f"{seed} {nodes}") for nodes in groups]
        crowd = Crowd(origin, jobs)

        def calm_down() -> None:
            for weather in weathers:
                weather.is_over = True

        try:
            await asyncio.gather(
                crowd.ask(last=calm_down), *(weather.rage() for weather in weathers)
            )
            await network.free()
            # And nothing stays of those that went.
            await origin.until(
                lambda now: (
                    len(now.nodes) == len(held) and now.open_files <= calm.open_files + len(held)
                )
            )
            failed = crowd.check(small)
            assert len(failed) <= jobs // 4, failed
        except BaseException:
            print(f"PENSTOCK_SEED={seed}", [weather.done for weather in weathers])
            raise
