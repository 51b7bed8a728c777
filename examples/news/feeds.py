"""Feeds and article pages: fetched within bounds, parsed to entries and plain text.

Feeds are named by the operator. Article links come from strangers: a link or a redirect that leaves
the feed's own host is followed to public addresses only, unless the settings allow others.
"""

from __future__ import annotations

import asyncio
import calendar
import io
import ipaddress
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import aiohttp
import feedparser
import lxml.etree
import lxml.html
import msgspec
import trafilatura
from yarl import URL

from .settings import Feed

MAX_FEED = 5_000_000
MAX_PAGE = 2_000_000
"""Bytes, after a compressed answer was unpacked."""
FEED_TIMEOUT, PAGE_TIMEOUT = 30.0, 15.0
"""Seconds, from the first byte asked for to the last one read."""
MAX_REDIRECTS = 5
MAX_MARKUP, MAX_TEXT, MAX_TITLE = 200_000, 50_000, 300
"""Characters of one entry's markup, of a text and of a title."""
FULL_TEXT = 500
"""Characters; a shorter text is a teaser, not the article."""
_TRY_AGAIN = frozenset({408, 425, 429})


class FeedError(OSError):
    """A source could not be read this time. `status` and `retry_after` are the server's."""

    def __init__(self, text: str, status: int | None = None, retry_after: str | None = None):
        super().__init__(text)
        self.status, self.retry_after = status, retry_after


class BadFeed(ValueError):
    """A source that another try would find the same."""


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a feed, as plain text."""

    id: str
    url: str
    title: str
    teaser: str
    body: str
    """'' if the feed has only a teaser."""
    published: float | None
    labels: tuple[str, ...] = ()


class Parsed(msgspec.Struct, frozen=True):
    entries: tuple[Entry, ...]
    malformed: str = ""
    """What the parser had to overlook."""


class Answer(msgspec.Struct, frozen=True):
    data: bytes = b""
    charset: str = ""
    etag: str = ""
    modified: str = ""
    unchanged: bool = False
    """The server said that nothing is new; there are no data."""


# -- fetching ------------------------------------------------------------------------------


class Fetcher:
    """The HTTP client of one feed: its own host may be anywhere, others must be public."""

    def __init__(self, feed: Feed, *, allow_private: bool = False) -> None:
        self._feed, self._allow_private = feed, allow_private
        self._home = URL(feed.url).origin() if feed.url.startswith("http") else None
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    async def __aenter__(self) -> Fetcher:
        return self

    async def __aexit__(self, *_: object) -> None:
        for session in self._sessions.values():
            await session.close()

    async def feed(self, etag: str = "", modified: str = "") -> Answer:
        """The feed, unless it is as it was. Raises FeedError or BadFeed."""
        if self._home is None:
            return Answer(await asyncio.to_thread(_read_file, Path(self._feed.url), MAX_FEED))
        asked = {"If-None-Match": etag, "If-Modified-Since": modified}
        headers = {name: value for name, value in asked.items() if value}
        return await self._get(self._feed.url, MAX_FEED, FEED_TIMEOUT, headers)

    async def page(self, url: str) -> str:
        """The text of an article's page; '' if there is none in it. Raises as `feed`."""
        if self._feed.pages:
            name = re.sub(r"[^\w-]", "", Path(urlsplit(url).path).name) or "index"
            file = Path(self._feed.pages) / f"{name}.html"
            data = await asyncio.to_thread(_read_file, file, MAX_PAGE)
        else:
            data = (await self._get(url, MAX_PAGE, PAGE_TIMEOUT)).data
        return await asyncio.to_thread(article_text, data)

    async def _get(
        self, url: str, limit: int, timeout: float, headers: Mapping[str, str] | None = None
    ) -> Answer:
        shown = URL(url).with_user(None).human_repr() if "@" in url else url
        try:
            async with asyncio.timeout(timeout):
                return await self._follow(url, shown, limit, headers or {})
        except TimeoutError:
            raise FeedError(f"{shown} took longer than {timeout:g} s") from None
        except (aiohttp.InvalidURL, aiohttp.NonHttpUrlClientError, ValueError) as error:
            if isinstance(error, BadFeed):
                raise
            raise BadFeed(f"{shown} is not a valid URL") from error
        except aiohttp.ClientError as error:
            if isinstance(error, aiohttp.ClientConnectorError) and isinstance(
                error.os_error, _Private
            ):
                raise BadFeed(f"{shown} leads to a private address") from error
            raise FeedError(
                f"{shown} can't be reached: {str(error) or type(error).__name__}"
            ) from error

    async def _follow(self, url: str, shown: str, limit: int, headers: Mapping[str, str]) -> Answer:
        for _ in range(MAX_REDIRECTS + 1):
            target = URL(url)
            async with self._session(target).get(
                target, allow_redirects=False, headers=headers
            ) as response:
                location = response.headers.get("Location", "")
                if response.status not in (301, 302, 303, 307, 308):
                    return await _answer(response, shown, limit)
            url = urljoin(url, location)
            if not location or urlsplit(url).scheme not in ("http", "https"):
                raise BadFeed(f"{shown} redirects to {location!r}")
        raise BadFeed(f"{shown} redirects more than {MAX_REDIRECTS} times")

    def _session(self, target: URL) -> aiohttp.ClientSession:
        free = self._allow_private or (self._home is not None and target.origin() == self._home)
        if free not in self._sessions:
            self._sessions[free] = aiohttp.ClientSession(
                headers={"Accept-Encoding": "gzip", "User-Agent": "penstock-news"},
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
                connector=aiohttp.TCPConnector(
                    limit=10, socket_factory=None if free else _public_socket
                ),
            )
        return self._sessions[free]


