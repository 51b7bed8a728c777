"""How nodes find each other."""

from __future__ import annotations

import asyncio
import socket

import pytest
from msgspec.structs import replace
from tests.support.pipes.meshes import KEY, Seen, started
from tests.support.waiting import soon

from penstock.testing.aio import run_async
from penstock.workloads.pipes.net import mesh as module
from penstock.workloads.pipes.net.mesh import observe, observer_id
from penstock.workloads.pipes.wire.connection import NotConnected
from penstock.workloads.pipes.wire.identity import Identity, new_key
from penstock.workloads.pipes.wire.messages import Kind, Refused


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


@run_async
async def test_five_nodes_find_each_other_through_one_of_them() -> None:
    seed = Seen("c")
    async with started(seed):
        nodes = [seed, *(Seen(n, [seed.mesh.address]) for n in "abde")]
        async with started(*nodes[1:]):
            await soon(lambda: all(n.sees == list("abcde") for n in nodes))
            pairs = [
                (one, other.mesh.node_id) for one in nodes for other in nodes if one is not other
            ]
            assert all(other in one.mesh.peers for one, other in pairs)
            assert not any(n.lost for n in nodes)


@run_async
async def test_a_seed_may_come_later_than_who_asks_for_it() -> None:
    address = free_address()
    early = Seen("a", [address])
    async with started(early):
        await soon(lambda: address in early.mesh.unreached)
        seed = Seen("b", listen=address)
        async with started(seed):
            await soon(lambda: early.sees == seed.sees == ["a", "b"])
            assert early.mesh.unreached == {}


@run_async
async def test_of_several_seeds_one_that_answers_is_enough() -> None:
    seed = Seen("a")
    async with started(seed):
        late = Seen("b", [free_address(), seed.mesh.address, free_address()])
        async with started(late):
            await soon(lambda: late.sees == ["a", "b"])


@run_async
async def test_two_that_dial_each_other_at_once_end_with_one_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_OVERLAP", 0.05)
    one, other = free_address(), free_address()
    a, b = Seen("a", [other], listen=one), Seen("b", [one], listen=other)
    async with started(a, b):
        await soon(lambda: a.sees == b.sees == ["a", "b"])
        for number in range(200):
            assert a.mesh.send("b", Kind.END, str(number).encode())
            assert b.mesh.send("a", Kind.END, str(number).encode())
            await asyncio.sleep(0.001)
        await soon(lambda: len(a.frames) == len(b.frames) == 200)
        sent = [str(n).encode() for n in range(200)]
        assert sorted(a.frames) == sorted(("b", it) for it in sent)
        assert sorted(b.frames) == sorted(("a", it) for it in sent)
        assert not a.lost
        assert not b.lost


@run_async
async def test_who_cannot_be_reached_dials_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TURN", 0.05)
    seed = Seen("b")
    async with started(seed):
        # It is for a to dial z, and z tells an address at which nobody is.
        a, z = Seen("a", [seed.mesh.address]), Seen("z", [seed.mesh.address])
        z.mesh._advertise = free_address()
        async with started(a, z):
            await soon(lambda: a.sees == z.sees == seed.sees == ["a", "b", "z"])


@run_async
async def test_a_node_that_is_named_as_its_own_seed_does_not_mind() -> None:
    address = free_address()
    port = address.rpartition(":")[2]
    a = Seen("a", [address, f"localhost:{port}"], listen=address)
    async with started(a):
        b = Seen("b", [address])
        async with started(b):
            await soon(lambda: a.sees == b.sees == ["a", "b"])
            assert not a.refused


@run_async
async def test_who_has_another_key_does_not_come_in_and_is_told_so() -> None:
    seed = Seen("a")
    async with started(seed):
        stranger = Seen("b", [seed.mesh.address], key=new_key())
        async with started(stranger):
            await soon(lambda: stranger.mesh.unreached)
            assert "another network's key" in stranger.mesh.unreached[seed.mesh.address]
            await soon(lambda: seed.mesh.counters[Refused.WRONG_KEY])
            assert seed.sees == ["a"]
            assert stranger.sees == ["b"]


@run_async
async def test_what_a_node_publishes_is_known_everywhere() -> None:
    a = Seen("a")
    async with started(a):
        b = Seen("b", [a.mesh.address])
        async with started(b):
            await soon(lambda: a.sees == b.sees == ["a", "b"])
            b.mesh.publish(replace(b.record("b"), model="m", room=7, jobs=3))
            await soon(lambda: a.record("b").room == 7)
            assert a.record("b").jobs == 3
            # Of its address it tells itself; of the way to others too.
            assert a.record("b").address == b.mesh.address
            b.mesh.publish(replace(b.record("b"), draining=True))
            await soon(lambda: a.record("b").draining)
            assert a.record("b").links["a"] > 0


@run_async
async def test_figures_do_not_count_as_a_change_and_come_at_a_pace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "PACE", 0.2)
    a = Seen("a")
    async with started(a):
        b = Seen("b", [a.mesh.address])
        async with started(b):
            await soon(lambda: a.sees == b.sees == ["a", "b"])
            await soon(lambda: a.changes)
            before, version = a.changes, a.record("b").version
            seen = set()
            for jobs in range(1, 101):
                b.mesh.publish(replace(b.record("b"), jobs=jobs))
                await asyncio.sleep(0)
                seen.add(a.record("b").jobs)
            await soon(lambda: a.record("b").jobs == 100)
            assert a.record("b").version >= version + 100
            assert len(seen) < 20
            assert a.changes == before


@run_async
async def test_an_observer_sees_all_and_is_no_member() -> None:
    a = Seen("a")
    async with started(a):
        b = Seen("b", [a.mesh.address])
        async with started(b):
            await soon(lambda: a.sees == b.sees == ["a", "b"])
            identity = Identity.make(KEY, observer_id())
            table = await observe(b.mesh.address, identity)
            assert [r.node_id for r in table] == ["a", "b"]
            assert a.sees == b.sees == ["a", "b"]
            assert not b.lost


@run_async
async def test_who_observes_with_another_key_or_where_nobody_is_is_told_why() -> None:
    a = Seen("a")
    async with started(a):
        stranger = Identity.make(new_key(), observer_id())
        with pytest.raises(NotConnected, match="another network's key"):
            await observe(a.mesh.address, stranger)
        with pytest.raises(NotConnected):
            await observe(free_address(), stranger)


@run_async
async def test_what_a_node_sends_to_itself_comes_in_as_from_another() -> None:
    a = Seen("a")
    async with started(a):
        assert a.mesh.send("a", Kind.END, b"to ", memoryview(b"self"))
        assert a.frames == []
        await soon(lambda: a.frames == [("a", b"to self")])
        assert not a.mesh.send("nobody", Kind.END, b"")
