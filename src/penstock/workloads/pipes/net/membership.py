"""Who is there: what connections tell of nodes, and what is made of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from penstock.workloads.pipes.net.dialer import Dialer, Target
from penstock.workloads.pipes.net.events import Events
from penstock.workloads.pipes.net.peers import Peers
from penstock.workloads.pipes.net.records import NodeRecord
from penstock.workloads.pipes.net.states import BAD_RECORD, read_state, state_of
from penstock.workloads.pipes.net.table import Table
from penstock.workloads.pipes.wire.connection import LINGER, Connection, NotConnected
from penstock.workloads.pipes.wire.counters import Counters, Refused
from penstock.workloads.pipes.wire.frames import BadFrame
from penstock.workloads.pipes.wire.kinds import Kind
from penstock.workloads.pipes.wire.messages import Bye, Hello, decode, encode

log = logging.getLogger(__name__)

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


class Membership:
    """The handler of all connections of a node.

    A node is a member while a connection to it stands, or broke less than a moment ago. What is
    in the table was said by the node itself over such a connection.
    """

    def __init__(
        self,
        node_id: str,
        table: Table,
        events: Events,
        counters: Counters,
        dial: Callable[[str], Awaitable[Connection]],
        silence: float,
    ) -> None:
        self.peers = Peers(node_id)
        self.caller = Dialer(dial, self.peers.__contains__, self._unanswered)
        self.unreached: dict[str, str] = {}
        """Addresses that were dialed in vain, and why."""
        self._node_id, self._table, self._events = node_id, table, events
        self._counters, self._silence = counters, silence
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
        self._stopping = False

    def tell(self, records: Iterable[NodeRecord], but: Connection | None = None) -> None:
        state = state_of(records)
        for connection in (*self.peers, *self._observers):
            if connection is not but:
                _send_state(connection, state)

    def tell_all(self, connection: Connection) -> None:
        _send_state(connection, state_of(self._table.live()))

    async def stop(self, reason: str) -> None:
        self._stopping = True
        for timer in self._grace.values():
            timer.cancel()
        await self.caller.stop()
        for connection in self._all:
            with suppress(ConnectionResetError):
                connection.send(Kind.BYE, encode(Bye(reason, LEFT)))
            connection.close(reason)
        # What was said last has to be out before the loop may end.
        await asyncio.gather(*(connection.wait_closed() for connection in self._all))

    def admit(self, peer: Hello) -> str:
        """Why a peer can't come in; "" lets it in."""
        if self._stopping:
            return f"{self._node_id} is leaving"
        known = self.peers.get(peer.node_id)
        if known is None or known.closed is not None or known.peer.boot == peer.boot:
            return ""
        return f"the id {peer.node_id!r} {_TAKEN}"

    # -- what connections call ---------------------------------------------------------------

    def connected(self, connection: Connection) -> None:
        peer = connection.peer
        self._all[connection] = asyncio.get_running_loop().time()
        if peer.observer:
            self._observers.add(connection)
            self.tell_all(connection)
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
        self.caller.reached(peer.node_id, peer.address)
        self.tell_all(connection)

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
            self._events.back(peer.node_id)

    def received(self, connection: Connection, kind: Kind, payload: memoryview) -> None:
        if kind is Kind.BYE:
            if decode(payload, Bye).what == LEFT:
                self._leaving.add(connection)
        elif connection.peer.observer:
            raise BadFrame("an observer only looks")
        elif kind is Kind.STATE:
            for record in read_state(payload, self._counters):
                self._told(connection, record)
        else:
            self._events.frame(connection.peer.node_id, kind, payload)

    def _told(self, connection: Connection, record: NodeRecord) -> None:
        peer = connection.peer
        if record.node_id == self._node_id:
            return
        if record.node_id != peer.node_id:
            if self._gone.get(record.node_id) != record.boot:
                after = 0.0 if self._node_id < record.node_id else TURN
                self.caller.heard(record.node_id, record.address, after)
            return
        if record.boot != peer.boot:
            self._counters.add(BAD_RECORD)
            return
        known = self._table.get(record.node_id)
        if not self._table.apply(record):
            return
        if known is None:
            self.caller.reached(record.node_id, record.address)
            self.tell([record], but=connection)
        else:
            for observer in self._observers:
                _send_state(observer, state_of([record]))
        if known is None or known.material() != record.material():
            self._events.change()

    def lost(self, connection: Connection, reason: str) -> None:
        asyncio.get_running_loop().call_later(LINGER, self._all.pop, connection, None)
        self._observers.discard(connection)
        left = connection in self._leaving
        self._leaving.discard(connection)
        if not self.peers.remove(connection) or self._stopping:
            return
        node_id = connection.peer.node_id
        if left:
            self._gone[node_id] = connection.peer.boot
            self.caller.forget(node_id)
            self._lose(node_id, reason)
        elif reason.startswith("silent"):
            self._lose(node_id, reason)
            self.caller.lost(node_id, 0.0)
        else:
            loop = asyncio.get_running_loop()
            self._grace[node_id] = loop.call_later(GRACE, self._lose, node_id, reason)
            lived = loop.time() - self._all[connection]
            # Both sides may dial; not in the same moment if it can be helped.
            after = 0.0 if connection.outgoing else GRACE / 5
            self.caller.lost(node_id, after if lived > _SHORT else after + GRACE / 2)

    def _lose(self, node_id: str, reason: str) -> None:
        timer = self._grace.pop(node_id, None)
        if timer is not None:
            timer.cancel()
        if self._members.pop(node_id, None) is not None:
            self._table.lose(node_id)
            log.info("%s is lost: %s", node_id, reason, extra={"is_loss": True})
            self._events.lost(node_id, reason)
            self._events.change()

    # -- what dialing finds -------------------------------------------------------------------

    def _unanswered(self, target: Target, error: NotConnected) -> None:
        if self.unreached.get(target.address) != error.reason:
            log.info("%s", error.reason)
            self.unreached[target.address] = error.reason
        if isinstance(error.__context__, ConnectionRefusedError) and target.node_id in self._grace:
            self._lose(target.node_id, "it is gone: nothing listens at its address")
        if error.what == Refused.OWN_NODE_ID:
            if self._was_itself():
                self.caller.drop(target)
            else:
                self._refused(error.reason, surely=True)
        elif error.what == Refused.SECOND_CONNECTION or _TAKEN in error.reason:
            self._refused(error.reason)
        else:
            self._refused_since = None

    def _was_itself(self) -> bool:
        """A node that is named as its own seed dials itself, and refuses itself."""
        refusals = self._counters[Refused.OWN_NODE_ID]
        itself = refusals > self._own_refusals
        self._own_refusals = refusals
        return itself

    def _refused(self, reason: str, *, surely: bool = False) -> None:
        """Unless it is sure, it may be that the process before this one is not known for dead
        yet. And who has a connection is known to somebody as itself."""
        now = asyncio.get_running_loop().time()
        if self._refused_since is None:
            self._refused_since = now
        late = now - self._refused_since > self._silence + GRACE
        if (surely or late) and not self.peers and not self._told_refused:
            self._told_refused = True
            self._events.refused(reason)


def _send_state(connection: Connection, state: bytes) -> None:
    with suppress(ConnectionResetError):
        connection.send(Kind.STATE, state)
