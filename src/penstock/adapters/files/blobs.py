"""Payloads on disk.

Tiny payloads ride in their pointer, which neither waits nor leaves the event loop; files
and others' data are read and written in threads.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import re
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import file_digest, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from penstock.adapters.files.foreign import Foreign
from penstock.core.errors import InvalidRequest, StoreFailed, StoreFull, UnreadablePointer
from penstock.core.pointer import (
    FIELD,
    BlobName,
    check_media_type,
    check_size,
    name_blob,
    no_such_blob,
    parse_blob,
    shown,
)
from penstock.ports.blobs import MAX_ARTIFACT, Blobs, BlobStat

if TYPE_CHECKING:
    from penstock.adapters.files.objects import ObjectFolder

T = TypeVar("T")


class FileBlobs(Blobs):
    """Stored blobs are files below `root`, or objects below it if it is a URL.

    `sources` are the URI prefixes below which others' data may be read; none by default.
    """

    def __init__(
        self,
        root: Path | str,
        *,
        inline_limit: int = 4096,
        max_size: int = 64 << 20,
        max_artifact: int = MAX_ARTIFACT,
        sources: Sequence[str] = (),
    ) -> None:
        super().__init__(inline_limit=inline_limit, max_size=max_size, max_artifact=max_artifact)
        self._folder = (
            BlobFolder(root, max_size) if isinstance(root, Path) else _objects(root, max_size)
        )
        self._foreign = Foreign(sources, max_size)
        # Threads of our own: a payload must not queue behind what else uses the loop's.
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="penstock-blobs")

    async def stream(self, uri: str, chunk: int = 1 << 20) -> AsyncIterator[bytes]:
        """Piece by piece. A blob's last piece comes only after its hash was checked."""
        if uri.startswith("data:"):
            async for piece in super().stream(uri, chunk):
                yield piece
            return
        pieces = self._at(uri).pieces(uri, chunk)
        while piece := await self._in_thread(next, pieces, b""):
            yield piece

    async def read(self, uri: str, start: int, length: int) -> bytes:
        """As the port says; that it is sound can only be told of a whole."""
        if uri.startswith("data:"):
            return await super().read(uri, start, length)
        return await self._in_thread(self._at(uri).part, uri, start, length)

    async def write_part(self, upload: str, start: int, data: bytes) -> None:
        check_size("artifact", start + len(data), self.max_artifact)
        await self._in_thread(self._folder.write_part, upload, start, data)

    async def finish_upload(self, upload: str, digest: str, size: int, media_type: str) -> BlobStat:
        return await self._in_thread(
            self._folder.finish_upload, upload, BlobName(digest, media_type), size
        )

    async def _finish_own(self, upload: str, digest: str, size: int, media_type: str) -> BlobStat:
        name = BlobName(digest, media_type)
        return await self._in_thread(self._folder.finish_upload, upload, name, size, True)

    async def drop_upload(self, upload: str) -> None:
        await self._in_thread(self._folder.drop_upload, upload)

    async def _put(self, data: bytes, media_type: str) -> str:
        return await self._in_thread(self._folder.keep, data, media_type)

    async def _get(self, uri: str) -> bytes:
        return await self._in_thread(self._at(uri).read, uri)

    async def _stat(self, uri: str) -> BlobStat:
        return await self._in_thread(self._at(uri).stat, uri)

    async def _collect(self, kept: set[str], older_than: float) -> int:
        """Also clears what writes that were cut short left behind."""
        return await self._in_thread(self._folder.sweep, kept, older_than)

    async def claim(self, new: bytes) -> bytes:
        """The name that the first engine gave this store: `new`, if that is this one."""
        return await self._in_thread(self._folder.claim, new)

    def _at(self, uri: str) -> BlobFolder | ObjectFolder | Foreign:
        return self._folder if uri.startswith("blob:") else self._foreign

    async def _in_thread(self, work: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)


def _objects(url: str, max_size: int) -> ObjectFolder:
    from penstock.adapters.files.objects import ObjectFolder

    return ObjectFolder(url, max_size)


_UPLOADS = "uploads"
_UPLOAD = re.compile("[0-9a-f]{32}")
_OWNERSHIP = "the engine's user must own the data directory and all in it"


