"""What a brief says, before it is put in a form: stories by section, in a fixed order."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from penstock.workloads.pipeline.news.articles import CATEGORIES, Neutralized
from penstock.workloads.pipeline.news.neutralize import NO_BODY

PER_SOURCE = 3
"""Stories of one source in one section."""
_PRIORITY = {"quality": 0, "other": 1, "tabloid": 2}
_SUMMARY = 280
_SENTENCE_END = re.compile(r"[.!?][\"”’»]?(?=\s|$)")  # noqa: RUF001 (closing marks)


class Story(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    summary: str
    url: str
    source: str
    published: float | None
    changed: int
    """Phrases that were replaced or taken out."""
    note: str = ""
    """Why its text is the original, where the auditor refused the new one."""


class Section(msgspec.Struct, frozen=True):
    category: str
    stories: tuple[Story, ...]


class Missing(msgspec.Struct, frozen=True):
    """A source that could not be read, and why."""

    source: str
    error: str


class Edition(msgspec.Struct, frozen=True, kw_only=True):
    until: float
    """What it counts its hours back from."""
    hours: int
    sections: tuple[Section, ...] = ()
    missing: tuple[Missing, ...] = ()
    left_out: int = 0
    """Stories that are too old, or one too many of their source."""

    @property
    def story_count(self) -> int:
        return sum(len(section.stories) for section in self.sections)


def assemble(
    stories: Iterable[Neutralized],
    until: float,
    hours: int,
    missing: Sequence[Missing] = (),
) -> Edition:
    """Categories in their fixed order; within one the newest first, then the better source,
    then the address' hash. An undated story is taken for new, and comes last."""
    given = [one for one in stories if one.audit != NO_BODY]
    fresh = [one for one in given if _is_fresh(one, until, hours)]
    fresh.sort(key=_order)
    sections, taken = [], 0
    for category in CATEGORIES:
        chosen = _capped([one for one in fresh if _category(one) == category])
        taken += len(chosen)
        if chosen:
            sections.append(Section(category, tuple(_story(one) for one in chosen)))
    return Edition(
        until=until,
        hours=hours,
        sections=tuple(sections),
        missing=tuple(missing),
        left_out=len(given) - taken,
    )


def _category(one: Neutralized) -> str:
    return one.label if one.label in CATEGORIES else CATEGORIES[-1]


def _is_fresh(one: Neutralized, until: float, hours: int) -> bool:
    published = one.article.published
    return published is None or published > until - hours * 3600


def _order(one: Neutralized) -> tuple[float, int, str]:
    article = one.article
    newest = float("inf") if article.published is None else -article.published
    return newest, _PRIORITY[article.source_kind], article.hash


def _capped(stories: list[Neutralized]) -> list[Neutralized]:
    seen: Counter[str] = Counter()
    chosen = []
    for one in stories:
        seen[one.article.source] += 1
        if seen[one.article.source] <= PER_SOURCE:
            chosen.append(one)
    return chosen


def _story(one: Neutralized) -> Story:
    return Story(
        title=" ".join(one.title.split()),
        summary=summary_of(one.body),
        url=one.article.url,
        source=one.article.source,
        published=one.article.published,
        changed=len(one.spans) + len(one.title_spans),
        note=one.audit,
    )


def summary_of(body: str) -> str:
    """The first sentences, as many as fit; a longer one is cut at a word."""
    text = " ".join(body.split())
    if len(text) <= _SUMMARY:
        return text
    ends = [match.end() for match in _SENTENCE_END.finditer(text, 0, _SUMMARY)]
    if ends and ends[-1] > _SUMMARY // 4:
        return text[: ends[-1]]
    return text[: text.rfind(" ", 0, _SUMMARY)].rstrip(",;:") + " …"
