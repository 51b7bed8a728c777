"""Payloads on disk.

Tiny payloads ride in their pointer, which neither waits nor leaves the event loop; files
and others' data are read and written in threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import ParamSpec, TypeVar

from penstock.adapters.files.folder import BlobFolder
from penstock.adapters.files.foreign import Foreign
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
from penstock.ports.blobs import BlobStat

P = ParamSpec("P")
T = TypeVar("T")


class FileBlobs:
    """`data:` URIs up to `inline_limit` bytes, files below `root` above it.

    `sources` are the URI prefixes below which others' data may be read; none by default.
    """

    def __init__(
        self,
        root: Path,
        *,
        inline_limit: int = 4096,
        max_size: int = 64 << 20,
        sources: Sequence[str] = (),
    ) -> None:
        self._inline_limit = inline_limit
        self._max_size = max_size
        self._folder = BlobFolder(root)
        self._foreign = Foreign(sources, max_size)
        # Threads of our own: a payload must not queue behind what else uses the loop's.
        self._threads = ThreadPoolExecutor(8, thread_name_prefix="penstock-blobs")

    async def put(self, data: bytes, media_type: str = JSON) -> str:
        if len(data) <= self._inline_limit:
            return encode_data(data, media_type)
        check_size("payload", len(data), self._max_size)
        return (await self._in_thread(self._folder.keep, data, media_type)).uri

    async def get(self, uri: str) -> bytes:
        if uri.startswith("data:"):
            data = decode_data(uri)
            check_size(FIELD, len(data), self._max_size)
            return data
        if uri.startswith("blob:"):
            return await self._in_thread(self._folder.read, parse_blob(uri), self._max_size)
        return await self._in_thread(self._foreign.read, uri)

    async def stream(self, uri: str, chunk: int = 1 << 20) -> AsyncIterator[bytes]:
        """Piece by piece. A blob's last piece comes only after its hash was checked."""
        if uri.startswith("data:"):
            data = await self.get(uri)
            for start in range(0, len(data), chunk):
                yield data[start : start + chunk]
            return
        if uri.startswith("blob:"):
            pieces = self._folder.pieces(parse_blob(uri), chunk)
        else:
            pieces = self._foreign.pieces(uri, chunk)
        while piece := await self._in_thread(next, pieces, b""):
            yield piece

    async def read(self, uri: str, start: int, length: int) -> bytes:
        """As the port says; that it is sound can only be told of a whole."""
        if uri.startswith("data:"):
            return (await self.get(uri))[start : start + length]
        if uri.startswith("blob:"):
            return await self._in_thread(self._folder.part, parse_blob(uri), start, length)
        return await self._in_thread(self._foreign.part, uri, start, length)

    async def stat(self, uri: str) -> BlobStat:
        """Who asks about a blob is about to name it: `collect` then takes it for new."""
        if uri.startswith("data:"):
            return BlobStat(uri, len(decode_data(uri)), data_media_type(uri))
        if uri.startswith("blob:"):
            name = parse_blob(uri)
            return BlobStat(uri, await self._in_thread(self._folder.touch, name), name.media_type)
        return await self._in_thread(self._foreign.stat, uri)

    async def collect(self, keep: Iterable[str], older_than: float) -> int:
        """As the port says; also clears what writes that were cut short left behind.

        `older_than` must be earlier than the moment at which `keep` was gathered.
        """
        kept = await _digests(keep)
        return await self._in_thread(self._folder.sweep, kept, older_than)

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: work(*args, **kwargs))


async def _digests(keep: Iterable[str]) -> set[str]:
    """The digests among these pointers. Gives way now and then: there may be millions."""
    found: set[str] = set()
    for number, uri in enumerate(keep, 1):
        if uri.startswith("blob:"):
            with suppress(UnreadablePointer):
                found.add(parse_blob(uri).digest)
        if number % 1000 == 0:
            await asyncio.sleep(0)
    return found
