"""The stores of container jobs of this project, held to the contract."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.ports.store import Durability
from penstock.testing.container_store import (
    ContainerStoreContract,
    FallibleContainerStoreContract,
)
from penstock.workloads.container.storage.memory import MemoryContainerStore
from penstock.workloads.container.storage.sqlite.store import SqliteContainerStore
from penstock.workloads.container.store import ContainerStore


class TestMemoryContainerStore(ContainerStoreContract):
    def make(self, folder: Path) -> ContainerStore:
        return MemoryContainerStore()


class SqliteContract(FallibleContainerStoreContract):
    durability = Durability.OS
    slow_disk = False

    def make(self, folder: Path) -> ContainerStore:
        return SqliteContainerStore(
            folder / "containers.db", durability=self.durability, slow_disk=self.slow_disk
        )

    @contextmanager
    def failing(self, store: ContainerStore) -> Iterator[None]:
        """The file may not grow: what SQLite says then is what it says on a full disk."""
        assert isinstance(store, SqliteContainerStore)
        writer = store._writer
        writer.pragma("max_page_count", writer.pragma("page_count"))
        try:
            yield
        finally:
            writer.pragma("max_page_count", 1 << 30)


class TestSqliteContainerStore(SqliteContract):
    durability = Durability.DISK


class TestSqliteContainerStoreThatTrustsTheSystem(SqliteContract):
    pass


class TestSqliteContainerStoreOnASlowDisk(SqliteContract):
    slow_disk = True
