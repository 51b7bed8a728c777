"""The bytes of a feed: from a file, or over HTTP, never more of them than allowed.

Only regular files and http(s) are read, and a redirect can't lead anywhere else.
"""

from __future__ import annotations

import asyncio
import os
import re
import stat
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import aiohttp
import msgspec
from yarl import URL

from penstock.workloads.pipeline.news.errors import BadFeed, FeedError, SlowFeed, answered

MAX_REDIRECTS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_NOT_MODIFIED = 304
_CHUNK = 64 * 1024
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
_CHARSET = re.compile(r"charset\s*=\s*[\"']?([\w.:-]{1,40})", re.IGNORECASE)
_HEADERS = {
    "Accept": "application/atom+xml, application/rss+xml, application/xml;q=0.9, */*;q=0.5",
    "Accept-Encoding": "gzip",
    "User-Agent": "penstock-news",
}


class Validators(msgspec.Struct, frozen=True, kw_only=True):
    """By which a server tells whether a feed has changed since."""

    etag: str = ""
    modified: str = ""

    def __bool__(self) -> bool:
        return bool(self.etag or self.modified)

    def headers(self) -> dict[str, str]:
        asked = {"If-None-Match": self.etag, "If-Modified-Since": self.modified}
        return {name: value for name, value in asked.items() if value}


NOTHING_KNOWN = Validators()


class Fetched(msgspec.Struct, frozen=True, kw_only=True):
    data: bytes = b""
    charset: str = ""
    """As the server gave it; '' leaves it to the document."""
    validators: Validators = NOTHING_KNOWN
    unchanged: bool = False
    """The server said that nothing is new; there are no data."""


async def fetch(
    source: str, *, timeout: float, limit: int, known: Validators = NOTHING_KNOWN
) -> Fetched:
    """Raises FeedError where another try may help, else BadFeed."""
    scheme = _SCHEME.match(source)
    kind = scheme[1].lower() if scheme else ""
    try:
        async with asyncio.timeout(timeout):
            if kind in ("http", "https"):
                return await _fetch_http(source, limit, known)
            if kind in ("", "file"):
                path = _path_of(source) if kind else Path(source)
                return Fetched(data=await asyncio.to_thread(read_file, path, limit))
    except TimeoutError as error:
        raise SlowFeed(f"{shown(source)} was not read within {timeout:g} s") from error
    raise BadFeed(
        f"{shown(source)}: {kind}: is not read", hint="use a path, file:, http: or https:"
    )


def read_file(path: Path, limit: int) -> bytes:
    try:
        # A pipe or a device would not end, so it is not even opened.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise BadFeed(f"{path} is not a file")
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except FileNotFoundError as error:
        raise BadFeed(f"there is no file {path}") from error
    except (OSError, ValueError) as error:
        raise BadFeed(f"{path} can't be read: {error}") from error
    if len(data) > limit:
        raise _too_large(str(path), limit)
    return data


def shown(source: str) -> str:
    """A source as it may be shown: without a user's name and password."""
    try:
        parts = urlsplit(source)
    except ValueError:
        return source
    if "@" not in parts.netloc:
        return source
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _path_of(source: str) -> Path:
    parts = urlsplit(source)
    if parts.netloc not in ("", "localhost"):
        raise BadFeed(f"{shown(source)} is a file of another machine")
    return Path(unquote(parts.path))


# -- HTTP --------------------------------------------------------------------------------


async def _fetch_http(source: str, limit: int, known: Validators) -> Fetched:
    try:
        async with aiohttp.ClientSession(
            headers=_HEADERS,
            # We unpack ourselves: a few kilobytes may hold gigabytes.
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
        ) as session:
            return await _follow(session, source, limit, known)
    except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError) as error:
        raise BadFeed(f"{shown(source)} is not an address") from error
    except aiohttp.ClientError as error:
        why = str(error) or type(error).__name__
        raise FeedError(f"{shown(source)} can't be reached: {why}") from error


async def _follow(
    session: aiohttp.ClientSession, source: str, limit: int, known: Validators
) -> Fetched:
    url = source
    for _ in range(MAX_REDIRECTS + 1):
        async with session.get(
            URL(url), allow_redirects=False, headers=known.headers()
        ) as response:
            if response.status not in _REDIRECTS:
                return await _answer(response, source, limit, known)
            url = _redirected(url, response.headers.get("Location", ""), source)
    raise BadFeed(
        f"{shown(source)} redirects for ever: more than {MAX_REDIRECTS} times",
        hint="give the address that it should lead to",
    )


def _redirected(url: str, location: str, source: str) -> str:
    target = urljoin(url, location)
    if not location or urlsplit(target).scheme not in ("http", "https"):
        raise BadFeed(f"{shown(source)} redirects to {shown(location)!r}, which is not read")
    return target


async def _answer(
    response: aiohttp.ClientResponse, source: str, limit: int, known: Validators
) -> Fetched:
    if response.status == _NOT_MODIFIED and known:
        return Fetched(validators=known, unchanged=True)
    if response.status != 200:
        raise answered(shown(source), response.status, response.headers.get("Retry-After"))
    charset = _CHARSET.search(response.headers.get("Content-Type", ""))
    return Fetched(
        data=await _body(response, source, limit),
        charset=charset[1] if charset else "",
        validators=Validators(
            etag=response.headers.get("ETag", ""),
            modified=response.headers.get("Last-Modified", ""),
        ),
    )


async def _body(response: aiohttp.ClientResponse, source: str, limit: int) -> bytes:
    packing = response.headers.get("Content-Encoding", "identity").strip().lower()
    chunks = response.content.iter_chunked(_CHUNK)
    if packing in ("gzip", "x-gzip"):
        return await _unpacked(chunks, source, limit)
    if packing != "identity":
        raise BadFeed(f"{shown(source)} is packed with {packing}, which was not asked for")
    if (response.content_length or 0) > limit:
        raise _too_large(shown(source), limit)
    data = bytearray()
    async for chunk in chunks:
        data += chunk
        if len(data) > limit:
            raise _too_large(shown(source), limit)
    return bytes(data)


async def _unpacked(chunks: AsyncIterator[bytes], source: str, limit: int) -> bytes:
    data, unpacker = bytearray(), zlib.decompressobj(zlib.MAX_WBITS | 16)
    try:
        async for chunk in chunks:
            data += unpacker.decompress(chunk, limit + 1 - len(data))
            if len(data) > limit:
                raise _too_large(shown(source), limit)
    except zlib.error as error:
        raise FeedError(f"{shown(source)} can't be unpacked: {error}") from error
    if not unpacker.eof:
        raise FeedError(f"{shown(source)} broke off")
    return bytes(data)


def _too_large(name: str, limit: int) -> BadFeed:
    return BadFeed(f"{name} is larger than {limit:,} bytes", hint="raise max_feed_bytes")
