"""A node among the others: connected to each, told of what each holds, and when one is lost.

A node is a member while a connection to it stands, or broke less than a moment ago.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count

from msgspec.structs import replace

from penstock.workloads.pipes.net.dialer import Dialer, Target
from penstock.workloads.pipes.net.records import (
    BAD_RECORD,
    NodeRecord,
    Table,
    new_boot,
    read_state,
    state_of,
)
from penstock.workloads.pipes.wire.connection import (
    LINGER,
    Connection,
    Listener,
    NotConnected,
    Terms,
    connect,
    listen,
)
from penstock.workloads.pipes.wire.identity import Identity, own_address, parse
from penstock.workloads.pipes.wire.messages import (
    MAX_STEPS,
    BadFrame,
    Bye,
    Counters,
    Hello,
    Kind,
    Refused,
    decode,
    encode,
)

log = logging.getLogger(__name__)

Frame = Callable[[str, memoryview], None]


class Peers:
    """Two nodes may dial each other in the same moment. Both then take the connection that the
    smaller id has dialed; the other one is read until it is closed, and not written to."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._current: dict[str, Connection] = {}

    def add(self, connection: Connection) -> Connection | None:
        """Take a connection; the one that is not to be used any more, if there were two."""
        peer = connection.peer.node_id
        old = self._current.get(peer)
        if old is not None and old.closed is None and self._rather(old, connection):
            return connection
        self._current[peer] = connection
        return old

    def _rather(self, old: Connection, new: Connection) -> bool:
        # Of two that were dialed from the same side, the other side knows the first for dead.
        if old.outgoing == new.outgoing:
            return False
        return old.outgoing == (self._node_id < old.peer.node_id)

    def remove(self, connection: Connection) -> bool:
        """Whether it was the one that counts."""
        peer = connection.peer.node_id
        if self._current.get(peer) is not connection:
            return False
        del self._current[peer]
        return True

    def get(self, node_id: str) -> Connection | None:
        return self._current.get(node_id)

    def __contains__(self, node_id: object) -> bool:
        return node_id in self._current

    def __iter__(self) -> Iterator[Connection]:
        return iter(list(self._current.values()))

    def __len__(self) -> int:
        return len(self._current)


PACE = 1.0
"""Seconds between two records that differ in figures only."""


class Publisher:
    """Tells of what matters at once, and of figures no more often than every second."""

    def __init__(self, record: NodeRecord, tell: Callable[[NodeRecord], None]) -> None:
        self.record = record
        """The newest, told or not."""
        self._told = record
        self._told_at = float("-inf")
        self._tell = tell
        self._timer: asyncio.TimerHandle | None = None

    def publish(self, record: NodeRecord) -> None:
        """Its boot and version are seen to here."""
        if replace(record, boot=self.record.boot, version=self.record.version) == self.record:
            return
        self.record = replace(record, boot=self.record.boot, version=self.record.version + 1)
        if self.record.material() != self._told.material():
            self.flush()
        elif self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(loop.time(), self._told_at + PACE), self.flush)

    def flush(self) -> None:
        self.stop()
        self._told, self._told_at = self.record, asyncio.get_running_loop().time()
        self._tell(self.record)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


GRACE = 1.0
"""Seconds in which a connection that broke may be replaced before its node counts as lost."""
TURN = 2.0
"""Of two nodes the one with the smaller id dials. The other waits this long, and then tries
itself: some can be reached in one direction only."""
LEFT = "left"
"""In a BYE: the node goes, not only the connection."""
_OVERLAP = 1.0
_SHORT = 0.2
"""A connection that lived no longer is not dialed again in the same moment: whatever ended it may
do so again."""
_TAKEN = "is taken by another process"


RETELL = 30.0
"""Seconds between two times that all is told to somebody, whatever was told before."""
_DIAL = 5.0


