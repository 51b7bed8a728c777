"""Peers that are real processes, and are killed and stopped."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.pipes.ends import Noted

from penstock.testing.aio import run_async
from penstock.workloads.pipes.wire.connection import Connection, Terms, connect
from penstock.workloads.pipes.wire.identity import Identity, new_key
from penstock.workloads.pipes.wire.messages import Counters, Hello, Kind, Refused

CHILD = Path(__file__).parents[3] / "support" / "pipes" / "wire_child.py"
KEY = new_key()


@asynccontextmanager
async def child() -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, CHILD, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(KEY.encode() + b"\n")
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@asynccontextmanager
async def dialed(address: str, noted: Noted, counters: Counters) -> AsyncIterator[Connection]:
    connection = await connect(
        address,
        Identity.make(KEY, "test"),
        Hello(node_id="test", boot="boot"),
        noted,
        Terms(ping=0.1, silence=1.0, handshake=30.0),
        counters,
    )
    try:
        yield connection
    finally:
        connection.abort()
        await connection.wait_closed()


@run_async
async def test_a_stopped_peer_is_found_by_the_deadline_and_may_come_back() -> None:
    noted, counters = Noted(), Counters()
    async with child() as (process, address):
        assert process.stdout is not None
        async with dialed(address, noted, counters) as connection:
            connection.send(Kind.STEPS, b"there?")
            assert (await noted.frames.get())[1] == b"there?"
            process.send_signal(signal.SIGSTOP)
            connection.send(Kind.STEPS, b"still?")
            assert (await noted.losses.get()).startswith("silent for 1.")
            assert counters == {Refused.SILENT: 1}
            assert noted.frames.empty()
        process.send_signal(signal.SIGCONT)
        # It was told by the closed socket, and lets the same node in again.
        assert (await process.stdout.readline()).startswith(b"lost: ")
        async with dialed(address, noted, counters) as connection:
            connection.send(Kind.STEPS, b"again")
            assert (await noted.frames.get())[1] == b"again"


@run_async
async def test_a_killed_peer_is_lost_at_once() -> None:
    noted, counters = Noted(), Counters()
    async with child() as (process, address), dialed(address, noted, counters):
        process.kill()
        reason = await noted.losses.get()
        assert not reason.startswith("silent")
        assert not counters
