"""What every `BatchStore` must do, as tests. Subclass, make the store, and run pytest:

class TestMyShelf(BatchStoreContract):
    def make(self, folder):
        return MyShelf(folder)
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.core.errors import NotFound
from penstock.lifecycles.batch import BatchStatus
from penstock.testing.aio import run_async
from penstock.workloads.llm.batches import Batch, BatchStore, BatchStoreQuery, Purpose, StoredFile


def a_file(file_id: str = "file-a", **fields: Any) -> StoredFile:
    given: dict[str, Any] = {
        "filename": "prompts.jsonl",
        "purpose": Purpose.BATCH,
        "created_at": 100.0,
        "tenant": "default",
    }
    return StoredFile(id=file_id, **{**given, **fields})


def a_batch(batch_id: str = "batch_a", **fields: Any) -> Batch:
    given: dict[str, Any] = {
        "endpoint": "/v1/chat/completions",
        "input_file_id": "file-a",
        "completion_window": "24h",
        "created_at": 100.0,
        "expires_at": 86_500.0,
        "tenant": "default",
        "principal": "owner",
    }
    return Batch(id=batch_id, **{**given, **fields})


async def keep(store: BatchStore, file: StoredFile, content: bytes = b"{}\n") -> StoredFile:
    draft = await store.draft()
    await draft.write(content)
    return await draft.keep(file)


class BatchStoreContract(ABC):
    @abstractmethod
    def make(self, folder: Path) -> BatchStore:
        """A new, empty store; `folder` is a place of its own to keep it in."""

    async def opened(self, folder: Path) -> BatchStore:
        store = self.make(folder)
        await store.open()
        return store

    @pytest.mark.parametrize("parts", [(), (b"",), (b"a", b"bc"), (b"x" * 3_000_000, b"y")])
    @run_async
    async def test_what_was_written_in_parts_is_read_whole(
        self, tmp_path: Path, parts: tuple[bytes, ...]
    ) -> None:
        store, content = await self.opened(tmp_path), b"".join(parts)
        draft = await store.draft()
        for part in parts:
            await draft.write(part)
        assert draft.size == len(content)
        kept = await draft.keep(a_file())
        assert kept == a_file(bytes=len(content)) == await store.file("file-a")
        assert await store.read("file-a", 0, len(content) + 10) == content

    @pytest.mark.parametrize(
        ("start", "length", "there"),
        [(0, 3, b"abc"), (2, 2, b"cd"), (4, 9, b"ef"), (6, 1, b""), (99, 1, b""), (3, 0, b"")],
    )
    @run_async
    async def test_a_part_is_short_only_where_the_file_ends(
        self, tmp_path: Path, start: int, length: int, there: bytes
    ) -> None:
        store = await self.opened(tmp_path)
        await keep(store, a_file(), b"abcdef")
        assert await store.read("file-a", start, length) == there

    @run_async
    async def test_nobody_sees_a_draft(self, tmp_path: Path) -> None:
        store = await self.opened(tmp_path)
        draft = await store.draft()
        await draft.write(b"half")
        assert await store.files(BatchStoreQuery()) == []
        await draft.drop()
        await draft.drop()
        assert await store.files(BatchStoreQuery()) == []

    @run_async
    async def test_dropping_a_draft_that_was_kept_does_nothing(self, tmp_path: Path) -> None:
        store = await self.opened(tmp_path)
        draft = await store.draft()
        await draft.write(b"all")
        await draft.keep(a_file())
        await draft.drop()
        assert await store.read("file-a", 0, 9) == b"all"

    @run_async
    async def test_a_file_kept_again_is_the_newer_one(self, tmp_path: Path) -> None:
        store = await self.opened(tmp_path)
        await keep(store, a_file(), b"old and long")
        await keep(store, a_file(filename="b"), b"new")
        assert await store.files(BatchStoreQuery()) == [a_file(filename="b", bytes=3)]
        assert await store.read("file-a", 0, 99) == b"new"

    @run_async
    async def test_what_was_removed_is_gone(self, tmp_path: Path) -> None:
        store = await self.opened(tmp_path)
        await keep(store, a_file())
        assert await store.remove_file("file-a")
        assert not await store.remove_file("file-a")
        assert await store.file("file-a") is None
        with pytest.raises(NotFound):
            await store.read("file-a", 0, 1)

    @pytest.mark.parametrize("file_id", ["", ".", "..", "../files/file-a", "file-\x00", "x" * 5000])
    @run_async
    async def test_an_id_that_is_no_name_is_not_there(self, tmp_path: Path, file_id: str) -> None:
        store = await self.opened(tmp_path)
        await keep(store, a_file())
        assert await store.file(file_id) is None
        assert await store.batch(file_id) is None
        assert not await store.remove_file(file_id)
        assert not await store.remove_batch(file_id)
        with pytest.raises(NotFound):
            await store.read(file_id, 0, 1)

    @run_async
    async def test_files_come_newest_first_page_by_page(self, tmp_path: Path) -> None:
        store = await self.opened(tmp_path)
        for n in range(5):
            await keep(store, a_file(f"file-{n}", created_at=float(n // 2)))
        pages, after = [], None
        while page := await store.files(BatchStoreQuery(limit=2, after=after)):
            pages.append([file.id for file in page])
            after = page[-1].id
        assert pages == [["file-4", "file-3"], ["file-2", "file-1"], ["file-0"]]
        oldest = await store.files(BatchStoreQuery(limit=2, oldest_first=True))
        assert [file.id for file in oldest] == ["file-0", "file-1"]

    @run_async
    async def test_a_list_is_of_one_tenant_and_one_purpose(self, tmp_path: Path) -> None:
        store = await self.opened(tmp_path)
        await keep(store, a_file("file-a"))
        await keep(store, a_file("file-b", tenant="acme"))
        await keep(store, a_file("file-c", tenant="acme", purpose=Purpose.BATCH_OUTPUT))
        await store.put_batch(a_batch("batch_a"))
        await store.put_batch(a_batch("batch_b", tenant="acme"))
        assert [
            f.id for f in await store.files(BatchStoreQuery(tenant="acme", purpose="batch"))
        ] == ["file-b"]
        assert len(await store.files(BatchStoreQuery())) == 3
        assert [b.id for b in await store.batches(BatchStoreQuery(tenant="acme"))] == ["batch_b"]

    @run_async
    async def test_a_page_after_what_is_not_among_them_is_refused(self, tmp_path: Path) -> None:
        store = await self.opened(tmp_path)
        await keep(store, a_file("file-b", tenant="acme"))
        with pytest.raises(NotFound, match="after"):
            await store.files(BatchStoreQuery(tenant="default", after="file-b"))
        with pytest.raises(NotFound, match="after"):
            await store.batches(BatchStoreQuery(after="batch_x"))

    @run_async
    async def test_a_batch_is_as_it_was_last_put(self, tmp_path: Path) -> None:
        store, batch = await self.opened(tmp_path), a_batch(metadata={"of": "tests"})
        await store.put_batch(batch)
        changed = replace(batch, status=BatchStatus.COMPLETED, completed_at=200.0)
        await store.put_batch(changed)
        assert await store.batch("batch_a") == changed
        assert await store.batches(BatchStoreQuery()) == [changed]
        assert await store.remove_batch("batch_a")
        assert await store.batch("batch_a") is None

    @run_async
    async def test_many_at_once_do_not_disturb_each_other(self, tmp_path: Path) -> None:
        store = await self.opened(tmp_path)
        await asyncio.gather(
            *(keep(store, a_file(f"file-{n:02}"), b"%d" % n) for n in range(20)),
            *(store.put_batch(a_batch(f"batch_{n:02}")) for n in range(20)),
        )
        assert len(await store.files(BatchStoreQuery(limit=99))) == 20
        assert len(await store.batches(BatchStoreQuery(limit=99))) == 20
        for n in range(20):
            assert await store.read(f"file-{n:02}", 0, 9) == b"%d" % n


class DurableBatchStoreContract(BatchStoreContract):
    """For a store that outlives its process: another one on the same folder is the restart."""

    @run_async
    async def test_a_restart_finds_what_was_kept_and_nothing_else(self, tmp_path: Path) -> None:
        store = await self.opened(tmp_path)
        await keep(store, a_file("file-a"), b"kept")
        await keep(store, a_file("file-b"), b"gone")
        await store.remove_file("file-b")
        await store.put_batch(a_batch())
        await (await store.draft()).write(b"x" * 2_000_000)
        again = await self.opened(tmp_path)
        assert await again.files(BatchStoreQuery()) == [a_file("file-a", bytes=4)]
        assert await again.read("file-a", 0, 9) == b"kept"
        assert await again.batches(BatchStoreQuery()) == [a_batch()]