class Mesh:
    """For the thread of the event loop only. Callbacks are to be quick, and are called in the order
    in which they were given. It is the handler of all connections of its node.

    What is in the table was said by the node itself, over a connection to it.
    """

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
        self.on_lost: list[Callable[[str, str], None]] = []
        """Once for each node that is lost or leaves: its id, and why. It is out of the table by
        then."""
        self.on_back: list[Callable[[str], None]] = []
        """A connection to a node broke and was replaced in time. What was under way on it may be
        gone."""
        self.on_change: list[Callable[[], None]] = []
        """Soon after something that matters in the table has changed; not for figures."""
        self.on_refused: list[Callable[[str], None]] = []
        """Once, if the network has another node under the same id, with the reason."""
        self.peers = Peers(node_id)
        self.unreached: dict[str, str] = {}
        """Addresses that were dialed in vain, and why the last time."""
        self._identity, self._seeds = identity, tuple(join)
        self._listen, self._advertise = listen, advertise
        self._terms = Terms(ping=ping, silence=silence, steps=steps)
        self._frames: dict[Kind, Frame] = {}
        self._dialer = Dialer(self._dial, self.peers.__contains__, self._unanswered)
        mine = NodeRecord(node_id=node_id, boot=self.boot)
        self._publisher = Publisher(mine, lambda record: self._tell([record]))
        self._listener: Listener | None = None
        self._retelling: asyncio.Task[None] | None = None
        self._changing: asyncio.Handle | None = None
        self._members: dict[str, Hello] = {}
        self._grace: dict[str, asyncio.TimerHandle] = {}
        self._all: dict[Connection, float] = {}
        """Those that have not wholly ended, and when they came."""
        self._observers: set[Connection] = set()
        self._leaving: set[Connection] = set()
        self._gone: dict[str, str] = {}
        self._refused_since: float | None = None
        self._told_refused = False
        self._own_refusals = 0

    async def start(self) -> None:
        """Listens; others are found from now on, and a seed may come later than this node.
        Raises Misconfigured if the address can't be had."""
        self._listener = await listen(
            self._listen,
            self._identity,
            self._hello(),
            self,
            self._terms,
            self.counters,
            self.admit,
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
                self._dialer.seed(address)

    async def stop(self, reason: str = "it stops") -> None:
        """Leave politely. Nobody is called back any more."""
        self.stopped = True
        self._publisher.stop()
        for timer in (*self._grace.values(), self._changing):
            if timer is not None:
                timer.cancel()
        if self._retelling is not None:
            self._retelling.cancel()
            await asyncio.gather(self._retelling, return_exceptions=True)
        await self._dialer.stop()
        for connection in self._all:
            with suppress(ConnectionResetError):
                connection.send(Kind.BYE, encode(Bye(reason, LEFT)))
            connection.close(reason)
        # What was said last has to be out before the loop may end.
        await asyncio.gather(*(connection.wait_closed() for connection in self._all))
        if self._listener is not None:
            self._listener.close()
            await self._listener.wait_closed()

    def publish(self, record: NodeRecord) -> None:
        """Tell the others what this node is now: at once if it matters, figures within a second."""
        links = {c.peer.node_id: round(c.rtt_min * 1000, 1) for c in self.peers}
        before = self._publisher.record
        self._publisher.publish(
            replace(record, node_id=self.node_id, address=self.address, links=links)
        )
        self.table.apply(self._publisher.record)
        if self._publisher.record.material() != before.material():
            self._change()

    def send(self, node_id: str, kind: Kind, *buffers: bytes | memoryview) -> bool:
        """Never waits. False if the node is not connected. What is sent to this node itself comes
        in a moment later, as from another."""
        if node_id == self.node_id:
            whole = memoryview(bytearray().join(buffers))
            asyncio.get_running_loop().call_soon(self._frame, node_id, kind, whole)
            return True
        connection = self.peers.get(node_id)
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
        self._frames[kind] = callback

    # -- callbacks --------------------------------------------------------------------

    def _frame(self, sender: str, kind: Kind, payload: memoryview) -> None:
        callback = self._frames.get(kind)
        if callback is not None and not self.stopped:
            callback(sender, payload)

    def _call(self, callbacks: Sequence[Callable[..., None]], *args: str) -> None:
        for callback in () if self.stopped else callbacks:
            callback(*args)

    def _change(self) -> None:
        """Soon, and once for all that happens until then."""
        if self._changing is None and not self.stopped:
            self._changing = asyncio.get_running_loop().call_soon(self._changed)

    def _changed(self) -> None:
        self._changing = None
        self._call(self.on_change)

    # -- what is said -----------------------------------------------------------------

    def _hello(self) -> Hello:
        return Hello(node_id=self.node_id, boot=self.boot, address=self.address)

    async def _dial(self, address: str) -> Connection:
        terms = dataclasses.replace(self._terms, handshake=_DIAL)
        connection = await connect(
            address, self._identity, self._hello(), self, terms, self.counters, self.admit
        )
        self.unreached.pop(address, None)
        return connection

    async def _retell(self) -> None:
        """Whatever was missed is told again some time, to one after the other."""
        for turn in count():
            await asyncio.sleep(RETELL)
            self.publish(self._publisher.record)
            peers = list(self.peers)
            if peers:
                self._tell_all(peers[turn % len(peers)])

    def _tell(self, records: Iterable[NodeRecord], but: Connection | None = None) -> None:
        state = state_of(records)
        for connection in (*self.peers, *self._observers):
            if connection is not but:
                _send_state(connection, state)

    def _tell_all(self, connection: Connection) -> None:
        _send_state(connection, state_of(self.table.live()))

    def admit(self, peer: Hello) -> str:
        """Why a peer can't come in; "" lets it in."""
        if self.stopped:
            return f"{self.node_id} is leaving"
        known = self.peers.get(peer.node_id)
        if known is None or known.closed is not None or known.peer.boot == peer.boot:
            return ""
        return f"the id {peer.node_id!r} {_TAKEN}"

    # -- what connections call (Handler) ------------------------------------------------

    def connected(self, connection: Connection) -> None:
        peer = connection.peer
        self._all[connection] = asyncio.get_running_loop().time()
        if peer.observer:
            self._observers.add(connection)
            self._tell_all(connection)
            return
        unused = self.peers.add(connection)
        if unused is not None:
            # It may still bring what was sent before the other side knew of this one.
            loop = asyncio.get_running_loop()
            loop.call_later(_OVERLAP, unused.close, "there is another connection")
        if unused is connection:
            return
        self._refused_since = None
        # Of two that met in the same moment both are well. One that stood for a while was known
        # for dead at the other end, and what was under way on it may be gone.
        now = asyncio.get_running_loop().time()
        is_dead = unused is not None and now - self._all.get(unused, now) > _OVERLAP
        self._came(peer, is_dead)
        self._dialer.reached(peer.node_id, peer.address)
        self._tell_all(connection)

    def _came(self, peer: Hello, replaces: bool) -> None:
        known = self._members.get(peer.node_id)
        if known is not None and known.boot != peer.boot:
            self._lose(peer.node_id, "it was started anew")
        timer = self._grace.pop(peer.node_id, None)
        self._members[peer.node_id] = peer
        self._gone.pop(peer.node_id, None)
        if timer is not None:
            timer.cancel()
        if timer is not None or replaces:
            self._call(self.on_back, peer.node_id)

    def received(self, connection: Connection, kind: Kind, payload: memoryview) -> None:
        if kind is Kind.BYE:
            if decode(payload, Bye).what == LEFT:
                self._leaving.add(connection)
        elif connection.peer.observer:
            raise BadFrame("an observer only looks")
        elif kind is Kind.STATE:
            for record in read_state(payload, self.counters):
                self._told(connection, record)
        else:
            self._frame(connection.peer.node_id, kind, payload)

    def _told(self, connection: Connection, record: NodeRecord) -> None:
        peer = connection.peer
        if record.node_id == self.node_id:
            return
        if record.node_id != peer.node_id:
            if self._gone.get(record.node_id) != record.boot:
                after = 0.0 if self.node_id < record.node_id else TURN
                self._dialer.heard(record.node_id, record.address, after)
            return
        if record.boot != peer.boot:
            self.counters.add(BAD_RECORD)
            return
        known = self.table.get(record.node_id)
        if not self.table.apply(record):
            return
        if known is None:
            self._dialer.reached(record.node_id, record.address)
            self._tell([record], but=connection)
        else:
            for observer in self._observers:
                _send_state(observer, state_of([record]))
        if known is None or known.material() != record.material():
            self._change()

    def lost(self, connection: Connection, reason: str) -> None:
        asyncio.get_running_loop().call_later(LINGER, self._all.pop, connection, None)
        self._observers.discard(connection)
        left = connection in self._leaving
        self._leaving.discard(connection)
        if not self.peers.remove(connection) or self.stopped:
            return
        node_id = connection.peer.node_id
        if left:
            self._gone[node_id] = connection.peer.boot
            self._dialer.forget(node_id)
            self._lose(node_id, reason)
        elif reason.startswith("silent"):
            self._lose(node_id, reason)
            self._dialer.lost(node_id, 0.0)
        else:
            loop = asyncio.get_running_loop()
            self._grace[node_id] = loop.call_later(GRACE, self._lose, node_id, reason)
            lived = loop.time() - self._all[connection]
            # Both sides may dial; not in the same moment if it can be helped.
            after = 0.0 if connection.outgoing else GRACE / 5
            self._dialer.lost(node_id, after if lived > _SHORT else after + GRACE / 2)

    def _lose(self, node_id: str, reason: str) -> None:
        timer = self._grace.pop(node_id, None)
        if timer is not None:
            timer.cancel()
        if self._members.pop(node_id, None) is not None:
            self.table.lose(node_id)
            log.info("%s is lost: %s", node_id, reason, extra={"is_loss": True})
            self._call(self.on_lost, node_id, reason)
            self._change()

    # -- what dialing finds -------------------------------------------------------------------

    def _unanswered(self, target: Target, error: NotConnected) -> None:
        if self.unreached.get(target.address) != error.reason:
            log.info("%s", error.reason)
            self.unreached[target.address] = error.reason
        if isinstance(error.__context__, ConnectionRefusedError) and target.node_id in self._grace:
            self._lose(target.node_id, "it is gone: nothing listens at its address")
        if error.what == Refused.OWN_NODE_ID:
            if self._was_itself():
                self._dialer.drop(target)
            else:
                self._refused(error.reason, surely=True)
        elif error.what == Refused.SECOND_CONNECTION or _TAKEN in error.reason:
            self._refused(error.reason)
        else:
            self._refused_since = None

    def _was_itself(self) -> bool:
        """A node that is named as its own seed dials itself, and refuses itself."""
        refusals = self.counters[Refused.OWN_NODE_ID]
        itself = refusals > self._own_refusals
        self._own_refusals = refusals
        return itself

    def _refused(self, reason: str, *, surely: bool = False) -> None:
        """Unless it is sure, it may be that the process before this one is not known for dead
        yet. And who has a connection is known to somebody as itself."""
        now = asyncio.get_running_loop().time()
        if self._refused_since is None:
            self._refused_since = now
        late = now - self._refused_since > self._terms.silence + GRACE
        if (surely or late) and not self.peers and not self._told_refused:
            self._told_refused = True
            self._call(self.on_refused, reason)


def _send_state(connection: Connection, state: bytes) -> None:
    with suppress(ConnectionResetError):
        connection.send(Kind.STATE, state)


def observer_id() -> str:
    """A name that no node has; the Identity of an observer is made with one."""
    return f"observer-{os.urandom(6).hex()}"


async def observe(address: str, identity: Identity, *, timeout: float = 5.0) -> Table:
    """The nodes that the one at `address` knows to be there. Raises NotConnected."""
    watch = _Look()
    hello = Hello(node_id=identity.node_id, boot=new_boot(), observer=True)
    connection = await connect(address, identity, hello, watch, Terms(handshake=timeout))
    try:
        async with asyncio.timeout(timeout):
            return await watch.seen
    except TimeoutError:
        raise NotConnected(f"{address}: it reports nothing about its network") from None
    finally:
        connection.close("seen")
        await connection.wait_closed()


class _Look:
    def __init__(self) -> None:
        self.seen: asyncio.Future[Table] = asyncio.get_running_loop().create_future()

    def connected(self, connection: Connection) -> None:
        pass

    def received(self, connection: Connection, kind: Kind, payload: memoryview) -> None:
        if kind is Kind.STATE and not self.seen.done():
            self.seen.set_result(Table(read_state(payload, Counters())))

    def lost(self, connection: Connection, reason: str) -> None:
        if not self.seen.done():
            self.seen.set_exception(NotConnected(reason))
