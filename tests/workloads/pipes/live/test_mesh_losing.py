"""How the loss of a node is found, once and everywhere."""

from __future__ import annotations

import asyncio
import signal

import pytest
from tests.support.pipes.meshes import Seen, child, started
from tests.support.waiting import soon

from penstock.core.errors import Misconfigured
from penstock.testing.aio import run_async
from penstock.workloads.pipes.net import mesh as module
from penstock.workloads.pipes.net.records import BAD_RECORD, NodeRecord, state_of
from penstock.workloads.pipes.wire.messages import Kind


@run_async
async def test_a_node_that_is_killed_vanishes_everywhere_and_is_reported_once() -> None:
    a = Seen("a", silence=30)
    async with started(a):
        b = Seen("b", [a.mesh.address], silence=30)
        async with started(b), child("c", a.mesh.address) as c:
            await soon(lambda: a.sees == b.sees == ["a", "b", "c"])
            c.process.kill()
            await soon(lambda: a.sees == b.sees == ["a", "b"])
            # What one tells the other of the dead brings nothing back.
            a.mesh.send("b", Kind.STATE, state_of([NodeRecord(node_id="c", boot="z")]))
            a.mesh.send("b", Kind.END, b"after it")
            await soon(lambda: b.frames)
            assert b.sees == ["a", "b"]
            assert [n for n, _ in a.lost] == [n for n, _ in b.lost] == ["c"]
            assert not a.mesh.send("c", Kind.END, b"")


@run_async
async def test_a_node_that_stands_still_is_found_by_its_silence_and_may_come_back() -> None:
    a = Seen("a", silence=0.5)
    async with started(a), child("c", a.mesh.address) as c:
        await soon(lambda: a.sees == ["a", "c"])
        c.process.send_signal(signal.SIGSTOP)
        await soon(lambda: a.sees == ["a"])
        assert [n for n, _ in a.lost] == ["c"]
        assert "silent" in a.lost[0][1]
        c.process.send_signal(signal.SIGCONT)
        await soon(lambda: a.sees == ["a", "c"])
        assert len(a.lost) == 1


@run_async
async def test_a_node_that_is_started_anew_takes_the_place_of_the_old_one() -> None:
    a = Seen("a", silence=30)
    async with started(a), child("c", a.mesh.address) as c:
        await soon(lambda: a.sees == ["a", "c"])
        boot, address = a.record("c").boot, c.address
        c.process.kill()
        await c.process.wait()
        # At once, at the same place.
        async with child("c", a.mesh.address, address):
            await soon(lambda: "c" in a.sees and a.record("c").boot != boot)
            assert [n for n, _ in a.lost] == ["c"]


@run_async
async def test_who_leaves_is_gone_at_once_and_with_its_reason() -> None:
    a = Seen("a")
    async with started(a):
        b = Seen("b", [a.mesh.address])
        async with started(b):
            await soon(lambda: a.sees == b.sees == ["a", "b"])
            await b.mesh.stop("maintenance")
            await soon(lambda: a.lost)
            assert a.lost == [("b", "it left: maintenance")]
            assert a.sees == ["a"]
            assert not b.lost


@run_async
async def test_a_connection_that_breaks_and_is_replaced_is_no_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_SHORT", 0.0)
    a = Seen("a")
    async with started(a):
        b = Seen("b", [a.mesh.address])
        async with started(b):
            await soon(lambda: a.sees == b.sees == ["a", "b"])
            a.cut("b")
            await soon(lambda: (a.back, b.back) == (["b"], ["a"]))
            b.cut("a")
            await soon(lambda: (a.back, b.back) == (["b"] * 2, ["a"] * 2))
            assert a.sees == b.sees == ["a", "b"]
            assert not a.lost
            assert not b.lost


@run_async
async def test_an_id_that_is_taken_by_a_live_node_is_refused_with_the_reason() -> None:
    a = Seen("a")
    async with started(a):
        first = Seen("b", [a.mesh.address], silence=0.3)
        async with started(first):
            await soon(lambda: a.sees == ["a", "b"])
            boot = a.record("b").boot
            second = Seen("b", [a.mesh.address], silence=0.3)
            async with started(second):
                await soon(lambda: second.refused)
                assert "'b'" in second.refused[0]
                assert a.record("b").boot == boot
                assert a.sees == ["a", "b"]
                assert not a.lost
                assert not first.refused


