"""What someone between two nodes can do: nothing but cut the line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from tests.support.pipes.ends import Here, Noted, hello, here, identity, on_both_loops

from penstock.workloads.pipes.wire.connection import Connection, Terms, connect
from penstock.workloads.pipes.wire.identity import parse
from penstock.workloads.pipes.wire.messages import Kind, Refused

SECRET = b"hidden states that nobody else is to read"


class Between:
    """Carries bytes to and fro, as someone on the way would."""

    def __init__(self) -> None:
        self.seen = bytearray()
        self.change: Callable[[bytes], bytes] = bytes
        self.writer: asyncio.StreamWriter | None = None

    @asynccontextmanager
    async def path(self, node: Here) -> AsyncIterator[str]:
        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, onward = await asyncio.open_connection(*parse(node.address))
            self.writer = onward
            async with asyncio.TaskGroup() as both:
                both.create_task(self._pass(reader, onward))
                both.create_task(self._pass(there, writer))

        server = await asyncio.start_server(carry, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                self.seen += data
                writer.write(self.change(data))
        except OSError:
            pass
        writer.close()


@asynccontextmanager
async def tapped(node: Here) -> AsyncIterator[tuple[Between, Connection, Noted]]:
    between, noted = Between(), Noted()
    node.handlers.append(noted)
    async with between.path(node) as address:
        there = await connect(
            address, identity("there"), hello("there"), noted, Terms(ping=100.0, silence=100.0)
        )
        await node.noted.connections.get()
        yield between, there, noted
        there.close("done")
        await there.wait_closed()
        await node.noted.every[0].wait_closed()


@pytest.mark.seed("000", "18.11")
@on_both_loops
async def test_nothing_can_be_read_on_the_way() -> None:
    async with here() as node, tapped(node) as (between, there, _):
        there.send(Kind.STEPS, SECRET * 1000)
        _, payload = await node.noted.frames.get()
        assert bytes(payload) == SECRET * 1000
        assert len(between.seen) > len(SECRET) * 1000
        assert SECRET not in between.seen
        assert b"boot" not in between.seen


@pytest.mark.seed("000", "17.4")
@on_both_loops
async def test_what_was_changed_on_the_way_is_not_taken() -> None:
    async with here() as node, tapped(node) as (between, there, noted):
        between.change = lambda data: data[:-1] + bytes([data[-1] ^ 1])
        there.send(Kind.STEPS, SECRET)
        assert await node.noted.losses.get() == "what came was changed on the way"
        await noted.losses.get()
        assert node.noted.frames.empty()
        assert node.counters == {Refused.TAMPERED: 1}


@on_both_loops
async def test_what_is_sent_again_on_the_way_is_not_taken() -> None:
    async with here() as node, tapped(node) as (between, there, _):
        between.change = lambda data: data + data
        there.send(Kind.STEPS, SECRET)
        await node.noted.losses.get()
        assert bytes((await node.noted.frames.get())[1]) == SECRET
        assert node.noted.frames.empty()
        assert node.counters == {Refused.TAMPERED: 1}


@pytest.mark.seed("000", "17.14")
@on_both_loops
async def test_a_recorded_connection_can_not_be_played_again() -> None:
    async with here() as node, tapped(node) as (between, there, _):
        there.send(Kind.STEPS, SECRET)
        await node.noted.frames.get()
        there.close("done")
        await node.noted.losses.get()
        reader, writer = await asyncio.open_connection(*parse(node.address))
        writer.write(bytes(between.seen))
        try:
            while await reader.read(1 << 16):
                pass
        except OSError:
            pass
        writer.close()
        assert len(node.noted.every) == 1
        assert node.noted.frames.qsize() == 1  # The BYE of the first.
