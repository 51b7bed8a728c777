"""Members that lie, and connections that die on one side: found by looking for it."""

from __future__ import annotations

from tests.pipes.meshes import Seen, started
from tests.pipes.test_mesh_assigning import LAYERS, Holder
from tests.support.waiting import soon

from penstock.testing.aio import run_async
from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.net.records import NodeRecord
from penstock.workloads.pipes.net.states import BAD_RECORD


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


@run_async
async def test_a_connection_that_only_the_other_side_knew_for_dead_is_told_as_broken() -> None:
    a, b = Seen("a"), Seen("b")
    async with started(a):
        b.mesh._seeds = (a.mesh.address,)
        async with started(b):
            await soon(lambda: a.sees == b.sees == ["a", "b"])
            await soon(lambda: a.mesh.rtt("b") and b.mesh.rtt("a"))
            old = b.mesh._membership.peers.get("a")
            assert old is not None
            assert old.outgoing  # the larger id has dialed, for the other was its seed
            b.mesh._membership._all[old] -= 10  # it is not from the moment when they met
            gone = a.mesh._membership.peers.get("b")
            assert gone is not None
            # As after a cut that one side found out sooner: nothing of the end comes through.
            gone._transport = None
            gone._end("silent for 1.0 s")
            await soon(lambda: b.mesh._membership.peers.get("a") is not old)
            await soon(lambda: b.back == ["a"] or b.lost)
            assert b.back == ["a"]
            assert a.lost
