"""An engine that listens on TCP withstands clients without the token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.adapters.link import server
from penstock.adapters.link.address import Address
from penstock.adapters.link.client import Link
from penstock.adapters.link.proxy import remote_api
from penstock.app.engine import Engine
from penstock.config import load
from penstock.core.errors import Misconfigured
from penstock.testing.aio import run_async


@asynccontextmanager
async def listening(folder: Path) -> AsyncIterator[tuple[int, Link]]:
    """An engine's port, and a link to it that knows the token but is not connected."""
    flags = {"data_dir": str(folder), "listen": "tcp://127.0.0.1:0", "durability": "memory"}
    settings = load(environ={}, flags=flags)
    async with Engine(settings, []) as engine:
        address = engine.addresses[0]
        yield address.port, Link(address, token=settings.token_file.read_text())


async def ended(reader: asyncio.StreamReader) -> bool:
    async with asyncio.timeout(20):
        try:
            return await reader.read() == b""
        except ConnectionError:
            return True


async def works(link: Link) -> bool:
    async with asyncio.timeout(20):
        await link.connect()
        await link.close()
        return True


@pytest.mark.parametrize(
    "sent",
    [
        (5000).to_bytes(4, "big"),
        (3000).to_bytes(4, "big") + b"\x91" * 3000,
        (4).to_bytes(4, "big") + b"\x92\xa1\xff\x01",
    ],
    ids=["large", "nested", "not UTF-8"],
)
@run_async
async def test_an_invalid_hello_closes_the_connection(sent: bytes, tmp_path: Path) -> None:
    async with listening(tmp_path) as (port, link):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(sent)
        assert await ended(reader)
        writer.close()
        assert await works(link)


@run_async
async def test_a_silent_connection_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_HANDSHAKE_TIMEOUT", 0.05)
    async with listening(tmp_path) as (port, link):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert await ended(reader)
        writer.close()
        assert await works(link)


@run_async
async def test_unauthenticated_connections_crowd_out_only_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MAX_UNAUTHENTICATED", 5)
    async with listening(tmp_path) as (port, link):
        await link.connect()
        crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(6)]
        assert await ended(crowd[0][0])
        assert await remote_api(link).keys.list() == []
        for _, writer in crowd:
            writer.close()
        await link.close()


@pytest.mark.parametrize("host", ["192.0.2.1", "engine.example", "0.0.0.0", "2001:db8::1"])
@run_async
async def test_the_token_is_not_sent_to_another_machine_in_the_clear(host: str) -> None:
    with pytest.raises(Misconfigured, match="without encryption"):
        await Link(Address(host=host, port=7077), token="secret").connect()
