"""Where payloads are kept: what `context_ptr` and `result_ptr` point to."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress

from msgspec import Struct

from penstock.core.errors import UnreadablePointer
from penstock.core.pointer import (
    FIELD,
    JSON,
    check_size,
    data_media_type,
    decode_data,
    encode_data,
    parse_blob,
)


class BlobStat(Struct, frozen=True):
    uri: str
    size: int
    media_type: str


class Blobs(ABC):
    """Payloads by URI. Those of at most `inline_limit` bytes ride in their pointer, as a `data:`
    URI; a store keeps the others."""

    def __init__(self, *, inline_limit: int = 4096, max_size: int = 64 << 20) -> None:
        self.inline_limit, self.max_size = inline_limit, max_size

    async def put(self, data: bytes, media_type: str = JSON) -> str:
        """Keep the bytes, durably, and return their URI. Raises TooLarge."""
        if len(data) <= self.inline_limit:
            return encode_data(data, media_type)
        check_size("payload", len(data), self.max_size)
        return await self._put(data, media_type)

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
        """Whoever asks about a blob is about to name it: `collect` then takes it for new."""
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

    # -- what a store adds, for pointers that are no `data:` URIs --------------------------

    @abstractmethod
    async def _put(self, data: bytes, media_type: str) -> str: ...

    @abstractmethod
    async def _get(self, uri: str) -> bytes: ...

    @abstractmethod
    async def _stat(self, uri: str) -> BlobStat: ...

    @abstractmethod
    async def _collect(self, kept: set[str], older_than: float) -> int:
        """`kept` are digests."""
