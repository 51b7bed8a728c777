"""Memory of a process that holds layers of a real model: it grows with them, and with no more."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.chaos.pipes_network import Processes
from tests.support.pipes.networks import ranges

from penstock.testing.aio import run_async

pytestmark = pytest.mark.timeout(120)

COMPUTING = 48 << 20
"""Bytes beside weights and caches that a node takes to compute at all: code that is touched, rows
under way. With what a node without layers takes it is the fixed base."""


@run_async
async def test_resident_memory_of_a_node_is_its_layers_its_caches_and_a_fixed_base(
    model_file: Path, pipe_nursery: str
) -> None:
    async with Processes(pipe_nursery, model_file, cache=256 << 20, keep=600.0) as network:
        origin = await network.origin()
        empty = await network.add("empty")
        few = await network.add("few", *ranges(1, 10))
        many = await network.add("many", *ranges(10, 30))
        await origin.until(lambda now: now.whole)
        await origin.ended(origin.ask(range(100, 400), 2))
        base, some, more = [await node.now() for node in (empty, few, many)]
    assert base.weights == 0 < some.kept < more.kept
    assert 20 / 9 * some.weights == more.weights
    for node in (some, more):
        assert node.rss <= 1.15 * node.weights + node.kept + base.rss + COMPUTING
    weights, caches = more.weights - some.weights, more.kept - some.kept
    assert more.rss - some.rss <= 1.15 * weights + caches
    # It is in use, or nothing was measured.
    assert more.rss - some.rss >= 0.85 * weights
