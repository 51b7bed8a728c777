"""Bytes of a feed to articles. No network and no files here.

A malformed feed gives what can be read of it. What is no feed at all, or would have the parser
work without bounds, is refused with a BadFeed.
"""

from __future__ import annotations

import calendar
import io
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

import msgspec

from penstock.core.errors import Misconfigured
from penstock.workloads.pipeline.news import prolog
from penstock.workloads.pipeline.news.articles import TRUNCATED_BELOW, Article
from penstock.workloads.pipeline.news.errors import BadFeed
from penstock.workloads.pipeline.news.identity import Known, url_hash
from penstock.workloads.pipeline.news.outlets import outlet_of, section_named, section_of
from penstock.workloads.pipeline.news.plaintext import MAX_MARKUP, html_to_text, one_line, tidy

MAX_TITLE = 300
_HEADERS = {"content-type": "application/xml; charset=utf-8"}


class Feed(msgspec.Struct, frozen=True, kw_only=True):
    articles: tuple[Article, ...]
    repeated: int = 0
    """Entries that the feed has twice."""
    unreadable: int = 0
    """Entries with neither a title nor a text."""
    malformed: str = ""
    """What the parser had to look over."""


def parse_feed(data: bytes, source: str, *, charset: str = "", limit: int = 25) -> Feed:
    """The newest `limit` entries. `source` is how the feed is called in errors."""
    if not data.strip():
        raise BadFeed(f"{source} is empty")
    text, honest = prolog.decode(data, charset)
    if prolog.is_web_page(text):
        raise BadFeed(f"{source} is a web page, not a feed", hint="look there for its RSS link")
    if prolog.declares_entities(text):
        raise BadFeed(f"{source} declares XML entities, which no feed needs; it was not parsed")
    parsed = _parsed(text, source)
    if not parsed.entries and not parsed.version:
        raise BadFeed(f"{source} is not a feed", hint="RSS and Atom are read")
    malformed = str(parsed.get("bozo_exception", "")) if parsed.bozo else ""
    if not honest:
        malformed = malformed or "not in the encoding it claims"
    return _collect(parsed.entries, parsed.feed, source, limit, malformed)


def _parsed(text: str, source: str) -> Any:
    try:
        return _parser()(
            io.BytesIO(prolog.as_utf8(text)),
            response_headers=_HEADERS,
            resolve_relative_uris=False,
            sanitize_html=False,
        )
    except Misconfigured:
        raise
    except Exception as error:
        # The parser looks over most of what is wrong with feeds, but not over all of it.
        raise BadFeed(f"{source} can't be parsed: {type(error).__name__}: {error}") from error


def _parser() -> Any:
    try:
        import feedparser
    except ModuleNotFoundError as error:
        raise Misconfigured(
            "the news pipeline reads feeds with feedparser, which is not installed",
            hint="pip install 'penstock[news]'",
        ) from error
    return feedparser.parse


def _collect(
    entries: Iterable[Mapping[str, Any]],
    feed: Mapping[str, Any],
    source: str,
    limit: int,
    malformed: str,
) -> Feed:
    name = one_line(html_to_text(str(feed.get("title") or "")))[:MAX_TITLE] or source
    dated = [(_published(entry), entry) for entry in entries]
    dated.sort(key=lambda pair: pair[0] if pair[0] is not None else float("-inf"), reverse=True)
    known, articles, repeated, unreadable = Known(), list[Article](), 0, 0
    for published, entry in dated:
        if len(articles) >= limit:
            break
        article = _article(entry, name, source, published)
        if article is None:
            unreadable += 1
        elif known.add(article):
            articles.append(article)
        else:
            repeated += 1
    return Feed(
        articles=tuple(articles), repeated=repeated, unreadable=unreadable, malformed=malformed
    )


def _article(
    entry: Mapping[str, Any], name: str, source: str, published: float | None
) -> Article | None:
    body = max(_texts(entry), key=len, default="")
    title = one_line(_plain(entry.get("title_detail") or {}))[:MAX_TITLE]
    if not title and not body:
        return None
    title = title or one_line(body[:80])
    url = _address(entry)
    outlet, kind = outlet_of(url, name)
    return Article(
        url=url,
        title=title,
        body=body,
        source=outlet,
        source_kind=kind,
        published=published,
        section=section_of(url) or _labelled(entry),
        truncated=len(body) < TRUNCATED_BELOW,
        hash=url_hash(url or str(entry.get("id") or f"{source} {title}")),
    )


def _texts(entry: Mapping[str, Any]) -> Iterable[str]:
    for part in (*(entry.get("content") or ()), entry.get("summary_detail") or {}):
        yield _plain(part)


def _plain(part: Mapping[str, Any]) -> str:
    value = str(part.get("value") or "")[:MAX_MARKUP]
    return tidy(value) if part.get("type") == "text/plain" else html_to_text(value)


def _address(entry: Mapping[str, Any]) -> str:
    """A link that may be shown to a reader, or ''."""
    for candidate in (entry.get("link"), entry.get("id")):
        url = str(candidate or "").strip()
        try:
            parts = urlsplit(url)
        except ValueError:
            continue
        if parts.scheme in ("http", "https") and parts.netloc:
            return url
    return ""


def _published(entry: Mapping[str, Any]) -> float | None:
    for name in ("published_parsed", "updated_parsed", "created_parsed"):
        # Asking feedparser for an update's time where there is none warns.
        when = entry[name] if name in entry.keys() else None  # noqa: SIM118
        if when is None:
            continue
        try:
            return float(calendar.timegm(when))
        except (ValueError, OverflowError):
            continue
    return None


def _labelled(entry: Mapping[str, Any]) -> str:
    labels = (str(tag.get("term") or "") for tag in entry.get("tags") or ())
    return next(filter(None, map(section_named, labels)), "")
