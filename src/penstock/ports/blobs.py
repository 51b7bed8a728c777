"""Where payloads and artifacts are kept: what the pointers of a job point to."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from contextlib import suppress
from hashlib import sha256
from mimetypes import guess_type
from secrets import token_hex
from typing import BinaryIO, Protocol

from msgspec import Struct

from penstock.core.artifact import Artifact, check_name
from penstock.core.errors import InvalidRequest, PenstockError, UnreadablePointer
from penstock.core.pointer import (
    BINARY,
    FIELD,
    JSON,
    check_media_type,
    check_size,
    data_media_type,
    decode_data,
    encode_data,
    parse_blob,
)

MAX_ARTIFACT = 16 << 30
PART = 1 << 20
"""Bytes of a stream that are held in memory at a time."""

Source = bytes | str | os.PathLike[str] | BinaryIO
"""The content of a file: bytes, where it lies, or the file, open for reading."""


class BlobStat(Struct, frozen=True):
    uri: str
    size: int
    media_type: str


class BlobUploads(Protocol):
    """A blob that is written part by part. Every call may be repeated."""

    async def write_part(self, upload: str, start: int, data: bytes) -> None:
        """Write a part at its place; `upload` is a name that the caller made at random."""

    async def finish_upload(self, upload: str, digest: str, size: int, media_type: str) -> BlobStat:
        """Make it a blob, durably. Raises InvalidRequest if it has another size or SHA-256."""

    async def drop_upload(self, upload: str) -> None:
        """Delete what was written. An unfinished upload is deleted by `collect`."""


class Blobs(ABC):
    """Payloads by URI. Those of at most `inline_limit` bytes ride in their pointer, as a `data:`
    URI; a store keeps the others. A payload has at most `max_size` bytes; what is streamed may
    have `max_artifact`, and is not read as a whole."""

    def __init__(
        self,
        *,
        inline_limit: int = 4096,
        max_size: int = 64 << 20,
        max_artifact: int = MAX_ARTIFACT,
    ) -> None:
        self.inline_limit, self.max_size, self.max_artifact = inline_limit, max_size, max_artifact

    async def put(self, data: bytes, media_type: str = JSON) -> str:
        """Keep the bytes, durably, and return their URI. Raises TooLarge."""
        if len(data) <= self.inline_limit:
            return encode_data(data, media_type)
        check_size("payload", len(data), self.max_size)
        return await self._put(data, media_type)

    async def put_stream(self, pieces: AsyncIterable[bytes], media_type: str = BINARY) -> BlobStat:
        """Keep a content of any length, durably, as a stored blob. Raises TooLarge."""
        check_media_type(media_type)
        upload, seen, size = token_hex(16), sha256(), 0
        try:
            async for piece in pieces:
                check_size("artifact", size + len(piece), self.max_artifact)
                await asyncio.gather(
                    asyncio.to_thread(seen.update, piece), self.write_part(upload, size, piece)
                )
                size += len(piece)
            return await self._finish_own(upload, seen.hexdigest(), size, media_type)
        except BaseException:
            with suppress(PenstockError, asyncio.CancelledError):
                await self.drop_upload(upload)
            raise

    async def get(self, uri: str) -> bytes:
        """Raises UnreadablePointer for what may not be, or can't be, read."""
        if not uri.startswith("data:"):
            return await self._get(uri)
        data = decode_data(uri)
        check_size(FIELD, len(data), self.max_size)
        return data

    async def stream(self, uri: str, chunk: int = 1 << 20) -> AsyncIterator[bytes]:
        data = await self.get(uri)
        for start in range(0, len(data), chunk):
            yield data[start : start + chunk]

    async def read(self, uri: str, start: int, length: int) -> bytes:
        """A part of it; short only where it ends."""
        return (await self.get(uri))[start : start + length]

    async def stat(self, uri: str) -> BlobStat:
        """A caller that asks about a blob is about to use it: `collect` then takes it for new."""
        if uri.startswith("data:"):
            return BlobStat(uri, len(decode_data(uri)), data_media_type(uri))
        return await self._stat(uri)

    async def collect(self, keep: Iterable[str], older_than: float) -> int:
        """Delete stored blobs not in `keep` and untouched since; return how many.

        `older_than` must be earlier than the moment at which `keep` was gathered.
        """
        kept: set[str] = set()
        for number, uri in enumerate(keep, 1):
            if uri.startswith("blob:"):
                with suppress(UnreadablePointer):
                    kept.add(parse_blob(uri).digest)
            if number % 1000 == 0:  # there may be millions
                await asyncio.sleep(0)
        return await self._collect(kept, older_than)

    async def _finish_own(self, upload: str, digest: str, size: int, media_type: str) -> BlobStat:
        """Finish what `put_stream` wrote, whose digest need not be checked where it is kept."""
        return await self.finish_upload(upload, digest, size, media_type)

    # -- what a store adds, for pointers that are no `data:` URIs --------------------------

    @abstractmethod
    async def write_part(self, upload: str, start: int, data: bytes) -> None:
        """See `BlobUploads`."""

    @abstractmethod
    async def finish_upload(
        self, upload: str, digest: str, size: int, media_type: str
    ) -> BlobStat: ...

    @abstractmethod
    async def drop_upload(self, upload: str) -> None: ...

    @abstractmethod
    async def _put(self, data: bytes, media_type: str) -> str: ...

    @abstractmethod
    async def _get(self, uri: str) -> bytes: ...

    @abstractmethod
    async def _stat(self, uri: str) -> BlobStat: ...

    @abstractmethod
    async def _collect(self, kept: set[str], older_than: float) -> int:
        """`kept` are digests."""


# -- artifacts ------------------------------------------------------------------------------------


async def keep_artifact(
    blobs: Blobs, name: str, source: Source, media_type: str | None = None
) -> Artifact:
    """Store a file under a name; it is read in parts, and never held in memory as a whole.

    Without a media type it is guessed from the name. Raises InvalidRequest and TooLarge.
    """
    check_name(name)
    return artifact_of(name, await blobs.put_stream(_pieces(source), media_type or _guessed(name)))


def artifact_of(name: str, stored: BlobStat) -> Artifact:
    """A blob under a name."""
    digest = parse_blob(stored.uri).digest
    return Artifact(name, stored.size, digest, stored.media_type, stored.uri)


def _guessed(name: str) -> str:
    """The media type of a file of this name, which is not taken for a URL."""
    media_type, compression = guess_type(f"/{name}")
    if compression is not None:
        return "application/gzip" if compression == "gzip" else BINARY
    return media_type or BINARY


async def _pieces(source: Source) -> AsyncIterator[bytes]:
    if isinstance(source, bytes | bytearray | memoryview):
        view = memoryview(source).cast("B")
        for start in range(0, len(view), PART):
            yield bytes(view[start : start + PART])
        return
    try:
        if isinstance(source, str | os.PathLike):
            file = await asyncio.to_thread(open, source, "rb")
            try:
                while piece := await asyncio.to_thread(file.read, PART):
                    yield piece
            finally:
                file.close()
        elif hasattr(source, "read"):
            while piece := await asyncio.to_thread(source.read, PART):
                if not isinstance(piece, bytes):
                    raise InvalidRequest("source", "must be open in binary mode")
                yield piece
        else:
            kind = type(source).__name__
            raise InvalidRequest("source", f"must be a path, bytes or an open file, got {kind}")
    except OSError as error:
        raise InvalidRequest("source", f"can't be read: {error}") from error
