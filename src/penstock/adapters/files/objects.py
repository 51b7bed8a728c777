"""Payloads in an object store: S3 and whatever else fsspec can write to. Everything here blocks.

An object is at `<root>/ab/abcdef…`, named by the SHA-256 of its content, as files are. An object
store replaces an object as a whole, so there is nothing to rename. It can't touch one: `touched/`
has an empty object for each blob that was named again, whose time counts instead.

Only the engine that owns the jobs reads and writes here, so a lock of the process keeps a touch
from falling between a look of `sweep` and its delete.
"""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any, BinaryIO

from penstock.adapters.files.blobs import check_upload, damaged
from penstock.core.errors import InvalidRequest, Misconfigured, PenstockError, StoreFailed
from penstock.core.pointer import (
    FIELD,
    BlobName,
    check_media_type,
    check_size,
    name_blob,
    no_such_blob,
    parse_blob,
)
from penstock.ports.blobs import PART, BlobStat

_DIGITS = 64
_TIMES = ("LastModified", "mtime", "updated", "last_modified", "created")
"""What file systems call the time of an object in what they tell of it."""
_HINT = "the object store must answer, and let the engine list, read, write and delete there"


class ObjectFolder:
    """Does what `BlobFolder` does, below a URL as `s3://bucket/penstock`."""

    def __init__(self, url: str, max_size: int) -> None:
        from fsspec.core import url_to_fs

        try:
            # Listings must not be remembered: they say what may be deleted.
            fs, root = url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise Misconfigured(f"storage.blobs: {url} can't be used: {error}") from error
        self._fs: Any = fs
        self._root, self._max_size = root.rstrip("/"), max_size
        self._lock = threading.Lock()
        """Held while a blob is touched, and while one is looked at and deleted."""

    def claim(self, new: bytes) -> bytes:
        """The name that its first engine gave it: `new`, if that is this one."""
        with _store_errors():
            path = f"{self._root}/name"
            if not self._fs.exists(path):
                self._fs.pipe_file(path, new)
            return bytes(self._fs.cat_file(path))

    # -- writing ----------------------------------------------------------------------

    def keep(self, data: bytes, media_type: str) -> str:
        name = name_blob(data, media_type)
        with _store_errors(), self._lock:
            self._fs.pipe_file(self._path(name.digest), data)
        return name.uri

    def write_part(self, upload: str, start: int, data: bytes) -> None:
        with _store_errors():
            self._fs.pipe_file(f"{self._upload(upload)}/{start:020d}", data)

    def finish_upload(
        self, upload: str, name: BlobName, size: int, is_own: bool = False
    ) -> BlobStat:
        """A repeated call finds the blob that the first one made."""
        check_media_type(name.media_type)
        digest = parse_blob(name.uri).digest
        parts = self._parts(upload)
        if size and not parts:
            return BlobStat(name.uri, self.stat(name.uri).size, name.media_type)
        whole = f"{self._upload(upload)}/whole"
        with _store_errors():
            seen, found = sha256(), 0
            with self._fs.open(whole, "wb") as file:
                for start, path in parts:
                    if start != found:
                        break  # a part is missing: what there is has another digest
                    data = self._fs.cat_file(path)
                    seen.update(data)
                    found += file.write(data)
            if found != size or seen.hexdigest() != digest:
                raise InvalidRequest(
                    "upload", f"has {found} bytes that are not those of the digest"
                )
            with self._lock:
                self._fs.copy(whole, self._path(digest))
        self.drop_upload(upload)
        return BlobStat(name.uri, size, name.media_type)

    def _parts(self, upload: str) -> list[tuple[int, str]]:
        with _store_errors(), suppress(FileNotFoundError):
            paths = self._fs.ls(self._upload(upload), detail=False)
            names = ((path.rpartition("/")[2], path) for path in paths)
            return sorted((int(name), path) for name, path in names if name.isdecimal())
        return []

    def drop_upload(self, upload: str) -> None:
        with _store_errors(), suppress(FileNotFoundError):
            self._fs.rm(self._upload(upload), recursive=True)

    def _upload(self, upload: str) -> str:
        return f"{self._root}/uploads/{check_upload(upload)}"

    # -- reading ----------------------------------------------------------------------

    def read(self, uri: str) -> bytes:
        digest = parse_blob(uri).digest
        with _read_errors(uri):
            path = self._path(digest)
            check_size(FIELD, self._fs.size(path), self._max_size)
            data: bytes = self._fs.cat_file(path)
        if sha256(data).hexdigest() != digest:
            raise damaged(uri)
        return data

    def pieces(self, uri: str, size: int) -> Iterator[bytes]:
        """The content; the last piece only after the hash of all was checked."""
        digest = parse_blob(uri).digest
        with _read_errors(uri), self._opened(digest) as file:
            seen = sha256()
            piece = file.read(size)
            while piece:
                seen.update(piece)
                ahead = file.read(size)
                if not ahead and seen.hexdigest() != digest:
                    raise damaged(uri)
                yield piece
                piece = ahead

    @contextmanager
    def _opened(self, digest: str) -> Iterator[BinaryIO]:
        with self._fs.open(self._path(digest), "rb", block_size=4 * PART) as file:
            yield file

    def part(self, uri: str, start: int, length: int) -> bytes:
        digest = parse_blob(uri).digest
        with _read_errors(uri):
            path = self._path(digest)
            end = min(start + length, self._fs.size(path))
            data: bytes = self._fs.cat_file(path, start=start, end=end) if start < end else b""
        return data

    def stat(self, uri: str) -> BlobStat:
        """From now on the blob counts as new."""
        name = parse_blob(uri)
        with _read_errors(uri), self._lock:
            size = self._fs.size(self._path(name.digest))
            self._fs.pipe_file(self._touched(name.digest), b"")
        return BlobStat(uri, size, name.media_type)

    # -- deleting ---------------------------------------------------------------------

    def sweep(self, kept: set[str], older_than: float) -> int:
        """Delete what is neither kept nor touched since; returns how many blobs."""
        removed = 0
        with _store_errors():
            found: dict[str, Any] = self._fs.find(self._root, detail=True)
            for path, info in found.items():
                folder, name = path.rsplit("/", 2)[1:]
                is_blob = len(name) == _DIGITS and folder == name[:2]
                if name not in kept and self._time(path, info) < older_than:
                    if is_blob:
                        removed += self._sweep(path, name, older_than)
                    elif f"{self._root}/uploads/" in path:
                        self._fs.rm_file(path)
        return removed

    def _sweep(self, path: str, digest: str, older_than: float) -> bool:
        """Delete a blob, if it is still old."""
        with self._lock:
            for one in (path, touched := self._touched(digest)):
                with suppress(FileNotFoundError):
                    if self._time(one, self._fs.info(one)) >= older_than:
                        return False
            self._fs.rm_file(path)
            with suppress(FileNotFoundError):
                self._fs.rm_file(touched)
        return True

    def _time(self, path: str, info: dict[str, Any]) -> float:
        """When it was written; rounded up, as some stores tell whole seconds."""
        known = (info[name] for name in _TIMES if info.get(name) is not None)
        time: Any = next(known, None) or self._fs.modified(path)
        if isinstance(time, dt.datetime):
            time = (time if time.tzinfo else time.replace(tzinfo=dt.UTC)).timestamp()
        return float(time) + 1.0

    def _path(self, digest: str) -> str:
        return f"{self._root}/{digest[:2]}/{digest}"

    def _touched(self, digest: str) -> str:
        return f"{self._root}/touched/{digest}"


@contextmanager
def _read_errors(uri: str) -> Iterator[None]:
    with _store_errors():
        try:
            yield
        except FileNotFoundError:
            raise no_such_blob(uri) from None


@contextmanager
def _store_errors() -> Iterator[None]:
    """Each object store has errors of its own: a reader or writer may try again."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        raise StoreFailed(f"the object store failed: {error!r}", hint=_HINT) from error
