"""Many jobs while nodes come and go."""

from __future__ import annotations

import asyncio
import os
import random
import signal

import pytest
from tests.chaos.pipes_network import Asked, Processes
from tests.chaos.pipes_nodes import Ended, Failed
from tests.pipes.networks import SmallModel, ranges

from penstock.testing.aio import run_async

pytestmark = pytest.mark.chaos

FIRST, MIDDLE, LAST = ranges(0, 2, 4, 6)
HELD = {"b": MIDDLE, "c": MIDDLE, "d": LAST, "e": LAST}
JOBS, PACE = 50, 0.15
"""How many, and seconds between the beginnings of two."""
PROMPTS = [tuple(range(20 + 7 * n, 30 + 17 * n)) for n in range(5)]
COUNTS = [(15, 40, 80)[n // len(PROMPTS) % 3] for n in range(JOBS)]
DEADLINE = 30.0
"""Seconds that any job may take: ways, steps and waiting together, and a busy machine."""
FAILURES = {"NODE_LOST", "NODE_STALLED", "PIPE_UNAVAILABLE"}


class Weather:
    """Kills, stops and starts nodes, one of these at a time. The same seed does the same."""

    def __init__(self, network: Processes, nodes: str, seed: str) -> None:
        self._network, self._nodes, self._chance = network, nodes, random.Random(seed)
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
        await self._network.add(name, HELD[name])


@run_async
async def test_each_of_50_jobs_ends_once_and_in_time_while_nodes_come_and_go(
    small: SmallModel, pipe_nursery: str
) -> None:
    seed = int(os.environ.get("PENSTOCK_SEED", "0")) or random.randrange(1 << 32)
    settings = {"silence": 2.0, "step_timeout": 4.0, "open_timeout": 10.0, "drain": 1.0}
    async with Processes(pipe_nursery, small.folder, **settings) as network:
        origin = await network.origin(FIRST)
        for name, layers in HELD.items():
            await network.add(name, layers)
        calm = await origin.until(lambda now: now.whole and len(now.nodes) == 5)
        weathers = [Weather(network, nodes, f"{seed} {nodes}") for nodes in ("bc", "de")]
        raging = [asyncio.ensure_future(weather.rage()) for weather in weathers]

        async def job(number: int) -> None:
            await asyncio.sleep(number * PACE)
            asked[number] = origin.ask(PROMPTS[number % len(PROMPTS)], COUNTS[number])
            if number == JOBS - 1:
                for weather in weathers:
                    weather.is_over = True
            await origin.ended(asked[number])

        asked: dict[int, Asked] = {}
        try:
            await asyncio.gather(*raging, *(job(number) for number in range(JOBS)))
            await network.free()
            # And nothing stays of those that went.
            await origin.until(
                lambda now: len(now.nodes) == 5 and now.open_files <= calm.open_files + 4
            )
        except BaseException:
            print(f"PENSTOCK_SEED={seed}", [weather.done for weather in weathers])
            raise
    good = 0
    for number, one in asked.items():
        assert one.took < DEADLINE
        if isinstance(one.end, Ended):
            text = small.text(PROMPTS[number % len(PROMPTS)], COUNTS[number])
            assert one.end.text == one.text == text, number
            good += 1
        else:
            assert one.end.code in FAILURES, one.end
    assert good >= JOBS // 2, [one.end for one in asked.values() if isinstance(one.end, Failed)]
