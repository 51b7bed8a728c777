"""The pipeline stores of this project, held to the contract."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.ports.store import Durability
from penstock.testing.pipelines import FalliblePipelineContract, PipelineStoreContract
from penstock.workloads.pipeline.storage.memory import MemoryPipelineStore
from penstock.workloads.pipeline.storage.sqlite.store import SqlitePipelineStore
from penstock.workloads.pipeline.store import PipelineStore


class TestMemoryPipelineStore(PipelineStoreContract):
    def make(self, folder: Path) -> PipelineStore:
        return MemoryPipelineStore()


class SqliteContract(FalliblePipelineContract):
    durability = Durability.OS
    slow_disk = False

    def make(self, folder: Path) -> PipelineStore:
        return SqlitePipelineStore(
            folder / "pipelines.db", durability=self.durability, slow_disk=self.slow_disk
        )

    @contextmanager
    def failing(self, store: PipelineStore) -> Iterator[None]:
        """The file may not grow: what SQLite says then is what it says on a full disk."""
        assert isinstance(store, SqlitePipelineStore)
        writer = store._writer
        writer.pragma("max_page_count", writer.pragma("page_count"))
        try:
            yield
        finally:
            writer.pragma("max_page_count", 1 << 30)


class TestSqlitePipelineStore(SqliteContract):
    durability = Durability.DISK


class TestSqlitePipelineStoreThatTrustsTheSystem(SqliteContract):
    pass


class TestSqlitePipelineStoreOnASlowDisk(SqliteContract):
    slow_disk = True
