"""Layers of a node that is told to hold others: what is read, what is in memory, and its jobs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.pipes.files import small_tokenizer
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
from tests.support.pipes.random_models import RandomSource, tiny
from tests.workloads.pipes.live.test_hanging_requests import one_waits
from tests.workloads.pipes.live.test_rooms import BLOCK

from penstock.testing.aio import run_async
from penstock.workloads.llm.values import Delta
from penstock.workloads.pipes.config import LpConfig
from penstock.workloads.pipes.node import Node
from penstock.workloads.pipes.weights.prepared import prepare
from penstock.workloads.pipes.weights.source import open_source
from penstock.workloads.pipes.wire.identity import new_key

WIDE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8}
"""Layers of about 10 MiB."""

MOVED = """
import asyncio, json, sys
from pathlib import Path
folder, opened = Path(sys.argv[1]), []

def watch(event, arguments):
    if event in ("open", "mmap.__new__") and str(arguments[0]).endswith(".safetensors"):
        opened.append(Path(str(arguments[0])).stem)

sys.addaudithook(watch)
from penstock.workloads.pipes.config import LayerRange, LpConfig
from penstock.workloads.pipes.net.mesh import Mesh
from penstock.workloads.pipes.net.records import NodeRecord
from penstock.workloads.pipes.node import Node
from penstock.workloads.pipes.wire.identity import Identity, new_key
from penstock.workloads.pipes.wire.messages import Kind
from penstock.workloads.pipes.wire.messages import Assign, encode

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

async def main():
    key = new_key()
    node = Node(LpConfig(model="m", source=folder, node_id="n", key=key, dtype="float32",
                         threads=1, cache=1 << 20, memory=int(sys.argv[2]), drain=0.0))
    await node.start()
    # Not a node that computes: it only decides.
    origin = Mesh(Identity.make(key, "o"), "o", "127.0.0.1:0", join=[node.address])
    origin.publish(NodeRecord(node_id="o", model="m", num_layers=0, end_models=("m",)))
    await origin.start()

    async def held(start, end, generation):
        while origin.table.get("n") is None or node.mesh.table.get("o") is None:
            await asyncio.sleep(0.01)
        origin.send("n", Kind.ASSIGN, encode(Assign("m", start, end, "o", generation)))
        while [one.layers for one in node.record.segments if one.ready] != [LayerRange(start, end)]:
            await asyncio.sleep(0.01)

    await held(0, 6, 1)
    first, opened[:] = sorted(set(opened)), []
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS:")
    await held(2, 8, 2)
    print(json.dumps([node.record.room, first, sorted(set(opened)), memory("VmHWM:") - before]))
    await origin.stop("done")
    await node.stop()

asyncio.run(main())
"""


def test_moved_layers_are_read_once_and_a_full_node_never_holds_more_than_fits(
    tmp_path: Path,
) -> None:
    class Worded(RandomSource):
        def tokenizer(self) -> object:
            return small_tokenizer()

    with torch.no_grad():
        prepare(Worded(tiny("llama", **WIDE)[0]), tmp_path / "m")
    layer = 4 * sum(one.numel() for one in open_source(tmp_path / "m").layer(0).values())
    memory = (1 << 20) + 2 * layer + int(6.5 * layer)
    done = subprocess.run(
        [sys.executable, "-c", MOVED, str(tmp_path / "m"), str(memory)],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stderr
    room, first, then, more = json.loads(done.stdout)
    assert room == 6
    assert first == [f"layer-00{n}" for n in range(6)]
    assert then == ["layer-006", "layer-007"]
    assert more < 3.3 * layer  # two were dropped; one that is loaded is there twice


@pytest.mark.seed("000", "14.5")
@run_async
async def test_an_answer_over_layers_that_are_dropped_goes_on_over_another_node(
    small: SmallModel,
) -> None:
    """Its node has room for three layers, and may not keep those that a job still uses."""
    async with Network(small, keep=0, drain=0.0) as network:
        node = await network.origin(*ranges(0, 3))
        b = await network.add("b", *ranges(3, 6))
        b._holding._room = 3
        await whole(node)
        heard, text, count = Heard(), "", 0
        async for piece in node.generate(asked(count=40), watch=heard):
            if not isinstance(piece, Delta):
                continue
            text, count = text + piece.text, count + 1
            if count == 3:
                await network.add("c", *ranges(3, 6))
                await until(lambda: len(node.records()) == 3, node)
                moving = asyncio.ensure_future(b._holding.hold(ranges(2, 5)))
        await asyncio.wait_for(moving, 10)
        assert text == small.text(PROMPT, 40)
        assert "b no longer holds layers 5; goes on another way" in heard.logs[0]


@run_async
async def test_a_node_that_is_stopped_while_it_loads_reads_no_further_layer(
    small: SmallModel,
) -> None:
    config = LpConfig(
        model="tiny", source=small.folder, key=new_key(), layers=tuple(ranges(0, 6)), threads=1
    )
    node, loop = Node(config), asyncio.get_running_loop()
    reads, going_on, first = [], threading.Event(), asyncio.Event()

    def told(fraction: float, doing: str) -> None:
        if doing.startswith("reading layer"):
            reads.append(doing)
            loop.call_soon_threadsafe(first.set)
            going_on.wait()

    starting = asyncio.ensure_future(node.start(told))
    try:
        await asyncio.wait_for(first.wait(), 30)
        await node.stop()
    finally:
        going_on.set()
    await asyncio.gather(starting, return_exceptions=True)
    await loop.shutdown_default_executor()  # as at the end of a process
    assert reads == ["reading layer 1 of 6"]


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


@pytest.mark.seed("000", "14.5")
@run_async
async def test_running_answers_keep_the_layers_that_they_began_with(small: SmallModel) -> None:
    async with Network(small, keep=0) as network:
        node = await network.split(0, 3, 6)
        text = ""
        async for piece in node.generate(asked(count=30)):
            if isinstance(piece, Delta):
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
