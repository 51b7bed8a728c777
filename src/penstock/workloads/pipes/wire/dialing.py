"""How a connection to another node comes about."""

from __future__ import annotations

import asyncio

from penstock.ports.tls import Tls
from penstock.workloads.pipes.wire.address import parse
from penstock.workloads.pipes.wire.connection import (
    MAX_QUEUE,
    Admit,
    Connection,
    Handler,
    NotConnected,
    Terms,
    refusing,
)
from penstock.workloads.pipes.wire.counters import Counters
from penstock.workloads.pipes.wire.identity import Identity
from penstock.workloads.pipes.wire.kinds import MAX_STEPS
from penstock.workloads.pipes.wire.messages import Hello


async def connect(
    address: str,
    identity: Identity,
    hello: Hello,
    handler: Handler,
    *,
    ping: float = 1.0,
    silence: float = 5.0,
    timeout: float = 10.0,
    steps: int = MAX_STEPS,
    queue: int = MAX_QUEUE,
    counters: Counters | None = None,
    admit: Admit | None = None,
) -> Connection:
    """The handler was told `connected` when this returns. Raises NotConnected with the reason,
    after `timeout` seconds at the latest."""
    host, port = parse(address)
    connection = Connection(
        Tls(identity.client, server_side=False),
        hello,
        handler,
        Terms(ping=ping, silence=silence, handshake=timeout, steps=steps, queue=queue),
        Counters() if counters is None else counters,
        outgoing=True,
        admit=refusing(admit),
    )
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout):
            await loop.create_connection(lambda: connection, host or "127.0.0.1", port)
            await connection.greeted
    except asyncio.CancelledError:
        connection.abort()
        raise
    except Exception as error:
        connection.close("given up")
        await connection.wait_closed()
        if isinstance(error, NotConnected):
            raise NotConnected(f"{address}: {error.reason}", error.what) from None
        if isinstance(error, TimeoutError):
            raise NotConnected(f"{address}: no answer in {timeout:g} s") from None
        if isinstance(error, OSError | ValueError):  # A host that can't even be looked up.
            raise NotConnected(f"{address}: {error}") from None
        raise
    return connection
