"""Where payloads are kept: what `context_ptr` and `result_ptr` point to."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Protocol

from msgspec import Struct


class BlobStat(Struct, frozen=True):
    uri: str
    size: int
    media_type: str


class Blobs(Protocol):
    async def put(self, data: bytes, media_type: str = "application/json") -> str:
        """Keep the bytes, durably, and return their URI. Raises TooLarge."""

    async def get(self, uri: str) -> bytes:
        """Raises UnreadablePointer for what may not be, or can't be, read."""

    def stream(self, uri: str, chunk: int = 1 << 20) -> AsyncIterator[bytes]: ...

    async def read(self, uri: str, start: int, length: int) -> bytes:
        """A part of it; short only where it ends."""

    async def stat(self, uri: str) -> BlobStat: ...

    async def collect(self, keep: Iterable[str], older_than: float) -> int:
        """Delete stored blobs not in `keep` and untouched since; return how many."""
