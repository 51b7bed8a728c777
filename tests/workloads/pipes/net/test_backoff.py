"""What is said or dialed in vain is tried again more and more rarely. Time is virtual."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine

from tests.support.pipes.nodes import MODEL
from tests.workloads.pipes.net.test_coordinating import auto, origin

from penstock.testing.clock import VirtualLoop
from penstock.workloads.pipes.net.assigning import Assigning
from penstock.workloads.pipes.net.dialer import Dialer
from penstock.workloads.pipes.net.records import NodeRecord, Table
from penstock.workloads.pipes.wire.connection import Connection, NotConnected
from penstock.workloads.pipes.wire.messages import Counters, Kind

HOUR = 3600.0


def in_virtual_time(work: Callable[[], Coroutine[None, None, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(work())


def test_an_address_at_which_nobody_answers_is_dialed_rarely_after_a_while() -> None:
    dialed: list[float] = []

    async def dial(address: str) -> Connection:
        dialed.append(asyncio.get_running_loop().time())
        raise NotConnected(f"{address}: nobody listens")

    async def work() -> None:
        caller = Dialer(dial, lambda node_id: False, lambda target, error: None)
        caller.seed("192.0.2.1:7471")
        await asyncio.sleep(3 * HOUR)
        await caller.stop()

    in_virtual_time(work)
    first = [t for t in dialed if t < 60]
    last = [t for t in dialed if 2 * HOUR <= t < 2 * HOUR + 600]
    assert len(first) > 10
    assert 5 <= len(last) <= 20, "pauses are left to chance in part"


class DeafMesh:
    """As a node sees the network that others do not take for who decides."""

    stopped = False

    def __init__(self, *records: NodeRecord) -> None:
        self.table, self.counters, self.said = Table(records), Counters(), list[float]()
        self.on_change: list[Callable[[], None]] = []

    def on(self, kind: Kind, callback: object) -> None:
        pass

    def send(self, node_id: str, kind: Kind, *buffers: bytes) -> bool:
        self.said.append(asyncio.get_running_loop().time())
        return True


def test_an_assignment_that_nobody_follows_is_repeated_rarely_after_a_while() -> None:
    mesh = DeafMesh(origin("p"), auto("a"))

    async def work() -> None:
        Assigning(mesh, "p", MODEL)  # type: ignore[arg-type]
        mesh.on_change[0]()
        await asyncio.sleep(HOUR)
        mesh.stopped = True

    in_virtual_time(work)
    assert len([t for t in mesh.said if t < 60]) >= 3
    assert len([t for t in mesh.said if t >= HOUR / 2]) <= 7
