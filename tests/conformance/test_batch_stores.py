"""The shelves of this project, held to the contract."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core.errors import StoreFailed
from penstock.testing.aio import run_async
from penstock.testing.batch_store import BatchStoreContract, DurableBatchStoreContract, a_file, keep
from penstock.workloads.llm.batches import BatchStore, BatchStoreQuery
from penstock.workloads.llm.storage.files import FileBatchStore
from penstock.workloads.llm.storage.memory import MemoryBatchStore


class TestFileBatchStore(DurableBatchStoreContract):
    def make(self, folder: Path) -> BatchStore:
        return FileBatchStore(folder / "shelf")


class TestFileBatchStoreWithoutFlushes(DurableBatchStoreContract):
    def make(self, folder: Path) -> BatchStore:
        return FileBatchStore(folder / "shelf", sync=False)


class TestMemoryBatchStore(BatchStoreContract):
    def make(self, folder: Path) -> BatchStore:
        return MemoryBatchStore()


_LIFE = """
import asyncio, sys
from pathlib import Path
from penstock.workloads.llm.storage.files import FileBatchStore
from penstock.testing.batch_store import a_batch, a_file, keep

async def live():
    store = FileBatchStore(Path(sys.argv[1]))
    await store.open()
    await keep(store, a_file("file-a"), b"first")
    print("a", flush=True)
    await keep(store, a_file("file-a", filename="again"), b"second")
    print("again", flush=True)
    await store.put_batch(a_batch())
    print("batch", flush=True)
    await store.remove_file("file-a")
    print("gone", flush=True)

asyncio.run(live())
"""
_STRIKES = [
    *(f"batch-content:{n}" for n in (1, 2)),
    *(f"batch-record:{n}" for n in (1, 2, 3)),
    *(f"batch-kept:{n}" for n in (1, 2)),
    "batch-removed:1",
]


def what_a_killed_one_told(folder: Path, strike: str) -> list[str]:
    killed = subprocess.run(
        [sys.executable, "-c", _LIFE, str(folder)],
        env={"PENSTOCK_FAILPOINT": strike},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert killed.returncode == -9, killed.stderr
    return killed.stdout.split()


@pytest.mark.parametrize("strike", _STRIKES)
@run_async
async def test_killed_anywhere_a_shelf_has_what_it_answered_and_nothing_half(
    tmp_path: Path, strike: str
) -> None:
    told = what_a_killed_one_told(tmp_path, strike)
    store = FileBatchStore(tmp_path)
    await store.open()
    found = {file.filename: file for file in await store.files(BatchStoreQuery())}
    assert len(found) <= 1
    for name, file in found.items():
        content = await store.read("file-a", 0, 99)
        assert (name, content) in (("prompts.jsonl", b"first"), ("again", b"second"))
        assert file.bytes == len(content)
    if told[-1:] == ["a"]:
        assert found
    elif told[-1:] == ["again"]:
        assert set(found) == {"again"}
    if "batch" in told:
        assert len(await store.batches(BatchStoreQuery())) == 1
    named = len(list((tmp_path / "content").iterdir()))
    assert named == len(found)
    assert not [path for path in (tmp_path / "files").iterdir() if path.name[0] == "."]


@run_async
async def test_a_damaged_record_is_named_and_nothing_is_cleared_away(tmp_path: Path) -> None:
    store = FileBatchStore(tmp_path)
    await store.open()
    await keep(store, a_file())
    (tmp_path / "files" / "file-a.json").write_bytes(b'{"file": ')
    with pytest.raises(StoreFailed, match=r"file-a\.json is damaged"):
        await FileBatchStore(tmp_path).open()
    assert len(list((tmp_path / "content").iterdir())) == 1


@run_async
async def test_a_folder_that_can_not_be_made_is_told_of(tmp_path: Path) -> None:
    (tmp_path / "shelf").write_text("in the way")
    with pytest.raises(StoreFailed, match="can't be stored"):
        await FileBatchStore(tmp_path / "shelf").open()
