"""Members that lie in their records harm nobody else."""

from __future__ import annotations

from tests.support.pipes.meshes import Seen, started
from tests.support.waiting import soon
from tests.workloads.pipes.live.test_mesh_assigning import LAYERS, Holder

from penstock.testing.aio import run_async
from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.net.records import BAD_RECORD, NodeRecord


@run_async
async def test_a_record_of_megabytes_keeps_nobody_from_joining() -> None:
    a, liar = Seen("a"), Seen("liar")
    async with started(a):
        liar.mesh._seeds = (a.mesh.address,)
        async with started(liar):
            await soon(lambda: "liar" in a.sees)
            # It fits into a frame, and with another record it does not.
            liar.mesh.publish(NodeRecord(node_id="liar", unfit="x" * ((16 << 20) - 700)))
            await soon(lambda: a.mesh.counters[BAD_RECORD] or len(a.record("liar").unfit))
            late = Seen("z", [a.mesh.address])
            async with started(late):
                await soon(lambda: {"a", "z"} <= {*late.sees} & {*a.sees})
                assert a.mesh.counters[BAD_RECORD] >= 1


@run_async
async def test_a_node_that_tells_of_a_huge_generation_stops_no_word_to_the_others() -> None:
    o, liar = Holder("o", [], ends=True), Seen("y")
    async with started(o):
        o.publish()
        node = Holder("p", [o.mesh.address])
        liar.mesh._seeds = (o.mesh.address,)
        async with started(liar):
            liar.mesh.publish(NodeRecord(node_id="y", model="m", generation=(1 << 32) - 1))
            await soon(lambda: "y" in o.sees and o.record("y").generation)
            async with started(node):
                node.publish()
                await soon(lambda: node.held)
                assert node.held == [LayerRange(0, LAYERS)]
                assert not node.lost
