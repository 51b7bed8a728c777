"""Files and batches in a folder of an engine's own; their records are known by heart."""

from __future__ import annotations

import asyncio
import builtins
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from msgspec.structs import replace

from penstock.adapters.files.shelf_folder import ShelfFolder, Shelved
from penstock.core.errors import Conflict, NotFound
from penstock.ports.batches import Batch, Draft, ShelfQuery, StoredFile, page_of

P = ParamSpec("P")
T = TypeVar("T")

_GATHERED = 1 << 20
"""Bytes of a draft that are gathered before they are written."""


class FileShelf:
    """See `penstock.ports.batches.Shelf`. One engine has it to itself."""

    def __init__(self, root: Path, *, sync: bool = True) -> None:
        """`sync`: whether what is kept survives a loss of power, and not only of the process."""
        self.folder = ShelfFolder(root, sync=sync)
        self._files: dict[str, Shelved] = {}
        self._batches: dict[str, Batch] = {}
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="penstock-shelf")
        self._writing = asyncio.Lock()
        """Records change one after another, on disk as in mind."""

    async def open(self) -> None:
        self._files, self._batches = await self.aside(self.folder.load)

    # -- files --------------------------------------------------------------------

    async def draft(self) -> Draft:
        token, handle = await self.aside(self.folder.begin)
        return _Draft(self, token, handle)

    async def keep(self, handle: int, record: Shelved) -> None:
        async with self._writing:
            before = self._files.get(record.file.id)
            replaced = before.content if before else None
            await self.aside(self.folder.keep, handle, record, replaced)
            self._files[record.file.id] = record

    async def file(self, file_id: str) -> StoredFile | None:
        record = self._files.get(file_id)
        return None if record is None else record.file

    async def files(self, query: ShelfQuery) -> builtins.list[StoredFile]:
        return page_of((record.file for record in self._files.values()), query)

    async def read(self, file_id: str, start: int, length: int) -> bytes:
        record = self._files.get(file_id)
        if record is None:
            raise NotFound(f"no file {file_id!r}", hint="it was deleted, or its time has passed")
        return await self.aside(self.folder.read, record, start, length)

    async def remove_file(self, file_id: str) -> bool:
        return await whole(self._remove_file(file_id))

    async def _remove_file(self, file_id: str) -> bool:
        async with self._writing:
            record = self._files.get(file_id)
            if record is None:
                return False
            await self.aside(self.folder.remove_file, record)
            del self._files[file_id]
            return True

    # -- batches ------------------------------------------------------------------

    async def put_batch(self, batch: Batch) -> None:
        await whole(self._put_batch(batch))

    async def _put_batch(self, batch: Batch) -> None:
        async with self._writing:
            await self.aside(self.folder.put_batch, batch)
            self._batches[batch.id] = batch

    async def batch(self, batch_id: str) -> Batch | None:
        return self._batches.get(batch_id)

    async def batches(self, query: ShelfQuery) -> builtins.list[Batch]:
        return page_of(self._batches.values(), query)

    async def remove_batch(self, batch_id: str) -> bool:
        return await whole(self._remove_batch(batch_id))

    async def _remove_batch(self, batch_id: str) -> bool:
        async with self._writing:
            if batch_id not in self._batches:
                return False
            await self.aside(self.folder.remove_batch, batch_id)
            del self._batches[batch_id]
            return True

    async def aside(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """In a thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: work(*args, **kwargs))


async def whole(change: Coroutine[Any, Any, T]) -> T:
    """Seen through even if nobody waits for it any more, so that disk and mind stay alike."""
    return await asyncio.shield(asyncio.ensure_future(change))


class _Draft:
    def __init__(self, shelf: FileShelf, token: str, handle: int) -> None:
        self._shelf, self._token = shelf, token
        self._handle: int | None = handle
        self._gathered = bytearray()
        self._busy = asyncio.Lock()
        """Whoever leaves in the middle of a write must not close the file under it."""
        self.size = 0

    async def write(self, data: bytes) -> None:
        self._gathered += data
        self.size += len(data)
        if len(self._gathered) >= _GATHERED:
            await whole(self._put_down())

    async def _put_down(self) -> None:
        async with self._busy:
            if self._handle is None:
                raise Conflict("this draft is used up")
            data, self._gathered = bytes(self._gathered), bytearray()
            if data:
                await self._shelf.aside(self._shelf.folder.append, self._handle, data)

    async def keep(self, file: StoredFile) -> StoredFile:
        return await whole(self._keep(file))

    async def _keep(self, file: StoredFile) -> StoredFile:
        await self._put_down()
        async with self._busy:
            if self._handle is None:
                raise Conflict("this draft is used up")
            kept = replace(file, bytes=self.size)
            await self._shelf.keep(self._handle, Shelved(kept, self._token))
            os.close(self._handle)
            self._handle = None
            return kept

    async def drop(self) -> None:
        await whole(self._drop())

    async def _drop(self) -> None:
        async with self._busy:
            if self._handle is not None:
                os.close(self._handle)
                self._handle = None
                await self._shelf.aside(self._shelf.folder.discard, self._token)