class _Private(OSError):
    pass


def _public_socket(info: Any) -> socket.socket:
    """Asked for each connection, after the name was resolved, so no name can hide an address."""
    family, kind, protocol, _, address = info
    found = ipaddress.ip_address(address[0].partition("%")[0])
    if not (getattr(found, "ipv4_mapped", None) or found).is_global or found.is_multicast:
        raise _Private(f"{found} is not a public address")
    return socket.socket(family, kind, protocol)


async def _answer(response: aiohttp.ClientResponse, shown: str, limit: int) -> Answer:
    if response.status == 304:
        return Answer(unchanged=True)
    if response.status != 200:
        text = f"{shown} answered {response.status}"
        if response.status >= 500 or response.status in _TRY_AGAIN:
            raise FeedError(text, response.status, response.headers.get("Retry-After"))
        raise BadFeed(text)
    data = bytearray()
    async for chunk in response.content.iter_chunked(64 * 1024):
        data += chunk
        if len(data) > limit:
            raise BadFeed(f"{shown} is larger than {limit:,} bytes")
    return Answer(
        bytes(data),
        response.charset or "",
        response.headers.get("ETag", ""),
        response.headers.get("Last-Modified", ""),
    )


def _read_file(path: Path, limit: int) -> bytes:
    if not path.is_file():  # a pipe or a device would not end
        raise BadFeed(f"there is no file {path.name}")
    with path.open("rb") as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise BadFeed(f"{path.name} is larger than {limit:,} bytes")
    return data


# -- parsing -------------------------------------------------------------------------------

_DECLARED = re.compile(rb"""^\s*<\?xml[^>]{0,200}?encoding\s*=\s*["']([\w.-]{1,40})["']""")
_XML_LINE = re.compile(r"^\s*<\?xml\b[^>]{0,400}\?>")
_REFERENCE = re.compile(r"&#(?:x([0-9a-f]{1,7})|([0-9]{1,7}));", re.IGNORECASE)


def parse_feed(data: bytes, name: str, charset: str = "") -> Parsed:
    """The entries of an RSS or Atom feed; of a malformed one what can be read. Raises BadFeed."""
    text, as_declared = _decode(data, charset)
    head = text[: first.start() if (first := re.search(r"<\w", text)) else len(text)].lower()
    # Entities can grow a few bytes to gigabytes and name files to read. No feed needs them.
    if "<!entity" in head or ("<!doctype" in head and "<!entity" in text.lower()):
        raise BadFeed(f"{name} declares XML entities; it was not parsed")
    clean = _REFERENCE.sub(_existing, _XML_LINE.sub("", text, count=1).lstrip())
    try:
        found = feedparser.parse(
            io.BytesIO(clean.encode("utf-8", "replace")),
            response_headers={"content-type": "application/xml; charset=utf-8"},
            resolve_relative_uris=False,
            sanitize_html=False,
        )
    except Exception as error:  # feedparser overlooks most mistakes, but not all
        raise BadFeed(f"{name} can't be parsed: {type(error).__name__}: {error}") from error
    if not found.entries and not found.get("version"):
        raise BadFeed(f"{name} is not an RSS or Atom feed")
    malformed = str(found.get("bozo_exception", "")) if found.bozo else ""
    entries = (_entry(one, name) for one in found.entries)
    return Parsed(
        tuple(one for one in entries if one is not None),
        malformed or ("" if as_declared else "not in the encoding that it declares"),
    )


