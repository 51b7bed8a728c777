"""A look at a network from outside."""

from __future__ import annotations

import asyncio
import os

from penstock.workloads.pipes.net.records import new_boot
from penstock.workloads.pipes.net.states import read_state
from penstock.workloads.pipes.net.table import Table
from penstock.workloads.pipes.wire.connection import Connection, NotConnected
from penstock.workloads.pipes.wire.counters import Counters
from penstock.workloads.pipes.wire.dialing import connect
from penstock.workloads.pipes.wire.identity import Identity
from penstock.workloads.pipes.wire.kinds import Kind
from penstock.workloads.pipes.wire.messages import Hello


def observer_id() -> str:
    """A name that no node has; the Identity of an observer is made with one."""
    return f"observer-{os.urandom(6).hex()}"


async def observe(address: str, identity: Identity, *, timeout: float = 5.0) -> Table:
    """The nodes that the one at `address` knows to be there. Raises NotConnected."""
    watch = _Look()
    hello = Hello(node_id=identity.node_id, boot=new_boot(), observer=True)
    connection = await connect(address, identity, hello, watch, timeout=timeout)
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
