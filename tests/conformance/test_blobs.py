"""The blob stores of this project, held to the contract."""

from __future__ import annotations

from pathlib import Path
from secrets import token_hex

from penstock.adapters.files.blobs import FileBlobs
from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.ports.blobs import Blobs
from penstock.testing.blobs import BlobsContract


class TestFileBlobs(BlobsContract):
    def make(self, folder: Path, *, inline_limit: int, max_size: int) -> Blobs:
        return FileBlobs(folder / "blobs", inline_limit=inline_limit, max_size=max_size)


class TestObjectBlobs(BlobsContract):
    """In fsspec's store in memory; `tests/adapters/files/live/test_objects.py` has S3."""

    def make(self, folder: Path, *, inline_limit: int, max_size: int) -> Blobs:
        url = f"memory://{folder.name}-{token_hex(8)}/blobs"
        return FileBlobs(url, inline_limit=inline_limit, max_size=max_size)


class TestMemoryBlobs(BlobsContract):
    def make(self, folder: Path, *, inline_limit: int, max_size: int) -> Blobs:
        return MemoryBlobs(inline_limit=inline_limit, max_size=max_size)
