"""A process that listens, and sends every STEPS frame back. Prints where."""

from __future__ import annotations

import asyncio
import sys

from penstock.workloads.pipes.wire.connection import Connection, Terms, listen
from penstock.workloads.pipes.wire.identity import Identity
from penstock.workloads.pipes.wire.messages import Hello, Kind


class Echo:
    def connected(self, connection: Connection) -> None: ...

    def received(self, connection: Connection, kind: Kind, payload: memoryview) -> None:
        if kind is Kind.STEPS:
            connection.send(kind, payload)

    def lost(self, connection: Connection, reason: str) -> None:
        print(f"lost: {reason}", flush=True)


async def main(key: str) -> None:
    identity, hello = Identity.make(key, "child"), Hello(node_id="child", boot="boot")
    listener = await listen("127.0.0.1:0", identity, hello, Echo(), Terms(ping=0.2, silence=60.0))
    print(listener.address, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.stdin.readline()))
