"""Layers are given out over real connections."""

from __future__ import annotations

from msgspec.structs import replace
from tests.support.pipes.meshes import Seen, started
from tests.support.waiting import soon

from penstock.testing.aio import run_async
from penstock.workloads.pipes.config import LayerRange
from penstock.workloads.pipes.net.assigning import REFUSED, Assigning
from penstock.workloads.pipes.net.records import NodeRecord, SegmentRecord, SegmentState
from penstock.workloads.pipes.wire.messages import Assign, Kind, encode

LAYERS = 9


class Holder(Seen):
    """A node that holds at once what it is told to."""

    def __init__(self, node_id: str, join: list[str], *, ends: bool = False, room: int = 9) -> None:
        super().__init__(node_id, join)
        self.held: list[LayerRange | None] = []
        self.assigning = Assigning(self.mesh, node_id, "m")
        self.assigning.on_assigned(self.hold)
        self.record_of = NodeRecord(
            node_id=node_id,
            model="m",
            num_layers=LAYERS,
            layer_ms=1.0,
            auto=not ends,
            room=room,
            end_models=("m",) if ends else (),
        )

    def hold(self, layers: LayerRange | None) -> None:
        self.held.append(layers)
        assert layers is not None
        segment = SegmentRecord(
            model="m",
            layers=layers,
            num_layers=LAYERS,
            fingerprints=("f",) * len(layers),
            state=SegmentState.READY,
        )
        self.publish(segments=(segment,))

    def publish(self, **facts: object) -> None:
        self.record_of = replace(self.record_of, **facts)
        self.mesh.publish(replace(self.record_of, **self.assigning.record_fields()))


def held(by: Holder) -> list[str]:
    """What the nodes were told to hold, as one of them knows it."""
    return sorted(str(r.assigned) for r in by.mesh.table if r.assigned is not None)


@run_async
async def test_an_origin_gives_out_layers_and_again_when_a_node_is_lost() -> None:
    o = Holder("o", [], ends=True)
    async with started(o):
        o.publish()
        a, b, c = (Holder(n, [o.mesh.address]) for n in "abc")
        async with started(a, b):
            for node in (a, b):
                node.publish()
            await soon(lambda: held(o) == ["0-4", "5-8"])
            async with started(c):
                c.publish()
                await soon(lambda: held(o) == ["0-2", "3-5", "6-8"])
            # c has left: two have to do again what three did.
            await soon(lambda: o.sees == ["a", "b", "o"])
            await soon(lambda: held(o) in (["0-3", "4-8"], ["0-4", "5-8"]))
            assert not o.assigning.shortage


@run_async
async def test_what_fits_nowhere_is_said_by_who_decides() -> None:
    o = Holder("o", [], ends=True)
    async with started(o):
        o.publish(layer_bytes=2**20)
        a = Holder("a", [o.mesh.address], room=4)
        async with started(a):
            a.publish()
            await soon(lambda: a.held == [LayerRange(0, 4)])
            await soon(lambda: "5 of 9 layers" in o.assigning.shortage)
            assert "5 MiB" in o.assigning.shortage


@run_async
async def test_a_word_from_anyone_else_is_not_followed() -> None:
    o = Holder("o", [], ends=True)
    async with started(o):
        o.publish()
        a, b = Holder("a", [o.mesh.address]), Holder("b", [o.mesh.address])
        async with started(a, b):
            a.publish()
            await soon(lambda: a.held == [LayerRange(0, 9)])
            await soon(lambda: a.sees == b.sees == ["a", "b", "o"])
            b.mesh.send("a", Kind.ASSIGN, encode(Assign("m", 0, 2, "b", 99)))
            b.mesh.send("a", Kind.ASSIGN, encode(Assign("m", 0, 2, "o", 99)))
            await soon(lambda: a.mesh.counters[REFUSED] == 2)
            assert a.held == [LayerRange(0, 9)]


@run_async
async def test_a_node_that_cannot_hold_its_layers_is_left_out() -> None:
    o = Holder("o", [], ends=True)
    async with started(o):
        o.publish()
        a, b = Holder("a", [o.mesh.address]), Holder("b", [o.mesh.address])
        a.assigning._on_assigned = [lambda layers: a.assigning.gave_up("no memory")]
        async with started(a):
            a.publish()
            await soon(lambda: "no memory" in [r.unfit for r in o.mesh.table])
            async with started(b):
                b.publish()
                await soon(lambda: b.held == [LayerRange(0, 9)])
            assert o.record("a").assigned is None


@run_async
async def test_with_the_node_that_decides_gone_the_next_one_decides() -> None:
    first, second = Holder("o", [], ends=True), Holder("p", [], ends=True)
    async with started(second):
        first.mesh._seeds = (second.mesh.address,)
        async with started(first):
            first.publish()
            second.publish()
            a = Holder("a", [second.mesh.address])
            async with started(a):
                a.publish()
                await soon(lambda: a.held == [LayerRange(0, 9)])
                await first.mesh.stop("it leaves")
                b = Holder("b", [second.mesh.address])
                async with started(b):
                    b.publish()
                    await soon(lambda: held(second) in (["0-3", "4-8"], ["0-4", "5-8"]))
