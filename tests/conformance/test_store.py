"""The stores of this project, held to the contract."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.adapters.memory.store import MemoryStore
from penstock.adapters.sqlite.store import SqliteStore
from penstock.ports.store import Durability, Store
from penstock.testing.store import StoreContract


class TestMemoryStore(StoreContract):
    def make(self, folder: Path) -> Store:
        return MemoryStore()


class SqliteContract(StoreContract):
    threaded = False

    def make(self, folder: Path) -> Store:
        return SqliteStore(folder / "penstock.db", durability=Durability.OS, threaded=self.threaded)

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


class TestSqliteStore(SqliteContract):
    pass


class TestThreadedSqliteStore(SqliteContract):
    threaded = True