def _decode(data: bytes, charset: str) -> tuple[str, bool]:
    """The document as text, and whether its encoding is the one that it declares."""
    mark = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else ""
    declared = _DECLARED.match(data[:400])
    names = [mark, charset, declared[1].decode() if declared else "", "utf-8-sig"]
    for number, name in enumerate(filter(None, names)):
        try:
            text = data.decode(name).lstrip("\ufeff")
        except (LookupError, ValueError):
            continue
        if "<" in text:  # some encodings decode anything
            return text, number == 0
    return data.decode("cp1252", "replace"), False


def _existing(reference: re.Match[str]) -> str:
    """Half an emoji is no character, and the parser stumbles over it."""
    number = int(reference[1], 16) if reference[1] else int(reference[2])
    return "" if number > 0x10FFFF or 0xD800 <= number <= 0xDFFF else reference[0]


def _entry(entry: Mapping[str, Any], feed: str) -> Entry | None:
    parts = (*(entry.get("content") or ()), entry.get("summary_detail") or {})
    texts = sorted(filter(None, map(_plain, parts)), key=len)
    title = " ".join(_plain(entry.get("title_detail") or {}).split())[:MAX_TITLE]
    if not title and not texts:
        return None
    body = texts[-1] if texts and len(texts[-1]) >= FULL_TEXT else ""
    url = next(filter(_is_web, (str(entry.get(x) or "").strip() for x in ("link", "id"))), "")
    return Entry(
        id=url or str(entry.get("id") or f"{feed} {title}"),
        url=url,
        title=title or " ".join(texts[-1][:80].split()),
        teaser=texts[0] if texts else "",
        body=body,
        published=_published(entry),
        labels=tuple(str(tag.get("term") or "") for tag in entry.get("tags") or ()),
    )


def _is_web(url: str) -> bool:
    try:
        parts = urlsplit(url)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.netloc)


def _published(entry: Mapping[str, Any]) -> float | None:
    for name in ("published_parsed", "updated_parsed", "created_parsed"):
        when = entry[name] if name in entry.keys() else None  # noqa: SIM118 (feedparser warns)
        if when is not None:
            try:
                return float(calendar.timegm(when))
            except (ValueError, OverflowError):
                continue
    return None


# -- plain text ----------------------------------------------------------------------------

_UNSEEN = ("script", "style", "template", "noscript", "iframe", "object", "svg", "head")
_INLINE = {"a", "abbr", "b", "cite", "code", "em", "i", "q", "s", "small", "span", "strong", "u"}
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\u200b\u2060\ufeff\ud800-\udfff]")


def article_text(page: bytes) -> str:
    """The article in a web page, one line a paragraph; '' if none is found."""
    try:
        found = trafilatura.extract(page, include_comments=False, include_tables=False)
    except Exception:  # whatever a stranger's page makes the extractor do
        return ""
    return _tidy(found or "")


def text_of(markup: str) -> str:
    """The text of a fragment of HTML, one line a paragraph."""
    markup = _CONTROL.sub("", " ".join(markup[:MAX_MARKUP].split()))
    root = lxml.html.fromstring(f"<div>{markup}</div>")
    for one in [*root.iter(*_UNSEEN, lxml.etree.Comment)]:
        one.drop_tree()
    for one in root.iter():
        if one.tag not in _INLINE:
            one.text, one.tail = f"\n{one.text or ''}", f"\n{one.tail or ''}"
    return _tidy(str(root.text_content()))


def _plain(part: Mapping[str, Any]) -> str:
    value = str(part.get("value") or "")[:MAX_MARKUP]
    return _tidy(value) if part.get("type") == "text/plain" else text_of(value)


def _tidy(text: str) -> str:
    lines = (" ".join(line.split()) for line in _CONTROL.sub("", text).splitlines())
    return "\n".join(filter(None, lines))[:MAX_TEXT].rstrip()