@run_async
async def test_an_id_is_taken_too_if_its_holder_is_the_one_that_is_asked() -> None:
    first = Seen("b")
    async with started(first):
        second = Seen("b", [first.mesh.address], silence=0.3)
        async with started(second):
            await soon(lambda: second.refused)
            assert not first.refused


@run_async
async def test_a_record_of_a_third_node_is_hearsay() -> None:
    a = Seen("a")
    async with started(a):
        b = Seen("b", [a.mesh.address])
        async with started(b):
            await soon(lambda: a.sees == b.sees == ["a", "b"])
            ghost = NodeRecord(node_id="ghost", boot="0", version=1, address="127.0.0.1:1")
            forged = NodeRecord(node_id="a", boot=a.mesh.boot, version=99, room=5)
            other = NodeRecord(node_id="b", boot="another", version=99, room=5)
            b.mesh.send("a", Kind.STATE, state_of([ghost, forged, other]))
            b.mesh.send("a", Kind.END, b"after it")
            await soon(lambda: a.frames)
            assert a.sees == ["a", "b"]
            assert a.record("a").room == a.record("b").room == 0
            assert a.mesh.counters[BAD_RECORD] == 1


@run_async
async def test_a_lost_node_is_dialed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "GRACE", 0.0)
    a = Seen("a")
    async with started(a):
        b = Seen("b", [a.mesh.address])
        async with started(b):
            await soon(lambda: a.sees == b.sees == ["a", "b"])
            a.cut("b")
            await soon(lambda: a.lost and b.lost)
            await soon(lambda: a.sees == b.sees == ["a", "b"])
            assert [n for n, _ in a.lost] == ["b"]
            assert [n for n, _ in b.lost] == ["a"]


@run_async
async def test_a_connection_that_always_ends_is_not_dialed_without_a_pause() -> None:
    a = Seen("a")
    async with started(a):
        b = Seen("b", [a.mesh.address])
        cuts = 0

        def cut(*_: object) -> None:
            nonlocal cuts
            cuts += 1
            a.cut("b")

        a.mesh.on(Kind.END, cut)
        async with started(b):
            loop = asyncio.get_running_loop()
            end = loop.time() + 1.0
            while loop.time() < end:
                b.mesh.send("a", Kind.END, b"")
                await asyncio.sleep(0.002)
            assert 1 <= cuts <= 5


@run_async
async def test_what_others_tell_of_places_that_are_none_disturbs_nothing() -> None:
    a = Seen("a")
    async with started(a):
        b = Seen("b", [a.mesh.address])
        async with started(b):
            await soon(lambda: a.sees == b.sees == ["a", "b"])
            nowhere = ("nowhere", "x:99999", "[::1:5", "é" * 80 + ":1", "127.0.0.1:1")
            ghosts = [
                NodeRecord(node_id=f"z{n}", boot="0", address=address)
                for n, address in enumerate(nowhere)
            ]
            b.mesh.send("a", Kind.STATE, state_of(ghosts))
            await soon(lambda: len(a.mesh.unreached) == len(nowhere))
            c = Seen("c", [b.mesh.address])
            async with started(c):
                await soon(lambda: a.sees == b.sees == c.sees == ["a", "b", "c"])


@run_async
async def test_a_seed_that_is_no_address_is_refused_at_once() -> None:
    a = Seen("a", ["nowhere"])
    with pytest.raises(Misconfigured, match="nowhere"):
        await a.mesh.start()
    await a.mesh.stop()


@run_async
async def test_a_connection_that_only_the_other_side_knew_for_dead_is_told_as_broken() -> None:
    a, b = Seen("a"), Seen("b")
    async with started(a):
        b.mesh._seeds = (a.mesh.address,)
        async with started(b):
            await soon(lambda: a.sees == b.sees == ["a", "b"])
            await soon(lambda: all(c.rtt for c in (*a.mesh.peers, *b.mesh.peers)))
            old = b.mesh.peers.get("a")
            assert old is not None
            assert old.outgoing  # the larger id has dialed, for the other was its seed
            b.mesh._all[old] -= 10  # it is not from the moment when they met
            gone = a.mesh.peers.get("b")
            assert gone is not None
            # As after a cut that one side found out sooner: nothing of the end comes through.
            gone._transport = None
            gone._end("silent for 1.0 s")
            await soon(lambda: b.mesh.peers.get("a") is not old)
            await soon(lambda: b.back == ["a"] or b.lost)
            assert b.back == ["a"]
            assert a.lost
