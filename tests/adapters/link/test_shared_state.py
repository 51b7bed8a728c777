"""Small values that all workers of an engine share: beside it, over a link, and after a restart."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.adapters.link.address import Address
from penstock.adapters.link.client import Link
from penstock.adapters.link.proxy import remote_state
from penstock.adapters.link.server import LinkServer
from penstock.adapters.sqlite.store import SqliteBackend
from penstock.control.ledger import Ledger
from penstock.control.shared_state import FactState
from penstock.core.errors import InvalidRequest, TooLarge
from penstock.ports.bus import MemoryBus
from penstock.ports.shared_state import MAX_NAME, MAX_VALUE, SharedState
from penstock.testing.aio import run_async

either = pytest.mark.parametrize("linked", [False, True], ids=["beside the engine", "over a link"])


@asynccontextmanager
async def shared(folder: Path, linked: bool) -> AsyncIterator[tuple[SharedState, SharedState]]:
    """The state as two workers see it."""
    store = Ledger(SqliteBackend(folder / "penstock.db"))
    await store.open()
    state = FactState(store)
    bus = MemoryBus()
    server = LinkServer(bus, object(), "secret", state)
    links: list[Link] = []
    try:
        if not linked:
            yield state, state
            return
        address = await server.listen(Address(path=folder / "bus.sock"))
        for _ in range(2):
            links.append(Link(address, token="secret"))
            await links[-1].connect()
        yield remote_state(links[0]), remote_state(links[1])
    finally:
        for link in links:
            await link.close()
        await server.close()
        await bus.close()
        await store.close()


@either
@run_async
async def test_what_one_worker_keeps_another_reads(tmp_path: Path, linked: bool) -> None:
    async with shared(tmp_path, linked) as (one, other):
        assert await one.read("breaker/feeds") is None
        await one.write("breaker/feeds", b"\x00open\xff")
        await one.write("breaker/mail", b"closed")
        await one.write("memory/x", b"1")
        assert await other.read("breaker/feeds") == b"\x00open\xff"
        assert await other.read_all("breaker/") == {
            "breaker/feeds": b"\x00open\xff",
            "breaker/mail": b"closed",
        }
        await other.write("breaker/mail", None)
        assert list(await one.read_all("breaker/")) == ["breaker/feeds"]


@either
@run_async
async def test_of_many_who_replace_one_value_at_once_one_wins_each_round(
    tmp_path: Path, linked: bool
) -> None:
    async with shared(tmp_path, linked) as both:
        assert await both[0].replace("count", None, b"0")
        assert not await both[0].replace("count", None, b"7")

        async def count(state: SharedState) -> None:
            for _ in range(10):
                while True:
                    before = await state.read("count")
                    assert before is not None
                    if await state.replace("count", before, str(int(before) + 1).encode()):
                        break

        await asyncio.gather(*(count(both[n % 2]) for n in range(8)))
        assert await both[1].read("count") == b"80"


@either
@run_async
async def test_a_name_or_a_value_that_is_too_long_is_refused(tmp_path: Path, linked: bool) -> None:
    async with shared(tmp_path, linked) as (one, other):
        await one.write("x" * MAX_NAME, b"y" * MAX_VALUE)
        assert await other.read("x" * MAX_NAME) == b"y" * MAX_VALUE
        with pytest.raises(TooLarge, match="value"):
            await one.write("x", b"y" * (MAX_VALUE + 1))
        with pytest.raises(TooLarge, match="value"):
            await one.replace("x", None, b"y" * (MAX_VALUE + 1))
        for name in ("", "x" * (MAX_NAME + 1)):
            with pytest.raises(InvalidRequest, match="name"):
                await one.write(name, b"y")
        assert await other.read("x") is None


@run_async
async def test_values_are_there_after_a_restart(tmp_path: Path) -> None:
    async with shared(tmp_path, False) as (one, _):
        await one.write("kept", b"1")
        await one.write("dropped", b"2")
        await one.write("dropped", None)
    async with shared(tmp_path, False) as (one, _):
        assert await one.read_all("") == {"kept": b"1"}
        assert not await one.replace("kept", b"0", b"2")
        assert await one.replace("kept", b"1", b"2")
