"""A node among the others: connected to each, told of what each holds, and when one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from itertools import count

from msgspec.structs import replace

from penstock.workloads.pipes.net.addressing import own_address
from penstock.workloads.pipes.net.events import Events, Frame
from penstock.workloads.pipes.net.membership import Membership
from penstock.workloads.pipes.net.publishing import Publisher
from penstock.workloads.pipes.net.records import NodeRecord, new_boot
from penstock.workloads.pipes.net.table import Table
from penstock.workloads.pipes.wire.address import parse
from penstock.workloads.pipes.wire.connection import Connection
from penstock.workloads.pipes.wire.counters import Counters
from penstock.workloads.pipes.wire.dialing import connect
from penstock.workloads.pipes.wire.identity import Identity
from penstock.workloads.pipes.wire.kinds import MAX_STEPS, Kind
from penstock.workloads.pipes.wire.listener import Listener, listen
from penstock.workloads.pipes.wire.messages import Hello

RETELL = 30.0
"""Seconds between two times that all is told to somebody, whatever was told before."""
_DIAL = 5.0


class Mesh:
    """For the thread of the event loop only. Callbacks are to be quick."""

    def __init__(
        self,
        identity: Identity,
        node_id: str,
        listen: str,
        advertise: str = "",
        join: Sequence[str] = (),
        *,
        ping: float = 1.0,
        silence: float = 5.0,
        steps: int = MAX_STEPS,
        counters: Counters | None = None,
    ) -> None:
        self.node_id, self.boot = node_id, new_boot()
        self.address = ""
        """Where others reach it; known once it has started."""
        self.table = Table()
        """Nodes that are there, this one among them."""
        self.stopped = False
        self.counters = Counters() if counters is None else counters
        self._identity, self._seeds = identity, tuple(join)
        self._listen, self._advertise = listen, advertise
        self._ping, self._silence, self._steps = ping, silence, steps
        self._events = Events()
        self._membership = Membership(
            node_id, self.table, self._events, self.counters, self._dial, silence
        )
        mine = NodeRecord(node_id=node_id, boot=self.boot)
        self._publisher = Publisher(mine, lambda record: self._membership.tell([record]))
        self._listener: Listener | None = None
        self._retelling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listens; others are found from now on, and a seed may come later than this node.
        Raises Misconfigured if the address can't be had."""
        self._listener = await listen(
            self._listen,
            self._identity,
            self._hello(),
            self._membership,
            ping=self._ping,
            silence=self._silence,
            steps=self._steps,
            counters=self.counters,
            admit=self._membership.admit,
        )
        self.address = self._advertise or await own_address(self._listener.address, self._seeds)
        self.publish(self._publisher.record)
        self.join(self._seeds)
        self._retelling = asyncio.create_task(self._retell())

    def join(self, addresses: Iterable[str]) -> None:
        """Dial these too, until they answer, and again when who answered is lost. Raises
        Misconfigured for what is no address."""
        own = {self.address, self._listener.address if self._listener else ""}
        for address in addresses:
            parse(address)
            if address not in own:
                self._membership.caller.seed(address)

    async def stop(self, reason: str = "it stops") -> None:
        """Leave politely. Nobody is called back any more."""
        self.stopped = True
        self._events.stop()
        self._publisher.stop()
        if self._retelling is not None:
            self._retelling.cancel()
            await asyncio.gather(self._retelling, return_exceptions=True)
        await self._membership.stop(reason)
        if self._listener is not None:
            self._listener.close()
            await self._listener.wait_closed()

    def publish(self, record: NodeRecord) -> None:
        """Tell the others what this node is now: at once if it matters, figures within a second."""
        links = {c.peer.node_id: round(c.rtt_min * 1000, 1) for c in self._membership.peers}
        before = self._publisher.record
        self._publisher.publish(
            replace(record, node_id=self.node_id, address=self.address, links=links)
        )
        self.table.apply(self._publisher.record)
        if self._publisher.record.material() != before.material():
            self._events.change()

    def send(self, node_id: str, kind: Kind, *buffers: bytes | memoryview) -> bool:
        """Never waits. False if the node is not connected. What is sent to this node itself comes
        in a moment later, as from another."""
        if node_id == self.node_id:
            whole = memoryview(bytearray().join(buffers))
            asyncio.get_running_loop().call_soon(self._events.frame, node_id, kind, whole)
            return True
        connection = self._membership.peers.get(node_id)
        if connection is None:
            return False
        try:
            connection.send(kind, *buffers)
        except ConnectionResetError:
            return False
        return True

    def on(self, kind: Kind, callback: Frame) -> None:
        """Frames of a kind, of members only, as `callback(sender, payload)`. A BadFrame that it
        raises ends the connection, and the sender is told."""
        self._events.frames[kind] = callback

    def on_lost(self, callback: Callable[[str, str], None]) -> None:
        """Once for each node that is lost or leaves: `callback(node_id, reason)`. It is out of
        the table by then."""
        self._events.on_lost.append(callback)

    def on_back(self, callback: Callable[[str], None]) -> None:
        """A connection broke and was replaced in time. What was under way on it may be gone."""
        self._events.on_back.append(callback)

    def on_change(self, callback: Callable[[], None]) -> None:
        """Soon after something that matters in the table has changed; not for figures."""
        self._events.on_change.append(callback)

    def on_refused(self, callback: Callable[[str], None]) -> None:
        """Once, if the network has another node under the same id, with the reason."""
        self._events.on_refused.append(callback)

    def rtt(self, node_id: str) -> float:
        """Seconds there and back; 0 for this node itself, and while it is not known."""
        connection = self._membership.peers.get(node_id)
        return connection.rtt if connection is not None else 0.0

    def is_connected(self, node_id: str) -> bool:
        return node_id == self.node_id or node_id in self._membership.peers

    @property
    def unreached(self) -> dict[str, str]:
        """Addresses that were dialed in vain, and why the last time."""
        return dict(self._membership.unreached)

    def _hello(self) -> Hello:
        return Hello(node_id=self.node_id, boot=self.boot, address=self.address)

    async def _dial(self, address: str) -> Connection:
        connection = await connect(
            address,
            self._identity,
            self._hello(),
            self._membership,
            ping=self._ping,
            silence=self._silence,
            timeout=_DIAL,
            steps=self._steps,
            counters=self.counters,
            admit=self._membership.admit,
        )
        self._membership.unreached.pop(address, None)
        return connection

    async def _retell(self) -> None:
        """Whatever was missed is told again some time, to one after the other."""
        for turn in count():
            await asyncio.sleep(RETELL)
            self.publish(self._publisher.record)
            peers = list(self._membership.peers)
            if peers:
                self._membership.tell_all(peers[turn % len(peers)])
