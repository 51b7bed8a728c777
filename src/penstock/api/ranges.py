"""Downloads: whole content, or a range of it (RFC 9110, section 14)."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import TYPE_CHECKING

from msgspec import Struct

from penstock.api.problems import Refused
from penstock.api.reply import Headers, StreamReply
from penstock.core.errors import NotFound

if TYPE_CHECKING:
    from penstock.api.call import Call

_PIECE = 256 << 10
_RANGE = re.compile(rb"bytes=\s*+(\d{0,19})\s*+-\s*+(\d{0,19})\s*+", re.I)


class Part(Struct, frozen=True):
    status: int
    """200 the whole, 206 a part, 304 nothing new"""
    start: int
    length: int
    headers: Headers = ()


def download(
    call: Call,
    size: int,
    etag: bytes,
    headers: Headers,
    read: Callable[[int, int], Awaitable[bytes]],
) -> StreamReply:
    """`read(offset, size)` returns at most `size` bytes."""
    part = part_of(call.headers, size, etag)
    more = [
        (b"accept-ranges", b"bytes"),
        (b"cache-control", b"private, no-cache"),
        (b"etag", etag),
        *part.headers,
    ]
    if part.status != 304:
        more.append((b"content-length", b"%d" % part.length))
    length = 0 if call.scope["method"] == "HEAD" else part.length
    content = _pieces(read, part.start, length)
    return StreamReply(content, (*headers, *more), part.status, length=length)


async def _pieces(
    read: Callable[[int, int], Awaitable[bytes]], at: int, left: int
) -> AsyncGenerator[bytes, None]:
    while left:
        piece = await read(at, min(_PIECE, left))
        if not piece:
            raise NotFound("it was removed while it was read")
        at, left = at + len(piece), left - len(piece)
        yield piece


def part_of(headers: Mapping[bytes, bytes], size: int, etag: bytes | None) -> Part:
    """Several ranges at once are answered with the whole, as the standard allows."""
    if etag is not None and _names(headers.get(b"if-none-match"), etag):
        return Part(304, 0, 0)
    found = _RANGE.fullmatch(headers.get(b"range", b""))
    if found is None or not (found[1] or found[2]):
        return Part(200, 0, size)
    condition = headers.get(b"if-range")
    if condition is not None and condition.strip() != etag:
        return Part(200, 0, size)
    if found[1]:
        start = int(found[1])
        end = min(int(found[2]), size - 1) if found[2] else size - 1
        if found[2] and int(found[2]) < start:
            return Part(200, 0, size)  # not a range at all
    else:
        start, end = max(0, size - int(found[2])), size - 1
        if not int(found[2]):
            start = size
    if start >= size:
        raise Refused(
            416,
            "NO_SUCH_RANGE",
            f"it has {size:,} bytes only",
            headers=((b"content-range", b"bytes */%d" % size),),
        )
    told = (b"content-range", b"bytes %d-%d/%d" % (start, end, size))
    return Part(206, start, end - start + 1, (told,))


def _names(condition: bytes | None, etag: bytes) -> bool:
    """Whether If-None-Match names this version; weak marks compare alike."""
    if condition is None:
        return False
    tags = [tag.strip().removeprefix(b"W/") for tag in condition.split(b",")]
    return b"*" in tags or etag in tags
