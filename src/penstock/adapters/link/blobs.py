"""Blobs kept by an engine elsewhere; small payloads never leave this side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

from penstock.adapters.link.client import Link
from penstock.core.errors import NotRunning, Unavailable
from penstock.core.pointer import check_size, data_media_type, decode_data, encode_data
from penstock.ports.blobs import BlobStat

T = TypeVar("T")


class RemoteBlobs:
    """See `penstock.ports.blobs.Blobs`. Waits for the engine while the link is down."""

    def __init__(self, link: Link, *, inline_limit: int = 4096, max_size: int = 64 << 20) -> None:
        self._link, self._inline_limit, self._max_size = link, inline_limit, max_size

    async def put(self, data: bytes, media_type: str = "application/json") -> str:
        if len(data) <= self._inline_limit:
            return encode_data(data, media_type)
        check_size("payload", len(data), self._max_size)
        return await self._insist(
            lambda: self._link.call("put_blob", str, data=data, media_type=media_type)
        )

    async def get(self, uri: str) -> bytes:
        if uri.startswith("data:"):
            return decode_data(uri)
        return await self._insist(lambda: self._link.call("get_blob", bytes, uri=uri))

    async def stream(self, uri: str, chunk: int = 1 << 20) -> AsyncIterator[bytes]:
        data = await self.get(uri)
        for start in range(0, len(data), chunk):
            yield data[start : start + chunk]

    async def read(self, uri: str, start: int, length: int) -> bytes:
        if uri.startswith("data:"):
            return decode_data(uri)[start : start + length]
        return await self._insist(
            lambda: self._link.call("read_blob", bytes, uri=uri, start=start, length=length)
        )

    async def stat(self, uri: str) -> BlobStat:
        media_type = data_media_type(uri) if uri.startswith("data:") else "application/json"
        return BlobStat(uri, len(await self.get(uri)), media_type)

    async def collect(self, keep: Iterable[str], older_than: float) -> int:
        raise Unavailable("the engine that keeps the blobs collects them")

    async def _insist(self, attempt: Callable[[], Awaitable[T]]) -> T:
        while True:
            await self._link.ready()
            try:
                return await attempt()
            except NotRunning:
                await asyncio.sleep(0)
