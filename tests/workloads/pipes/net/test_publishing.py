"""How often a node tells of itself, and which of two connections counts."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from msgspec.structs import replace

from penstock.testing.aio import run_async
from penstock.workloads.pipes.net.mesh import Peers, Publisher
from penstock.workloads.pipes.net.records import NodeRecord
from penstock.workloads.pipes.wire.messages import Hello

MINE = NodeRecord(node_id="a", boot="1")


@run_async
async def test_what_matters_is_told_at_once_and_figures_later_together() -> None:
    told: list[NodeRecord] = []
    publisher = Publisher(MINE, told.append)
    publisher.publish(replace(MINE, room=1))
    publisher.publish(replace(MINE, room=2))
    assert [r.room for r in told] == [1, 2]
    for jobs in range(1, 9):
        publisher.publish(replace(MINE, room=2, jobs=jobs))
    assert len(told) == 2
    assert publisher.record.jobs == 8
    # With what matters the figures go too.
    publisher.publish(replace(MINE, room=3, jobs=9))
    assert (told[-1].room, told[-1].jobs) == (3, 9)
    versions = [r.version for r in told]
    assert versions == sorted(set(versions))
    publisher.stop()


@run_async
async def test_figures_are_told_in_the_end() -> None:
    told: asyncio.Queue[NodeRecord] = asyncio.Queue()
    publisher = Publisher(MINE, told.put_nowait)
    publisher.publish(replace(MINE, jobs=1))
    # The first is due at once: nothing was told before.
    assert (await told.get()).jobs == 1
    publisher.publish(replace(MINE, jobs=2))
    await asyncio.sleep(0)
    assert told.empty()
    publisher.flush()
    assert (await told.get()).jobs == 2


@run_async
async def test_what_is_not_new_is_not_told() -> None:
    told: list[NodeRecord] = []
    publisher = Publisher(MINE, told.append)
    publisher.publish(replace(MINE, room=1))
    publisher.publish(replace(MINE, room=1, version=77, boot="other"))
    assert len(told) == 1
    assert publisher.record.boot == "1"


@dataclass(eq=False)
class Line:
    """What `Peers` looks at of a connection."""

    peer: Hello
    outgoing: bool
    closed: str | None = field(default=None)


def line(to: str, *, outgoing: bool) -> Line:
    return Line(Hello(node_id=to, boot="1"), outgoing)


def test_both_ends_keep_the_connection_that_the_smaller_id_dialed() -> None:
    for first in (True, False):
        here, there = Peers("a"), Peers("b")
        # Two connections, each outgoing at one end; they come up in either order.
        by_a = (line("b", outgoing=True), line("a", outgoing=False))
        by_b = (line("b", outgoing=False), line("a", outgoing=True))
        for at_a, at_b in (by_a, by_b) if first else (by_b, by_a):
            here.add(at_a)  # type: ignore[arg-type]
            there.add(at_b)  # type: ignore[arg-type]
        assert here.get("b") is by_a[0]
        assert there.get("a") is by_a[1]


def test_a_connection_that_is_dialed_again_replaces_the_one_before() -> None:
    peers = Peers("a")
    old, new = line("b", outgoing=False), line("b", outgoing=False)
    assert peers.add(old) is None  # type: ignore[arg-type]
    assert peers.add(new) is old  # type: ignore[arg-type]
    assert not peers.remove(old)  # type: ignore[arg-type]
    assert "b" in peers
    assert peers.remove(new)  # type: ignore[arg-type]
    assert "b" not in peers


def test_a_closed_connection_is_never_preferred() -> None:
    peers = Peers("a")
    old, new = line("b", outgoing=True), line("b", outgoing=False)
    peers.add(old)  # type: ignore[arg-type]
    old.closed = "broken"
    peers.add(new)  # type: ignore[arg-type]
    assert peers.get("b") is new
