"""The connections to other nodes: one for each that counts."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.workloads.pipes.wire.connection import Connection


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
