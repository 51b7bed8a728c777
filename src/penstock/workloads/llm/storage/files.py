"""A folder of contents, and of records that name them.

`<root>/content/<token>` has a file's bytes, `<root>/files/<id>.json` its record with that token,
`<root>/batches/<id>.json` a batch. Bytes are flushed first; then the record is written beside its
place, flushed and renamed, which is the one moment at which the file begins to be, or is replaced
by another. A content that no record names is a draft or a leftover; at a start, a leftover.

Everything here blocks and is meant for a thread.
"""

from __future__ import annotations

import asyncio
import builtins
import errno
import os
import secrets
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from penstock.core.errors import Conflict, NotFound, StoreFailed, StoreFull
from penstock.ports.process import failpoint
from penstock.workloads.llm.batches import Batch, BatchStoreQuery, Draft, StoredFile, page_of

T = TypeVar("T")


class FileRecord(Struct, frozen=True):
    """The record of a file, as it lies on disk."""

    file: StoredFile
    content: str


class BatchFolder:
    def __init__(self, root: Path, *, sync: bool) -> None:
        self._root, self._sync = root, sync
        self._contents, self._files = root / "content", root / "files"
        self._batches = root / "batches"

    # -- whole ----------------------------------------------------------------------

    def load(self) -> tuple[dict[str, FileRecord], dict[str, Batch]]:
        """What is there. Clears away contents and drafts of records that a crash left."""
        with self._errors():
            for folder in (self._contents, self._files, self._batches):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (self._root.parent, self._root):
                self._flush(folder)
            files = self._records(self._files, FileRecord)
            batches = self._records(self._batches, Batch)
            self._sweep({record.content for record in files.values()})
        return files, batches

    def _records(self, folder: Path, kind: type[T]) -> dict[str, T]:
        decode = msgspec.json.Decoder(kind).decode
        found: dict[str, T] = {}
        for path in sorted(folder.iterdir()):
            if path.name.startswith("."):
                path.unlink()
                continue
            try:
                found[path.stem] = decode(path.read_bytes())
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise StoreFailed(
                    f"the record {path} is damaged: {error}",
                    hint="restore it from a backup, or move it away to do without it",
                ) from error
        return found

    def _sweep(self, named: set[str]) -> None:
        for path in self._contents.iterdir():
            if path.name not in named:
                path.unlink()

    # -- files ----------------------------------------------------------------------

    def begin(self) -> tuple[str, int]:
        """A new content, as its token and an open file."""
        token = secrets.token_hex(16)
        with self._errors():
            return token, os.open(
                self._contents / token, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
            )

    def append(self, handle: int, data: bytes) -> None:
        with self._errors():
            view = memoryview(data)
            while view:
                view = view[os.write(handle, view) :]

    def keep(self, handle: int, record: FileRecord, replaced: str | None) -> None:
        """Make the file be; its content is whole from now on."""
        with self._errors():
            if self._sync:
                os.fsync(handle)
            self._flush(self._contents)
            failpoint("batch-content")
            self._write(self._files, record.file.id, record)
            failpoint("batch-kept")
            if replaced is not None:
                (self._contents / replaced).unlink(missing_ok=True)

    def discard(self, token: str) -> None:
        with suppress(OSError):
            (self._contents / token).unlink()

    def read(self, record: FileRecord, start: int, length: int) -> bytes:
        try:
            with (self._contents / record.content).open("rb", buffering=0) as file:
                parts = []
                while length > 0 and (part := os.pread(file.fileno(), length, start)):
                    parts.append(part)
                    start, length = start + len(part), length - len(part)
        except FileNotFoundError:
            raise NotFound(f"no file {record.file.id!r}", hint="it was deleted") from None
        except OSError as error:
            raise StoreFailed(f"{record.file.id} can't be read: {error.strerror}") from error
        return b"".join(parts)

    def remove_file(self, record: FileRecord) -> None:
        with self._errors():
            (self._files / f"{record.file.id}.json").unlink(missing_ok=True)
            self._flush(self._files)
            failpoint("batch-removed")
            (self._contents / record.content).unlink(missing_ok=True)

    # -- batches --------------------------------------------------------------------

    def put_batch(self, batch: Batch) -> None:
        with self._errors():
            self._write(self._batches, batch.id, batch)

    def remove_batch(self, batch_id: str) -> None:
        with self._errors():
            (self._batches / f"{batch_id}.json").unlink(missing_ok=True)
            self._flush(self._batches)

    # -- disk -----------------------------------------------------------------------

    def _write(self, folder: Path, name: str, record: Struct) -> None:
        draft = folder / f".{name}.{secrets.token_hex(8)}"
        try:
            with open(draft, "xb", opener=_private) as file:
                file.write(msgspec.json.encode(record))
                file.flush()
                if self._sync:
                    os.fsync(file.fileno())
            failpoint("batch-record")
            draft.rename(folder / f"{name}.json")
        except BaseException:
            with suppress(OSError):
                draft.unlink()
            raise
        self._flush(folder)

    def _flush(self, folder: Path) -> None:
        if not self._sync:
            return
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreFull(
                    f"no space left to store a file in {self._root}",
                    hint="free some space, or delete files that are not needed",
                ) from error
            raise StoreFailed(
                f"files can't be stored in {self._root}: {error.strerror}",
                hint="the engine's user must own the data directory and all in it",
            ) from error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


P = ParamSpec("P")

_GATHERED = 1 << 20
"""Bytes of a draft that are gathered before they are written."""


class FileBatchStore:
    """See `penstock.workloads.llm.batches.BatchStore`. One engine has it to itself."""

    def __init__(self, root: Path, *, sync: bool = True) -> None:
        """`sync`: whether what is kept survives a loss of power, and not only of the process."""
        self.folder = BatchFolder(root, sync=sync)
        self._files: dict[str, FileRecord] = {}
        self._batches: dict[str, Batch] = {}
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="penstock-batches")
        self._writing = asyncio.Lock()
        """Records change one after another, on disk as in mind."""

    async def open(self) -> None:
        self._files, self._batches = await self.aside(self.folder.load)

    # -- files --------------------------------------------------------------------

    async def draft(self) -> Draft:
        token, handle = await self.aside(self.folder.begin)
        return _Draft(self, token, handle)

    async def keep(self, handle: int, record: FileRecord) -> None:
        async with self._writing:
            before = self._files.get(record.file.id)
            replaced = before.content if before else None
            await self.aside(self.folder.keep, handle, record, replaced)
            self._files[record.file.id] = record

    async def file(self, file_id: str) -> StoredFile | None:
        record = self._files.get(file_id)
        return None if record is None else record.file

    async def files(self, query: BatchStoreQuery) -> builtins.list[StoredFile]:
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

    async def batches(self, query: BatchStoreQuery) -> builtins.list[Batch]:
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
    def __init__(self, batch_store: FileBatchStore, token: str, handle: int) -> None:
        self._batch_store, self._token = batch_store, token
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
                await self._batch_store.aside(self._batch_store.folder.append, self._handle, data)

    async def keep(self, file: StoredFile) -> StoredFile:
        return await whole(self._keep(file))

    async def _keep(self, file: StoredFile) -> StoredFile:
        await self._put_down()
        async with self._busy:
            if self._handle is None:
                raise Conflict("this draft is used up")
            kept = replace(file, bytes=self.size)
            await self._batch_store.keep(self._handle, FileRecord(kept, self._token))
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
                await self._batch_store.aside(self._batch_store.folder.discard, self._token)
