"""Payloads, over HTTP: up in one piece, down in parts."""

from __future__ import annotations

from msgspec import Struct

from penstock.adapters.http.line import Answer, Line, segment
from penstock.adapters.http.problems import NoSuchPart
from penstock.core.pointer import data_media_type, decode_data
from penstock.ports.blobs import BlobStat

_PART = 8 << 20


class Kept(Struct, frozen=True):
    uri: str


class HttpBlobs:
    """What a Desk has of blobs."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def put(self, data: bytes, media_type: str) -> str:
        # A blob is named by its content, so it can be sent twice.
        answer = await self._line.call(
            "POST", "/v1/blobs", data=data, headers={"Content-Type": media_type}, again=True
        )
        return answer.read(Kept).uri

    async def get(self, uri: str) -> bytes:
        if uri.startswith("data:"):
            return decode_data(uri)
        parts = []
        size, have = 1, 0
        while have < size:
            answer = await self._part(uri, have, _PART)
            if answer is None:
                break
            parts.append(answer.body)
            have += len(answer.body)
            size = _size(answer)
        return b"".join(parts)

    async def stat(self, uri: str) -> BlobStat:
        if uri.startswith("data:"):
            return BlobStat(uri, len(decode_data(uri)), data_media_type(uri))
        answer = await self._part(uri, 0, 1)
        if answer is None:  # an empty one has no first byte
            answer = await self._line.call("GET", _at(uri), again=True)
        return BlobStat(uri, _size(answer), answer.headers.get("Content-Type", ""))

    async def read(self, uri: str, start: int, length: int) -> bytes:
        if uri.startswith("data:"):
            return decode_data(uri)[start : start + length]
        if length <= 0:
            return b""
        answer = await self._part(uri, start, length)
        return b"" if answer is None else answer.body

    async def _part(self, uri: str, start: int, length: int) -> Answer | None:
        """None where it has ended before."""
        wanted = {"Range": f"bytes={start}-{start + length - 1}"}
        try:
            return await self._line.call("GET", _at(uri), headers=wanted, again=True)
        except NoSuchPart:
            return None


def _at(uri: str) -> str:
    return f"/v1/blobs/{segment(uri)}"


def _size(answer: Answer) -> int:
    """Of the whole, as a part of it tells."""
    told = answer.headers.get("Content-Range", "")
    _, _, size = told.rpartition("/")
    return int(size) if size.isdecimal() else len(answer.body)
