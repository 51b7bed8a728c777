"""How a connection to another node comes about."""

from __future__ import annotations

import asyncio
import ssl

from penstock.workloads.pipes.wire.address import parse
from penstock.workloads.pipes.wire.connection import (
    LINGER,
    Connection,
    Handler,
    NotConnected,
    Terms,
)
from penstock.workloads.pipes.wire.counters import Counters
from penstock.workloads.pipes.wire.handshake import Admit, failure_of, refusing
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
    counters: Counters | None = None,
    admit: Admit | None = None,
) -> Connection:
    """The handler was told `connected` when this returns. Raises NotConnected with the reason,
    after `timeout` seconds at the latest."""
    host, port = parse(address)
    counters = Counters() if counters is None else counters
    terms = Terms(ping=ping, silence=silence, handshake=timeout, steps=steps)
    connection = Connection(hello, handler, terms, counters, refusing(admit), outgoing=True)
    try:
        async with asyncio.timeout(timeout):
            await asyncio.get_running_loop().create_connection(
                lambda: connection,
                host or "127.0.0.1",
                port,
                ssl=identity.client,
                server_hostname="penstock",
                ssl_handshake_timeout=timeout + 1,
                ssl_shutdown_timeout=LINGER,
            )
            await connection.greeted
    except BaseException as error:
        connection.close("given up")
        if not isinstance(error, OSError):
            raise
        raise _reason(address, error, timeout, counters) from None
    return connection


def _reason(address: str, error: OSError, timeout: float, counters: Counters) -> NotConnected:
    if isinstance(error, NotConnected):
        return NotConnected(f"{address}: {error.reason}", error.what)
    if isinstance(error, TimeoutError):
        return NotConnected(f"{address}: no answer in {timeout:g} s")
    if isinstance(error, ssl.SSLError):
        what, reason = failure_of(error)
        counters.add(what)
        return NotConnected(f"{address}: {reason}", what)
    return NotConnected(f"{address}: {error}")
