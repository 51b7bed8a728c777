"""The buses of this project, held to the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from penstock.adapters.link.address import Address
from penstock.adapters.link.client import Link
from penstock.adapters.link.server import LinkServer
from penstock.ports.bus import Bus, MemoryBus
from penstock.testing.bus import BusContract


class TestMemoryBus(BusContract):
    @asynccontextmanager
    async def make(self, folder: Path) -> AsyncIterator[tuple[Bus, Bus]]:
        bus = MemoryBus()
        yield bus, bus
        await bus.close()


class LinkContract(BusContract):
    @asynccontextmanager
    async def make(self, folder: Path) -> AsyncIterator[tuple[Bus, Bus]]:
        bus = MemoryBus()
        server = LinkServer(bus, object(), "secret")
        address = await server.listen(self.address(folder))
        link = Link(address, token="secret")
        await link.connect()
        yield bus, link
        await link.close()
        await server.close()
        await bus.close()

    def address(self, folder: Path) -> Address:
        return Address(path=folder / "bus.sock")


class TestUnixLink(LinkContract):
    pass


class TestTcpLink(LinkContract):
    def address(self, folder: Path) -> Address:
        return Address(host="127.0.0.1", port=0)


class TestTwoLinks(LinkContract):
    """What one worker publishes reaches another: neither end is the engine's own."""

    @asynccontextmanager
    async def make(self, folder: Path) -> AsyncIterator[tuple[Bus, Bus]]:
        bus = MemoryBus()
        server = LinkServer(bus, object(), "")
        address = await server.listen(self.address(folder))
        near, far = Link(address), Link(address)
        await near.connect()
        await far.connect()
        yield near, far
        await near.close()
        await far.close()
        await server.close()
        await bus.close()
