"""A folder of files that are named by their content.

A blob lies at `<root>/ab/abcdef…`, where the name is the SHA-256 of its bytes. It is
written beside its place, flushed, renamed, and its folder flushed, so a name that can be
seen has its whole content behind it. Who keeps an existing blob again touches it; `sweep`
spares what was touched lately, and a lock on `<root>/.lock` keeps a touch from falling
between its look and its delete, in any process.

Everything here blocks and is meant for a thread.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from penstock.core.errors import StoreFailed, StoreFull, UnreadablePointer
from penstock.core.pointer import FIELD, BlobName, check_size, name_blob, shown

_OWNERSHIP = "the engine's user must own the data directory and all in it"


class BlobFolder:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._durable: set[Path] = set()

    def keep(self, data: bytes, media_type: str) -> BlobName:
        """When this returns, the blob is on disk, whole, and will be found after a crash."""
        name = name_blob(data, media_type)
        path = self._path(name)
        with _store_errors(path.parent):
            self._make(self._root)
            self._make(path.parent)
            if not self._renew(path, data):
                _write(path, data)
            # Also when it was there: who wrote it may not have come this far yet.
            _flush(path.parent)
        return name

    def read(self, name: BlobName, limit: int) -> bytes:
        with _read_errors(name), self._path(name).open("rb") as file:
            check_size(FIELD, os.fstat(file.fileno()).st_size, limit)
            data = file.read()
        if sha256(data).hexdigest() != name.digest:
            raise _damaged(name)
        return data

    def pieces(self, name: BlobName, size: int) -> Generator[bytes, None, None]:
        """The content; the last piece only after the hash of all was checked."""
        with _read_errors(name), self._path(name).open("rb") as file:
            digest = sha256()
            piece = file.read(size)
            while piece:
                digest.update(piece)
                ahead = file.read(size)
                if not ahead and digest.hexdigest() != name.digest:
                    raise _damaged(name)
                yield piece
                piece = ahead

    def part(self, name: BlobName, start: int, length: int) -> bytes:
        """Some of the content, unchecked: the name is the hash of all of it."""
        with _read_errors(name), self._path(name).open("rb") as file:
            file.seek(start)
            return file.read(length)

    def touch(self, name: BlobName) -> int:
        """Count as new from now on; returns the size."""
        path = self._path(name)
        with _read_errors(name), self._lock(fcntl.LOCK_SH):
            size = path.stat().st_size
            os.utime(path)
        return size

    def sweep(self, kept: set[str], older_than: float) -> int:
        """Delete what is neither kept nor touched since; returns how many blobs."""
        removed = 0
        with _store_errors(self._root):
            for folder in sorted(self._root.glob("[0-9a-f][0-9a-f]")):
                with self._lock(fcntl.LOCK_EX):
                    removed += _sweep(folder, kept, older_than)
        return removed

    def _path(self, name: BlobName) -> Path:
        return self._root / name.digest[:2] / name.digest

    def _make(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder not in self._durable:
            _flush(folder.parent)
            self._durable.add(folder)

    def _renew(self, path: Path, data: bytes) -> bool:
        """Touch the blob if it is there and sound; one that is damaged is to be rewritten."""
        try:
            with self._lock(fcntl.LOCK_SH):
                if path.read_bytes() != data:
                    return False
                os.utime(path)
        except FileNotFoundError:
            return False
        return True

    @contextmanager
    def _lock(self, kind: int) -> Iterator[None]:
        handle = os.open(self._root / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, kind)
            yield
        finally:
            os.close(handle)


def _write(path: Path, data: bytes) -> None:
    """Put the bytes at `path`, whole or not at all."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(draft, "xb", opener=_private) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _flush(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sweep(folder: Path, kept: set[str], older_than: float) -> int:
    removed = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name in kept:
                continue
            # A draft may be renamed, and so vanish, under our eyes.
            with suppress(FileNotFoundError):
                if entry.stat().st_mtime < older_than:
                    os.unlink(entry.path)
                    removed += not entry.name.startswith(".")
    return removed


@contextmanager
def _read_errors(name: BlobName) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise UnreadablePointer(
            FIELD,
            f"there is no blob {shown(name.uri)}",
            hint="it was never stored here, or its retention has passed",
        ) from None
    except OSError as error:
        raise UnreadablePointer(
            FIELD,
            f"the blob {shown(name.uri)} can't be read: {error.strerror}",
            hint=_OWNERSHIP,
        ) from error


@contextmanager
def _store_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StoreFull(
                f"no space left to store a payload in {folder}",
                hint="free some space, or run `penstock prune`; then submit again",
            ) from error
        raise StoreFailed(
            f"payloads can't be stored in {folder}: {error.strerror}", hint=_OWNERSHIP
        ) from error


def _damaged(name: BlobName) -> UnreadablePointer:
    return UnreadablePointer(
        FIELD,
        f"the blob {shown(name.uri)} is damaged: its content no longer matches its name",
        hint="submit the payload again, which mends it, or restore it from a backup",
    )
