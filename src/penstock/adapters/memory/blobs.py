"""Payloads in memory: for tests and for engines that need not outlive their process."""

from __future__ import annotations

from penstock.core.errors import UnreadablePointer
from penstock.core.pointer import (
    FIELD,
    check_size,
    name_blob,
    no_such_blob,
    parse_blob,
    scheme_of,
    shown,
)
from penstock.ports.blobs import Blobs, BlobStat
from penstock.ports.clock import Clock, SystemClock


class MemoryBlobs(Blobs):
    """Behaves as FileBlobs does, but follows no pointer to others' data."""

    def __init__(
        self,
        *,
        inline_limit: int = 4096,
        max_size: int = 64 << 20,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(inline_limit=inline_limit, max_size=max_size)
        self._clock = clock or SystemClock()
        self._kept: dict[str, bytes] = {}
        self._touched: dict[str, float] = {}

    async def _put(self, data: bytes, media_type: str) -> str:
        name = name_blob(data, media_type)
        self._kept[name.digest] = bytes(data)
        self._touched[name.digest] = self._clock.now()
        return name.uri

    async def _get(self, uri: str) -> bytes:
        if scheme_of(uri) != "blob":
            raise UnreadablePointer(
                FIELD,
                f"{shown(uri)} is not below any allowed source",
                hint="an engine in memory reads data: and its own blob: pointers only",
            )
        data = self._kept.get(parse_blob(uri).digest)
        if data is None:
            raise no_such_blob(uri)
        check_size(FIELD, len(data), self.max_size)
        return data

    async def _stat(self, uri: str) -> BlobStat:
        size, name = len(await self._get(uri)), parse_blob(uri)
        self._touched[name.digest] = self._clock.now()
        return BlobStat(uri, size, name.media_type)

    async def _collect(self, kept: set[str], older_than: float) -> int:
        old = [d for d, at in self._touched.items() if at < older_than and d not in kept]
        for digest in old:
            del self._kept[digest], self._touched[digest]
        return len(old)
