"""What every `Shelf` must do, as tests. Subclass, make the shelf, and run pytest:

class TestMyShelf(ShelfContract):
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
from penstock.ports.batches import Batch, Purpose, Shelf, ShelfQuery, StoredFile
from penstock.testing.aio import run_async


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


async def keep(shelf: Shelf, file: StoredFile, content: bytes = b"{}\n") -> StoredFile:
    draft = await shelf.draft()
    await draft.write(content)
    return await draft.keep(file)


class ShelfContract(ABC):
    @abstractmethod
    def make(self, folder: Path) -> Shelf:
        """A new, empty shelf; `folder` is a place of its own to keep it in."""

    async def opened(self, folder: Path) -> Shelf:
        shelf = self.make(folder)
        await shelf.open()
        return shelf

    @pytest.mark.parametrize("parts", [(), (b"",), (b"a", b"bc"), (b"x" * 3_000_000, b"y")])
    @run_async
    async def test_what_was_written_in_parts_is_read_whole(
        self, tmp_path: Path, parts: tuple[bytes, ...]
    ) -> None:
        shelf, content = await self.opened(tmp_path), b"".join(parts)
        draft = await shelf.draft()
        for part in parts:
            await draft.write(part)
        assert draft.size == len(content)
        kept = await draft.keep(a_file())
        assert kept == a_file(bytes=len(content)) == await shelf.file("file-a")
        assert await shelf.read("file-a", 0, len(content) + 10) == content

    @pytest.mark.parametrize(
        ("start", "length", "there"),
        [(0, 3, b"abc"), (2, 2, b"cd"), (4, 9, b"ef"), (6, 1, b""), (99, 1, b""), (3, 0, b"")],
    )
    @run_async
    async def test_a_part_is_short_only_where_the_file_ends(
        self, tmp_path: Path, start: int, length: int, there: bytes
    ) -> None:
        shelf = await self.opened(tmp_path)
        await keep(shelf, a_file(), b"abcdef")
        assert await shelf.read("file-a", start, length) == there

    @run_async
    async def test_nobody_sees_a_draft(self, tmp_path: Path) -> None:
        shelf = await self.opened(tmp_path)
        draft = await shelf.draft()
        await draft.write(b"half")
        assert await shelf.files(ShelfQuery()) == []
        await draft.drop()
        await draft.drop()
        assert await shelf.files(ShelfQuery()) == []

    @run_async
    async def test_dropping_a_draft_that_was_kept_does_nothing(self, tmp_path: Path) -> None:
        shelf = await self.opened(tmp_path)
        draft = await shelf.draft()
        await draft.write(b"all")
        await draft.keep(a_file())
        await draft.drop()
        assert await shelf.read("file-a", 0, 9) == b"all"

    @run_async
    async def test_a_file_kept_again_is_the_newer_one(self, tmp_path: Path) -> None:
        shelf = await self.opened(tmp_path)
        await keep(shelf, a_file(), b"old and long")
        await keep(shelf, a_file(filename="b"), b"new")
        assert await shelf.files(ShelfQuery()) == [a_file(filename="b", bytes=3)]
        assert await shelf.read("file-a", 0, 99) == b"new"

    @run_async
    async def test_what_was_removed_is_gone(self, tmp_path: Path) -> None:
        shelf = await self.opened(tmp_path)
        await keep(shelf, a_file())
        assert await shelf.remove_file("file-a")
        assert not await shelf.remove_file("file-a")
        assert await shelf.file("file-a") is None
        with pytest.raises(NotFound):
            await shelf.read("file-a", 0, 1)

    @pytest.mark.parametrize("file_id", ["", ".", "..", "../files/file-a", "file-\x00", "x" * 5000])
    @run_async
    async def test_an_id_that_is_no_name_is_not_there(self, tmp_path: Path, file_id: str) -> None:
        shelf = await self.opened(tmp_path)
        await keep(shelf, a_file())
        assert await shelf.file(file_id) is None
        assert await shelf.batch(file_id) is None
        assert not await shelf.remove_file(file_id)
        assert not await shelf.remove_batch(file_id)
        with pytest.raises(NotFound):
            await shelf.read(file_id, 0, 1)

    @run_async
    async def test_files_come_newest_first_page_by_page(self, tmp_path: Path) -> None:
        shelf = await self.opened(tmp_path)
        for n in range(5):
            await keep(shelf, a_file(f"file-{n}", created_at=float(n // 2)))
        pages, after = [], None
        while page := await shelf.files(ShelfQuery(limit=2, after=after)):
            pages.append([file.id for file in page])
            after = page[-1].id
        assert pages == [["file-4", "file-3"], ["file-2", "file-1"], ["file-0"]]
        oldest = await shelf.files(ShelfQuery(limit=2, oldest_first=True))
        assert [file.id for file in oldest] == ["file-0", "file-1"]

    @run_async
    async def test_a_list_is_of_one_tenant_and_one_purpose(self, tmp_path: Path) -> None:
        shelf = await self.opened(tmp_path)
        await keep(shelf, a_file("file-a"))
        await keep(shelf, a_file("file-b", tenant="acme"))
        await keep(shelf, a_file("file-c", tenant="acme", purpose=Purpose.BATCH_OUTPUT))
        await shelf.put_batch(a_batch("batch_a"))
        await shelf.put_batch(a_batch("batch_b", tenant="acme"))
        assert [f.id for f in await shelf.files(ShelfQuery(tenant="acme", purpose="batch"))] == [
            "file-b"
        ]
        assert len(await shelf.files(ShelfQuery())) == 3
        assert [b.id for b in await shelf.batches(ShelfQuery(tenant="acme"))] == ["batch_b"]

    @run_async
    async def test_a_page_after_what_is_not_among_them_is_refused(self, tmp_path: Path) -> None:
        shelf = await self.opened(tmp_path)
        await keep(shelf, a_file("file-b", tenant="acme"))
        with pytest.raises(NotFound, match="after"):
            await shelf.files(ShelfQuery(tenant="default", after="file-b"))
        with pytest.raises(NotFound, match="after"):
            await shelf.batches(ShelfQuery(after="batch_x"))

    @run_async
    async def test_a_batch_is_as_it_was_last_put(self, tmp_path: Path) -> None:
        shelf, batch = await self.opened(tmp_path), a_batch(metadata={"of": "tests"})
        await shelf.put_batch(batch)
        changed = replace(batch, status=BatchStatus.COMPLETED, completed_at=200.0)
        await shelf.put_batch(changed)
        assert await shelf.batch("batch_a") == changed
        assert await shelf.batches(ShelfQuery()) == [changed]
        assert await shelf.remove_batch("batch_a")
        assert await shelf.batch("batch_a") is None

    @run_async
    async def test_many_at_once_do_not_disturb_each_other(self, tmp_path: Path) -> None:
        shelf = await self.opened(tmp_path)
        await asyncio.gather(
            *(keep(shelf, a_file(f"file-{n:02}"), b"%d" % n) for n in range(20)),
            *(shelf.put_batch(a_batch(f"batch_{n:02}")) for n in range(20)),
        )
        assert len(await shelf.files(ShelfQuery(limit=99))) == 20
        assert len(await shelf.batches(ShelfQuery(limit=99))) == 20
        for n in range(20):
            assert await shelf.read(f"file-{n:02}", 0, 9) == b"%d" % n


class DurableShelfContract(ShelfContract):
    """For a shelf that outlives its process: another one on the same folder is the restart."""

    @run_async
    async def test_a_restart_finds_what_was_kept_and_nothing_else(self, tmp_path: Path) -> None:
        shelf = await self.opened(tmp_path)
        await keep(shelf, a_file("file-a"), b"kept")
        await keep(shelf, a_file("file-b"), b"gone")
        await shelf.remove_file("file-b")
        await shelf.put_batch(a_batch())
        await (await shelf.draft()).write(b"x" * 2_000_000)
        again = await self.opened(tmp_path)
        assert await again.files(ShelfQuery()) == [a_file("file-a", bytes=4)]
        assert await again.read("file-a", 0, 9) == b"kept"
        assert await again.batches(ShelfQuery()) == [a_batch()]
