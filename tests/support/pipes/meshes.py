"""Nodes that only know each other: in this process, or in one of their own."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.workloads.pipes.net.mesh import Mesh
from penstock.workloads.pipes.net.records import NodeRecord
from penstock.workloads.pipes.wire.identity import Identity, new_key
from penstock.workloads.pipes.wire.messages import Kind

KEY = new_key()


class Seen:
    """A mesh, and what it told."""

    def __init__(
        self,
        node_id: str,
        join: Sequence[str] = (),
        *,
        key: str = KEY,
        listen: str = "127.0.0.1:0",
        ping: float = 0.1,
        silence: float = 1.0,
    ) -> None:
        identity = Identity.make(key, node_id)
        self.mesh = Mesh(identity, node_id, listen, join=join, ping=ping, silence=silence)
        self.lost: list[tuple[str, str]] = []
        self.back: list[str] = []
        self.refused: list[str] = []
        self.frames: list[tuple[str, bytes]] = []
        self.changes = 0
        self.mesh.on_lost.append(lambda node_id, reason: self.lost.append((node_id, reason)))
        self.mesh.on_back.append(self.back.append)
        self.mesh.on_refused.append(self.refused.append)
        self.mesh.on_change.append(self._changed)
        self.mesh.on(Kind.END, lambda sender, it: self.frames.append((sender, bytes(it))))

    def _changed(self) -> None:
        self.changes += 1

    @property
    def sees(self) -> list[str]:
        return [r.node_id for r in self.mesh.table.live()]

    def record(self, node_id: str) -> NodeRecord:
        record = self.mesh.table.get(node_id)
        assert record is not None
        return record

    def cut(self, node_id: str) -> None:
        """As a network does it that forgets a connection: without a word."""
        connection = self.mesh.peers.get(node_id)
        assert connection is not None
        assert connection._transport is not None
        connection._transport.abort()


@asynccontextmanager
async def started(*nodes: Seen) -> AsyncIterator[None]:
    for node in nodes:
        await node.mesh.start()
    try:
        yield
    finally:
        for node in nodes:
            await node.mesh.stop("the test is over")


@asynccontextmanager
async def child(node_id: str, join: str, listen: str = "127.0.0.1:0") -> AsyncIterator[Child]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).with_name("mesh_child.py")),
        KEY,
        node_id,
        join,
        listen,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        address = (await asyncio.wait_for(process.stdout.readline(), 20)).decode().strip()
        yield Child(process, address)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class Child:
    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process, self.address = process, address
