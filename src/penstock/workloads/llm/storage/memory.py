"""Files and batches in memory: for tests and for engines that need not outlive their process."""

from __future__ import annotations

import builtins

from msgspec.structs import replace

from penstock.core.errors import NotFound
from penstock.workloads.llm.batches import Batch, BatchStoreQuery, Draft, StoredFile, page_of


class MemoryBatchStore:
    """See `penstock.workloads.llm.batches.BatchStore`."""

    def __init__(self) -> None:
        self._files: dict[str, StoredFile] = {}
        self._content: dict[str, bytes] = {}
        self._batches: dict[str, Batch] = {}

    async def open(self) -> None:
        pass

    # -- files --------------------------------------------------------------------

    async def draft(self) -> Draft:
        return _Draft(self)

    def keep(self, file: StoredFile, content: bytes) -> StoredFile:
        kept = replace(file, bytes=len(content))
        self._files[file.id], self._content[file.id] = kept, content
        return kept

    async def file(self, file_id: str) -> StoredFile | None:
        return self._files.get(file_id)

    async def files(self, query: BatchStoreQuery) -> builtins.list[StoredFile]:
        return page_of(self._files.values(), query)

    async def read(self, file_id: str, start: int, length: int) -> bytes:
        content = self._content.get(file_id)
        if content is None:
            raise NotFound(f"no file {file_id!r}", hint="it was deleted, or its time has passed")
        return content[start : start + length]

    async def remove_file(self, file_id: str) -> bool:
        self._content.pop(file_id, None)
        return self._files.pop(file_id, None) is not None

    # -- batches ------------------------------------------------------------------

    async def put_batch(self, batch: Batch) -> None:
        self._batches[batch.id] = batch

    async def batch(self, batch_id: str) -> Batch | None:
        return self._batches.get(batch_id)

    async def batches(self, query: BatchStoreQuery) -> builtins.list[Batch]:
        return page_of(self._batches.values(), query)

    async def remove_batch(self, batch_id: str) -> bool:
        return self._batches.pop(batch_id, None) is not None


class _Draft:
    def __init__(self, batch_store: MemoryBatchStore) -> None:
        self._batch_store, self._parts = batch_store, bytearray()

    @property
    def size(self) -> int:
        return len(self._parts)

    async def write(self, data: bytes) -> None:
        self._parts += data

    async def keep(self, file: StoredFile) -> StoredFile:
        kept = self._batch_store.keep(file, bytes(self._parts))
        self._parts = bytearray()
        return kept

    async def drop(self) -> None:
        self._parts = bytearray()
