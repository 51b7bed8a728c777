"""From a phrase that was found to the change that is made: exact, and tidy at both ends."""

# ruff: noqa: RUF001 (quotation marks and dashes are what this is about)

from __future__ import annotations

import re

from penstock.workloads.pipeline.news.articles import Span
from penstock.workloads.pipeline.news.lexicon import Phrase
from penstock.workloads.pipeline.news.wording import (
    article,
    at_sentence_start,
    capitalised,
    is_capital,
    like,
)

_ARTICLE = re.compile(r"(?<![\w'’-])(an?)([^\S\n]+)$", re.IGNORECASE)
_COMMA_BEFORE = re.compile(r",[^\S\n]+$")
_BREAK_BEFORE = re.compile(r"(?:[,;:]|[^\S\n]+[-–—])[^\S\n]+$")
_END_AFTER = re.compile(r"[^\S\n]*(?:[.!?]|\n|$)")
_WORD_AFTER = re.compile(r"[^\S\n]+(?=[^\W_])")
_OPENING_AFTER = re.compile(r",?[^\S\n]+([^\W\d_])")
_JOINED = re.compile(r"\b(?:and|or|but|nor|than|as|so|very|too|more|most|quite|how)\b", re.I)
_LAST_WORD = re.compile(r"(\w+)\W*$")
_FIRST_WORD = re.compile(r"\W*(\w+)")
_REACH = 60
"""Characters on either side that are looked at."""


class Place:
    """A phrase in its text; `after` is what will follow it, later changes made."""

    def __init__(self, text: str, start: int, end: int, after: str, *, titled: bool) -> None:
        self.text, self.start, self.end = text, start, end
        self.before, self.after, self.titled = text[max(0, start - _REACH) : start], after, titled

    def span(self, category: str, replacement: str, start: int, end: int) -> Span:
        return Span(
            start=start,
            end=end,
            text=self.text[start:end],
            category=category,
            replacement=replacement,
        )


def edit(place: Place, phrase: Phrase, form: str) -> Span | None:
    """None: the phrase can't be taken out without leaving the sentence in pieces."""
    to = phrase.replacement(form)
    if not to:
        return _delete(place, phrase.category)
    found = place.text[place.start : place.end]
    put = like(found, to, titled=place.titled and not at_sentence_start(place.text, place.start))
    return _with_article(place, phrase.category, put, place.end, put + place.after)


def _delete(place: Place, category: str) -> Span | None:
    if at_sentence_start(place.text, place.start):
        return _delete_opening(place, category)
    if (comma := _COMMA_BEFORE.search(place.before)) and place.after.startswith(","):
        start = place.start - len(comma.group())
        return place.span(category, "", start, place.end + 1)
    if (left := _BREAK_BEFORE.search(place.before)) and _END_AFTER.match(place.after):
        return place.span(category, "", place.start - len(left.group()), place.end)
    gap = _WORD_AFTER.match(place.after)
    if gap is None or not place.before[-1:].isspace() or _is_joined(place):
        return None
    end = place.end + gap.end()
    return _with_article(place, category, "", end, place.after[gap.end() :])


def _delete_opening(place: Place, category: str) -> Span | None:
    """The next word becomes the first one."""
    following = _OPENING_AFTER.match(place.after)
    if following is None or _is_joined(place):
        return None
    letter = following.group(1)
    if is_capital(place.text[place.start :]):
        letter = capitalised(letter)
    return place.span(category, letter, place.start, place.end + following.end())


def _is_joined(place: Place) -> bool:
    """Whether it hangs together with a word beside it: absolutely *and* utterly."""
    last, first = _LAST_WORD.search(place.before), _FIRST_WORD.match(place.after)
    words = (last.group(1) if last else "", first.group(1) if first else "")
    return any(_JOINED.fullmatch(word) for word in words)


def _with_article(place: Place, category: str, put: str, end: int, following: str) -> Span:
    """Takes the `a` or `an` before it along where that does not fit any more."""
    before = _ARTICLE.search(place.before)
    if before is None or not _is_article(place, before):
        return place.span(category, put, place.start, end)
    old, gap = before.groups()
    new = article(following)
    if old.casefold() == new:
        return place.span(category, put, place.start, end)
    start = place.start - len(before.group())
    return place.span(category, like(old[:1], new) + gap + put, start, end)


def _is_article(place: Place, found: re.Match[str]) -> bool:
    """A capital A within a sentence may be a letter: vitamin A."""
    at = place.start - len(found.group())
    return found.group(1).islower() or place.titled or at_sentence_start(place.text, at)
