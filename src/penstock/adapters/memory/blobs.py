"""Payloads in memory: for tests and for engines that need not outlive their process."""

from __future__ import annotations

from collections.abc import AsyncIterator

from penstock.core.errors import InvalidRequest, UnreadablePointer
from penstock.core.pointer import (
    FIELD,
    BlobName,
    check_size,
    decode_data,
    name_blob,
    no_such_blob,
    parse_blob,
    scheme_of,
    shown,
)
from penstock.ports.blobs import MAX_ARTIFACT, Blobs, BlobStat
from penstock.ports.clock import Clock, SystemClock


class MemoryBlobs(Blobs):
    """Behaves as FileBlobs does, but follows no pointer to others' data."""

    def __init__(
        self,
        *,
        inline_limit: int = 4096,
        max_size: int = 64 << 20,
        max_artifact: int = MAX_ARTIFACT,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(inline_limit=inline_limit, max_size=max_size, max_artifact=max_artifact)
        self._clock = clock or SystemClock()
        self._kept: dict[str, bytes] = {}
        self._touched: dict[str, float] = {}
        self._uploads: dict[str, bytearray] = {}

    async def stream(self, uri: str, chunk: int = 1 << 20) -> AsyncIterator[bytes]:
        start = 0
        while piece := await self.read(uri, start, chunk):
            yield piece
            start += len(piece)

    async def read(self, uri: str, start: int, length: int) -> bytes:
        data = decode_data(uri) if uri.startswith("data:") else self._find(uri)
        return data[start : start + length]

    async def write_part(self, upload: str, start: int, data: bytes) -> None:
        check_size("artifact", start + len(data), self.max_artifact)
        content = self._uploads.setdefault(upload, bytearray())
        content[start : start + len(data)] = data

    async def finish_upload(self, upload: str, digest: str, size: int, media_type: str) -> BlobStat:
        data = bytes(self._uploads.pop(upload, b""))
        if not data and size:  # a repeated call
            return await self._stat(BlobName(digest, media_type).uri)
        name = name_blob(data, media_type)
        if (name.digest, len(data)) != (digest, size):
            raise InvalidRequest(
                "upload", f"has {len(data)} bytes that are not those of the digest"
            )
        return BlobStat(await self._put(data, media_type), size, media_type)

    async def drop_upload(self, upload: str) -> None:
        self._uploads.pop(upload, None)

    async def _put(self, data: bytes, media_type: str) -> str:
        name = name_blob(data, media_type)
        self._kept[name.digest] = bytes(data)
        self._touched[name.digest] = self._clock.now()
        return name.uri

    async def _get(self, uri: str) -> bytes:
        data = self._find(uri)
        check_size(FIELD, len(data), self.max_size)
        return data

    def _find(self, uri: str) -> bytes:
        if scheme_of(uri) != "blob":
            raise UnreadablePointer(
                FIELD,
                f"{shown(uri)} is not below any allowed source",
                hint="an engine in memory reads data: and its own blob: pointers only",
            )
        data = self._kept.get(parse_blob(uri).digest)
        if data is None:
            raise no_such_blob(uri)
        return data

    async def _stat(self, uri: str) -> BlobStat:
        size, name = len(self._find(uri)), parse_blob(uri)
        self._touched[name.digest] = self._clock.now()
        return BlobStat(uri, size, name.media_type)

    async def _collect(self, kept: set[str], older_than: float) -> int:
        old = [d for d, at in self._touched.items() if at < older_than and d not in kept]
        for digest in old:
            del self._kept[digest], self._touched[digest]
        return len(old)
