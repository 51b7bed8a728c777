"""When two entries are the same article: the same address, or the same headline."""

from __future__ import annotations

import hashlib
import re
import threading
from urllib.parse import parse_qsl, urlencode, urlsplit

from penstock.workloads.pipeline.news.articles import Article

_TRACKING = re.compile(
    r"(utm_|at_|mc_|pk_|hsa_|oly_|ns_)\w*"
    r"|fbclid|gclid|dclid|msclkid|yclid|igshid|cmpid|cmp|ref|ref_src|referrer|src|source|rss|ncid|ito"
)
_PORTS = {"http": 80, "https": 443}
_WORD = re.compile(r"\w+")
_MIN_TITLE = 20
"""Characters of a headline that is likely to be one article's own."""


def normal_url(url: str) -> str:
    """The address without what does not name the article: scheme, www, tracking, fragment."""
    try:
        parts = urlsplit(url.strip())
        host, port = (parts.hostname or "").removeprefix("www."), parts.port
    except ValueError:
        return url.strip()
    if parts.scheme not in _PORTS:
        return url.strip()
    shown = "" if port in (None, _PORTS[parts.scheme]) else f":{port}"
    asked = sorted(
        pair
        for pair in parse_qsl(parts.query, keep_blank_values=True)
        if not _TRACKING.fullmatch(pair[0].lower())
    )
    query = f"?{urlencode(asked)}" if asked else ""
    return f"{host}{shown}{parts.path.rstrip('/')}{query}"


def url_hash(url: str) -> str:
    return _short(normal_url(url))


def title_hash(title: str) -> str:
    """'' for a headline too short to tell one article from another."""
    words = " ".join(_WORD.findall(title.casefold()))
    return _short(words) if len(words) >= _MIN_TITLE else ""


class Known:
    """Articles met so far; asked in order, it keeps the first of each."""

    def __init__(self) -> None:
        self._hashes: set[str] = set()

    def add(self, article: Article) -> bool:
        """False if it was there already."""
        marks = _marks(article)
        if not self._hashes.isdisjoint(marks):
            return False
        self._hashes.update(marks)
        return True


class Seen:
    """Which source of a run brought an article first. Safe to use from threads.

    A source that is read again, since its item is tried again, finds its own articles new.
    """

    def __init__(self) -> None:
        self._owner: dict[str, str] = {}
        self._lock = threading.Lock()

    def claim(self, article: Article, source: str) -> bool:
        """False if another source has it."""
        marks = _marks(article)
        with self._lock:
            if any(self._owner.get(mark, source) != source for mark in marks):
                return False
            self._owner.update(dict.fromkeys(marks, source))
            return True


def _marks(article: Article) -> tuple[str, ...]:
    title = title_hash(article.title)
    return (article.hash, f"title:{title}") if title else (article.hash,)


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:20]
