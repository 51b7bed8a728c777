"""The stores of this project, held to the contract."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock.adapters.memory.store import MemoryStore
from penstock.adapters.sqlite.store import SqliteStore
from penstock.lifecycles.canonical import JobEvent
from penstock.ports.store import Durability, LogLine, Store
from penstock.testing.aio import run_async
from penstock.testing.samples import T0, accept, move
from penstock.testing.store import FallibleContract, StoreContract, line, names, verdicts


class TestMemoryStore(StoreContract):
    def make(self, folder: Path) -> Store:
        return MemoryStore()


class SqliteContract(FallibleContract):
    slow_disk = False

    def make(self, folder: Path) -> Store:
        return SqliteStore(
            folder / "penstock.db", durability=Durability.OS, slow_disk=self.slow_disk
        )

    @contextmanager
    def failing(self, store: Store) -> Iterator[None]:
        """The file may not grow: what SQLite says then is what it says on a full disk."""
        assert isinstance(store, SqliteStore)
        writer = store._writer
        writer.pragma("max_page_count", writer.pragma("page_count"))
        try:
            yield
        finally:
            writer.pragma("max_page_count", 1 << 30)

    @run_async
    async def test_what_cannot_be_written_harms_only_its_own_caller(self, store: Store) -> None:
        await store.apply([accept("old")])
        unwritable = accept("bad", labels={"k": "\ud800"})
        store.write_log([line("old", "kept")])
        ends = await asyncio.gather(
            store.apply([accept("a")]),
            store.apply([accept("x"), unwritable]),
            store.apply([accept("b"), move("old", JobEvent.SCHEDULE)]),
            return_exceptions=True,
        )
        assert [isinstance(end, BaseException) for end in ends] == [False, True, False]
        assert isinstance(ends[1], UnicodeEncodeError)
        assert await names(store) == "baold"
        assert [kept.text for kept in await store.read_log("old")] == ["kept"]

    @pytest.mark.parametrize(
        "bad", [LogLine("a", 1, T0, "info", "\udcff"), LogLine("a", 1, float("nan"), "info", "x")]
    )
    @run_async
    async def test_lines_that_cannot_be_written_are_dropped(
        self, store: Store, bad: LogLine
    ) -> None:
        await store.apply([accept("a")])
        store.write_log([bad])
        assert verdicts(await store.apply([accept("b")])) == "M"
        store.write_log([line("a", "good")])
        assert verdicts(await store.apply([accept("c")])) == "M"
        assert [kept.text for kept in await store.read_log("a")] == ["good"]


class TestSqliteStore(SqliteContract):
    pass


class TestSqliteStoreOnASlowDisk(SqliteContract):
    slow_disk = True