class BlobFolder:
    """A folder of files that are named by their content. Everything here blocks.

    A blob is at `<root>/ab/abcdef…`, where the name is the SHA-256 of its bytes. It is written
    beside its place, flushed, renamed, and its folder flushed, so a name that can be seen has its
    whole content behind it. Keeping an existing blob again touches it; `sweep` spares what was
    touched lately, and a lock on `<root>/.lock` keeps a touch from falling between its look and
    its delete, in any process.
    """

    def __init__(self, root: Path, max_size: int) -> None:
        self._root, self._max_size = root, max_size
        self._durable: set[Path] = set()

    def keep(self, data: bytes, media_type: str) -> str:
        """When this returns, the blob is on disk, whole, and will be found after a crash."""
        name = name_blob(data, media_type)
        path = self._path(name.digest)
        with _store_errors(path.parent):
            self._make(self._root)
            self._make(path.parent)
            if not self._renew(path, data):
                _write(path, data)
            # Also when it was there: who wrote it may not have come this far yet.
            sync_folder(path.parent)
        return name.uri

    def write_part(self, upload: str, start: int, data: bytes) -> None:
        path = self._upload(upload)
        with _store_errors(path.parent):
            self._make(self._root)
            path.parent.mkdir(mode=0o700, exist_ok=True)
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            with open(handle, "wb", buffering=0) as file:
                file.seek(start)
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]

    def finish_upload(
        self, upload: str, name: BlobName, size: int, is_own: bool = False
    ) -> BlobStat:
        """As with `keep`. A repeated call finds the blob that the first one made. With `is_own`,
        this process has written it and made the digest."""
        check_media_type(name.media_type)
        draft, path = self._upload(upload), self._path(parse_blob(name.uri).digest)
        with _store_errors(path.parent):
            self._make(self._root)
            self._make(path.parent)
            if size == 0:
                draft.parent.mkdir(mode=0o700, exist_ok=True)
                draft.touch(0o600)
            try:
                with draft.open("rb") as file:
                    found = os.fstat(file.fileno()).st_size
                    sound = is_own or file_digest(file, sha256).hexdigest() == name.digest
                    if found != size or not sound:
                        raise InvalidRequest(
                            "upload", f"has {found} bytes that are not those of the digest"
                        )
                    os.fsync(file.fileno())
                with self._lock(fcntl.LOCK_SH):
                    draft.rename(path)
                    os.utime(path)
            except FileNotFoundError:
                size = self.stat(name.uri).size
            # Also when it was there: a call that was cut short may not have come this far.
            sync_folder(path.parent)
        return BlobStat(name.uri, size, name.media_type)

    def drop_upload(self, upload: str) -> None:
        with _store_errors(self._root):
            self._upload(upload).unlink(missing_ok=True)

    def _upload(self, upload: str) -> Path:
        return self._root / _UPLOADS / check_upload(upload)

    def claim(self, new: bytes) -> bytes:
        file = self._root / ".name"
        with _store_errors(self._root):
            self._make(self._root)
            with suppress(FileExistsError), file.open("xb") as made:
                made.write(new)
            return file.read_bytes()

    def read(self, uri: str) -> bytes:
        with self._opened(uri) as (file, digest):
            check_size(FIELD, os.fstat(file.fileno()).st_size, self._max_size)
            data = file.read()
        if sha256(data).hexdigest() != digest:
            raise damaged(uri)
        return data

    def pieces(self, uri: str, size: int) -> Iterator[bytes]:
        """The content; the last piece only after the hash of all was checked."""
        with self._opened(uri) as (file, digest):
            seen = sha256()
            piece = file.read(size)
            while piece:
                seen.update(piece)
                ahead = file.read(size)
                if not ahead and seen.hexdigest() != digest:
                    raise damaged(uri)
                yield piece
                piece = ahead

    def part(self, uri: str, start: int, length: int) -> bytes:
        """Some of the content, unchecked: the name is the hash of all of it."""
        with self._opened(uri) as (file, _):
            file.seek(start)
            return file.read(length)

    def stat(self, uri: str) -> BlobStat:
        """From now on the blob counts as new."""
        name = parse_blob(uri)
        path = self._path(name.digest)
        with _read_errors(uri), self._lock(fcntl.LOCK_SH):
            size = path.stat().st_size
            os.utime(path)
        return BlobStat(uri, size, name.media_type)

    def sweep(self, kept: set[str], older_than: float) -> int:
        """Delete what is neither kept nor touched since; returns how many blobs."""
        removed = 0
        with _store_errors(self._root):
            for folder in sorted(self._root.glob("[0-9a-f][0-9a-f]")):
                with self._lock(fcntl.LOCK_EX):
                    removed += _sweep(folder, kept, older_than)
            if (uploads := self._root / _UPLOADS).is_dir():
                _sweep(uploads, set(), older_than)
        return removed

    def _path(self, digest: str) -> Path:
        return self._root / digest[:2] / digest

    @contextmanager
    def _opened(self, uri: str) -> Iterator[tuple[BinaryIO, str]]:
        digest = parse_blob(uri).digest
        with _read_errors(uri), self._path(digest).open("rb") as file:
            yield file, digest

    def _make(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder not in self._durable:
            sync_folder(folder.parent)
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


def check_upload(upload: str) -> str:
    if not _UPLOAD.fullmatch(upload):
        raise InvalidRequest("upload", "must be 32 hexadecimal digits")
    return upload


def _write(path: Path, data: bytes) -> None:
    """Put the bytes at `path`, whole or not at all."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with open(draft, "xb", opener=open_private) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise


def open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def sync_folder(folder: Path) -> None:
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
def _read_errors(uri: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise no_such_blob(uri) from None
    except OSError as error:
        raise UnreadablePointer(
            FIELD, f"the blob {shown(uri)} can't be read: {error.strerror}", hint=_OWNERSHIP
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


def damaged(uri: str) -> UnreadablePointer:
    return UnreadablePointer(
        FIELD,
        f"the blob {shown(uri)} is damaged: its content no longer matches its name",
        hint="submit the payload again, which mends it, or restore it from a backup",
    )
