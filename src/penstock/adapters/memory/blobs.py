"""Payloads in memory: for tests and for engines that need not outlive their process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import suppress

from penstock.core.errors import UnreadablePointer
from penstock.core.pointer import (
    FIELD,
    JSON,
    check_size,
    data_media_type,
    decode_data,
    encode_data,
    name_blob,
    parse_blob,
    scheme_of,
    shown,
)
from penstock.ports.blobs import BlobStat
from penstock.ports.clock import Clock, SystemClock


class MemoryBlobs:
    """Behaves as FileBlobs does, but follows no pointer to others' data."""

    def __init__(
        self,
        *,
        inline_limit: int = 4096,
        max_size: int = 64 << 20,
        clock: Clock | None = None,
    ) -> None:
        self._inline_limit = inline_limit
        self._max_size = max_size
        self._clock = clock or SystemClock()
        self._kept: dict[str, bytes] = {}
        self._touched: dict[str, float] = {}

    async def put(self, data: bytes, media_type: str = JSON) -> str:
        if len(data) <= self._inline_limit:
            return encode_data(data, media_type)
        check_size("payload", len(data), self._max_size)
        name = name_blob(data, media_type)
        self._kept[name.digest] = bytes(data)
        self._touched[name.digest] = self._clock.now()
        return name.uri

    async def get(self, uri: str) -> bytes:
        data = decode_data(uri) if uri.startswith("data:") else self._find(uri)
        check_size(FIELD, len(data), self._max_size)
        return data

    async def stream(self, uri: str, chunk: int = 1 << 20) -> AsyncIterator[bytes]:
        data = await self.get(uri)
        for start in range(0, len(data), chunk):
            yield data[start : start + chunk]

    async def read(self, uri: str, start: int, length: int) -> bytes:
        return (await self.get(uri))[start : start + length]

    async def stat(self, uri: str) -> BlobStat:
        if uri.startswith("data:"):
            return BlobStat(uri, len(decode_data(uri)), data_media_type(uri))
        size, name = len(self._find(uri)), parse_blob(uri)
        self._touched[name.digest] = self._clock.now()
        return BlobStat(uri, size, name.media_type)

    async def collect(self, keep: Iterable[str], older_than: float) -> int:
        kept: set[str] = set()
        for uri in keep:
            with suppress(UnreadablePointer):
                kept.add(parse_blob(uri).digest)
        doomed = [d for d, at in self._touched.items() if at < older_than and d not in kept]
        for digest in doomed:
            del self._kept[digest], self._touched[digest]
        return len(doomed)

    def _find(self, uri: str) -> bytes:
        if scheme_of(uri) != "blob":
            raise UnreadablePointer(
                FIELD,
                f"{shown(uri)} is not below any allowed source",
                hint="an engine in memory reads data: and its own blob: pointers only",
            )
        try:
            return self._kept[parse_blob(uri).digest]
        except KeyError:
            raise UnreadablePointer(
                FIELD,
                f"there is no blob {shown(uri)}",
                hint="it was never stored here, or its retention has passed",
            ) from None
