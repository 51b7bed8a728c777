"""Reading what others keep: `file:`, and every scheme that fsspec knows.

Blocking code, meant for a thread. Nothing is opened that no source permits, nothing longer
than the limit is read, and whatever goes wrong is an UnreadablePointer or TooLarge.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from mimetypes import guess_type
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from penstock.core.errors import Misconfigured, PenstockError, UnreadablePointer
from penstock.core.pointer import BINARY, FIELD, Source, check_size, locate, parse_source, shown
from penstock.ports.blobs import BlobStat


class Foreign:
    """Opens pointers to others' data, under an allow-list."""

    def __init__(self, sources: Sequence[str], max_size: int) -> None:
        self._sources = tuple(_parsed(source) for source in sources)
        self._max_size = max_size

    def read(self, uri: str) -> bytes:
        return b"".join(self.pieces(uri, 1 << 20))

    def pieces(self, uri: str, size: int) -> Generator[bytes, None, None]:
        """The content piece by piece; TooLarge as soon as it passes the limit."""
        with self._opened(uri) as file:
            yield from self._limited(file, size)

    def part(self, uri: str, start: int, length: int) -> bytes:
        """Some of the content; where one can't begin in the middle it is read up to there."""
        try:
            with self._opened(uri) as file:
                file.seek(start)
                return file.read(length)
        except UnreadablePointer as error:
            # How fsspec says that a server knows no ranges, or a stream no way back.
            if not isinstance(error.__cause__, ValueError):
                raise
        read = bytearray()
        for piece in self.pieces(uri, 1 << 20):
            read += piece
            if len(read) >= start + length:
                break
        return bytes(read[start : start + length])

    def stat(self, uri: str) -> BlobStat:
        with self._opened(uri) as file:
            size = _size(file)
            if size is None:
                size = sum(map(len, self._limited(file, 1 << 20)))
        media_type, _ = guess_type(urlsplit(uri).path)
        return BlobStat(uri, size, media_type or BINARY)

    @contextmanager
    def _opened(self, uri: str) -> Iterator[BinaryIO]:
        """The content, if it may be read; what the reading raises is translated too."""
        try:
            with self._open(uri) as file:
                if (size := _size(file)) is not None:
                    check_size(FIELD, size, self._max_size)
                yield file
        except PenstockError:
            raise
        # Each file system has errors of its own; to the caller they are all one.
        except Exception as error:
            raise _failed(uri, error) from error

    def _limited(self, file: BinaryIO, size: int) -> Iterator[bytes]:
        total = 0
        while data := file.read(size):
            total += len(data)
            check_size(FIELD, total, self._max_size)
            yield data

    def _open(self, uri: str) -> BinaryIO:
        where = locate(uri)
        if where.scheme == "file":
            return self._open_file(uri, where)
        if not any(source.permits(where) for source in self._sources):
            raise _refused(uri)
        return _open_remote(uri, where.scheme)

    def _open_file(self, uri: str, where: Source) -> BinaryIO:
        path = Path(os.path.realpath(where.path))
        folders = (os.path.realpath(s.path) for s in self._sources if s.scheme == "file")
        if not any(path.is_relative_to(folder) for folder in folders):
            raise _refused(uri)
        # The path is free of links now; what became one since, or a pipe, is not followed.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise UnreadablePointer(FIELD, f"{shown(uri)} is not a regular file")
        return os.fdopen(handle, "rb")


def _open_remote(uri: str, scheme: str) -> BinaryIO:
    import fsspec

    options: dict[str, Any] = {}
    if scheme in ("http", "https"):
        options["get_client"] = _client_without_redirects
    try:
        files = fsspec.get_filesystem_class(scheme)(**options)
    except ValueError as error:
        raise UnreadablePointer(
            FIELD, f"{shown(uri)} has a scheme that nothing installed can read", hint=str(error)
        ) from error
    # Not fsspec.open: it would also expand chains, globs and compression.
    return cast("BinaryIO", files.open(files._strip_protocol(uri), "rb"))


class _Redirected(Exception):
    """An allowed host would send us to one that may not be allowed."""


async def _client_without_redirects(**options: Any) -> Any:
    aiohttp = import_module("aiohttp")

    async def refuse(*_: Any) -> None:
        raise _Redirected

    trace = aiohttp.TraceConfig()
    trace.on_request_redirect.append(refuse)
    return aiohttp.ClientSession(trace_configs=[trace], **options)


def _size(file: BinaryIO) -> int | None:
    """The length, where it is known before reading."""
    try:
        return os.fstat(file.fileno()).st_size
    except (OSError, AttributeError):
        size = getattr(file, "size", None)
        return size if isinstance(size, int) else None


def _parsed(source: str) -> Source:
    try:
        return parse_source(source)
    except ValueError as error:
        raise Misconfigured(f"sources: {error}") from None


def _refused(uri: str) -> UnreadablePointer:
    return UnreadablePointer(
        FIELD,
        f"{shown(uri)} is not below any allowed source",
        hint="submit the content itself, or add its folder or host to `sources`",
    )


def _failed(uri: str, error: Exception) -> UnreadablePointer:
    match _root(error):
        case _Redirected():
            cause, hint = "is redirected by its server", "point to where it leads, if allowed"
        case FileNotFoundError():
            cause, hint = "does not exist", "check the spelling, or submit the content itself"
        case PermissionError():
            cause, hint = "may not be read by the engine", "give the engine's user the right to"
        case ImportError():
            cause = f"needs a package that isn't installed: {error}"
            hint = "install it where the engine runs"
        case _:
            # The message may quote the URI with its query: name the class only.
            cause = f"can't be read: {type(error).__name__}"
            hint = "see that it can be reached from where the engine runs"
    return UnreadablePointer(FIELD, f"{shown(uri)} {cause}", hint=hint)


def _root(error: BaseException) -> BaseException:
    """The redirect that a file system wrapped in an error of its own, or that error."""
    inner: BaseException | None = error
    while inner is not None and not isinstance(inner, _Redirected):
        inner = inner.__cause__ or inner.__context__
    return inner or error
