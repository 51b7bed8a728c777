"""Sections of articles: by the model, else by the feed's own word for it, else by keywords."""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from .model import Model

if TYPE_CHECKING:
    from .articles import Article

_TITLE_WEIGHT = 3
_FRONT = 4_000
"""Characters of a text that count: what an article is about stands at its front."""
_ENOUGH = 2
"""Points below which a text is of no section in particular."""


@functools.cache
def _file() -> dict[str, dict[str, str]]:
    return tomllib.loads(Path(__file__).with_name("keywords.toml").read_text(encoding="utf-8"))


@functools.cache
def _patterns() -> dict[str, re.Pattern[str]]:
    return {section: _pattern(words) for section, words in _file()["keywords"].items()}


def sections() -> tuple[str, ...]:
    """In the order of the brief."""
    return tuple(_patterns())


def section_named(url: str, labels: Sequence[str]) -> str:
    """The section that a URL's path or the feed's own labels name, or ''."""
    names = {name: section for section, all_ in _file()["names"].items() for name in all_.split()}
    said = (*urlsplit(url).path.lower().split("/")[1:-1], *map(str.lower, labels))
    return next((names[word] for word in said if word in names), "")


def classify(article: Article, model: Model) -> tuple[str, str]:
    """The section, and who said so: `llm`, `feed` or `keywords`."""
    if model and (label := model.label(f"{article.title}\n\n{article.text}", sections())):
        return label, "llm"
    if article.section:
        return article.section, "feed"
    return by_keywords(article.title, article.text), "keywords"


def by_keywords(title: str, body: str) -> str:
    """The section with the most different words of its own in the text."""
    points = {
        section: _TITLE_WEIGHT * _count(pattern, title) + _count(pattern, body)
        for section, pattern in _patterns().items()
    }
    best = max(points, key=points.__getitem__)
    return best if points[best] >= _ENOUGH else sections()[-1]


def _count(pattern: re.Pattern[str], text: str) -> int:
    return len(set(pattern.findall(text[:_FRONT].lower())))


def _pattern(words: str) -> re.Pattern[str]:
    """A star stands for any ending; else a word may only have a plural's."""
    forms = (
        word.replace("*", r"\w*") if word.endswith("*") else word + "(?:s|es)?"
        for word in words.split("|")
    )
    return re.compile(rf"\b(?:{'|'.join(forms)})\b")
