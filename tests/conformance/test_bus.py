"""The buses of this project, held to the contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.nats import NatsServer

from penstock.adapters.link.address import Address
from penstock.adapters.link.client import Link
from penstock.adapters.link.server import LinkServer
from penstock.adapters.nats.connection import NatsOptions
from penstock.adapters.nats.tunnel import NatsDialer, NatsListener
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


class TestNats(BusContract):
    """An engine and a worker that meet at a NATS server."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def server(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        server = NatsServer(tmp_path_factory.mktemp("nats"))
        cls.url = server.url
        yield
        server.kill()

    url = ""

    def link(self, name: str) -> tuple[Link, NatsDialer]:
        options = NatsOptions(url=self.url)
        dial = NatsDialer(options, name)
        return Link(Address(via=self.url), token="secret", dial=dial), dial

    @asynccontextmanager
    async def joined(self, *names: str) -> AsyncIterator[tuple[Bus, list[Link]]]:
        bus = MemoryBus()
        server = LinkServer(bus, object(), "secret")
        listener = NatsListener(NatsOptions(url=self.url), server.accept, bus)
        await listener.start()
        listening = asyncio.create_task(listener.run())
        links = [self.link(name) for name in names]
        for link, _ in links:
            await link.connect()
        yield bus, [link for link, _ in links]
        for link, dial in links:
            await link.close()
            await dial.close()
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await server.close()
        await bus.close()

    @asynccontextmanager
    async def make(self, folder: Path) -> AsyncIterator[tuple[Bus, Bus]]:
        async with self.joined("w1") as (bus, links):
            yield bus, links[0]


class TestTwoNatsLinks(TestNats):
    @asynccontextmanager
    async def make(self, folder: Path) -> AsyncIterator[tuple[Bus, Bus]]:
        async with self.joined("w1", "w2") as (_, links):
            yield links[0], links[1]
