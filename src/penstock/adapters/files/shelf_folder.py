"""A folder of contents, and of records that name them.

`<root>/content/<token>` has a file's bytes, `<root>/files/<id>.json` its record with that token,
`<root>/batches/<id>.json` a batch. Bytes are flushed first; then the record is written beside its
place, flushed and renamed, which is the one moment at which the file begins to be, or is replaced
by another. A content that no record names is a draft or a leftover; at a start, a leftover.

Everything here blocks and is meant for a thread.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from penstock.core.errors import NotFound, StoreFailed, StoreFull
from penstock.ports.batches import Batch, StoredFile
from penstock.ports.failpoint import failpoint

T = TypeVar("T")


class Shelved(Struct, frozen=True):
    """The record of a file, as it lies on disk."""

    file: StoredFile
    content: str


class ShelfFolder:
    def __init__(self, root: Path, *, sync: bool) -> None:
        self._root, self._sync = root, sync
        self._contents, self._files = root / "content", root / "files"
        self._batches = root / "batches"

    # -- whole ----------------------------------------------------------------------

    def load(self) -> tuple[dict[str, Shelved], dict[str, Batch]]:
        """What is there. Clears away contents and drafts of records that a crash left."""
        with self._errors():
            for folder in (self._contents, self._files, self._batches):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for folder in (self._root.parent, self._root):
                self._flush(folder)
            files = self._records(self._files, Shelved)
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

    def keep(self, handle: int, record: Shelved, replaced: str | None) -> None:
        """Make the file be; its content is whole from now on."""
        with self._errors():
            if self._sync:
                os.fsync(handle)
            self._flush(self._contents)
            failpoint("shelf-content")
            self._write(self._files, record.file.id, record)
            failpoint("shelf-kept")
            if replaced is not None:
                (self._contents / replaced).unlink(missing_ok=True)

    def discard(self, token: str) -> None:
        with suppress(OSError):
            (self._contents / token).unlink()

    def read(self, record: Shelved, start: int, length: int) -> bytes:
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

    def remove_file(self, record: Shelved) -> None:
        with self._errors():
            (self._files / f"{record.file.id}.json").unlink(missing_ok=True)
            self._flush(self._files)
            failpoint("shelf-removed")
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
            failpoint("shelf-record")
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
