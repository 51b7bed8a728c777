"""The values that the stages of the news pipeline hand on: plain, frozen, JSON-able."""

from __future__ import annotations

from typing import Literal

import msgspec

CATEGORIES: tuple[str, ...] = (
    "world",
    "politics",
    "business",
    "technology",
    "science",
    "health",
    "environment",
    "culture",
    "sport",
    "other",
)
"""The sections of a brief, in its order."""

TRUNCATED_BELOW = 500
"""Characters; a shorter body is a teaser, not the article."""

SourceKind = Literal["tabloid", "quality", "other"]
Method = Literal["model", "keywords", "feed", "llm"]


class Article(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of one feed, as plain text."""

    url: str
    title: str
    body: str
    source: str
    """Name of the outlet: the feed's title, or what it was read from."""
    source_kind: SourceKind = "other"
    published: float | None = None
    section: str = ""
    """One of CATEGORIES where the address or the feed tells; else ''."""
    truncated: bool = False
    hash: str
    """Of its normalised address: what makes it the same article, whoever sends it."""


class Classified(msgspec.Struct, frozen=True, kw_only=True):
    article: Article
    label: str
    method: Method
    """Who said so: "model" is the trained classifier, "llm" the text model asked first."""
    confidence: float


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A phrase of the original text, and what stands in its place."""

    start: int
    end: int
    text: str
    category: str
    replacement: str


class Neutralized(msgspec.Struct, frozen=True, kw_only=True):
    article: Article
    """As it came: `spans` count in its body."""
    label: str
    title: str
    body: str
    spans: tuple[Span, ...] = ()
    title_spans: tuple[Span, ...] = ()
    audit: str = ""
    """'' where the auditor let the new text pass; else why the original was kept."""
