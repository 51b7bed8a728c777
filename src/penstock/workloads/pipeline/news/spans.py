"""Finds the phrases of a lexicon in a text, and what each is to be changed into.

Never inside a quotation, never in a name. Spans come in order and do not overlap; applying them
changes nothing else.
"""

# ruff: noqa: RUF001 (quotation marks and dashes are what this is about)

from __future__ import annotations

import re
from collections.abc import Iterable

from penstock.workloads.pipeline.news.articles import Span
from penstock.workloads.pipeline.news.edits import Place, edit
from penstock.workloads.pipeline.news.lexicon import Lexicon, Phrase, plain
from penstock.workloads.pipeline.news.quotes import overlaps, quoted
from penstock.workloads.pipeline.news.wording import (
    at_sentence_start,
    capitalised,
    is_capital,
    is_shouted,
    is_titled,
    words,
)

_BEFORE = re.compile(r"([^\W_]+)[^\w.!?]*$")
_AFTER = re.compile(r"[^\S\n]+[\"“‘«']?([^\W_]+(?:-[^\W_]+)*)")
_OBJECT = re.compile(
    r"[^\S\n]+(?:the|an?|his|her|its|their|my|our|your)[^\S\n]+([^\W_]+)", re.IGNORECASE
)
_NAME_PAIR = re.compile(r"\b([^\W\d_a-z][\w-]*)\s+(?=([^\W\d_a-z][\w-]*))")
_REACH = 60
_ACRONYM = 5
_NOT_DESCRIBED = words(
    """
    a an the and or but nor of in on at by for from to into over under with without as than
    that this these those is are was were be been has have had will would can could may
    might must if when while because so it he she they we you i who which what not about
    after before against during since until
    """
)


def find_spans(
    text: str, lexicon: Lexicon, *, headline: bool = False, names: frozenset[str] = frozenset()
) -> list[Span]:
    """`names` are pairs of words known to be a name (see `name_pairs`): a headline in capitals
    does not tell them apart."""
    quotations = quoted(text)
    titled = headline and is_titled(text)
    found: list[Span] = []
    # From the right: what follows a phrase is known when its article is chosen.
    for match, phrase, form in reversed(list(lexicon.find(text))):
        start, end = match.span()
        if phrase.headline and not headline:
            continue
        if overlaps(quotations, start, end) or not _fits(phrase, text, start, end):
            continue
        if _is_name(text, start, end, titled, names):
            continue
        after = _after(text, end, found[-1] if found else None)
        span = edit(Place(text, start, end, after, titled=titled), phrase, form)
        if span is not None and not overlaps(quotations, span.start, span.end):
            _put(found, span, text)
    return found[::-1]


def apply(text: str, spans: Iterable[Span]) -> str:
    parts, at = [], 0
    for span in spans:
        parts += [text[at : span.start], span.replacement]
        at = span.end
    return "".join([*parts, text[at:]])


def name_pairs(text: str) -> frozenset[str]:
    """Pairs of words that stand in a text with a capital each."""
    return frozenset(f"{a} {b}".casefold() for a, b in _NAME_PAIR.findall(text))


def _put(found: list[Span], span: Span, text: str) -> None:
    """Two changes that touch become one: the second then opens the sentence."""
    if not found or span.end <= found[-1].start:
        found.append(span)
        return
    later = found.pop()
    replacement = capitalised(later.replacement) if is_capital(span.text) else later.replacement
    end = max(span.end, later.end)
    found.append(
        Span(
            start=span.start,
            end=end,
            text=text[span.start : end],
            category=later.category,
            replacement=replacement,
        )
    )


def _after(text: str, end: int, later: Span | None) -> str:
    if later is None or later.start > end + _REACH or later.start < end:
        return text[end : end + _REACH]
    rest = text[later.end : later.end + _REACH]
    return text[end : later.start] + later.replacement + rest


def _fits(phrase: Phrase, text: str, start: int, end: int) -> bool:
    before = _BEFORE.search(text, max(0, start - _REACH), start)
    after = _AFTER.match(text, end)
    last = plain(before.group(1)) if before else ""
    following = plain(after.group(1)) if after else ""
    if last in phrase.not_after or following in phrase.not_before:
        return False
    thing = _OBJECT.match(text, end)
    if thing is not None and plain(thing.group(1)) in phrase.not_before:
        return False
    if phrase.only_before and following not in phrase.only_before:
        return False
    return not phrase.attributive or bool(
        following and following[0].isalpha() and following not in _NOT_DESCRIBED
    )


def _is_name(text: str, start: int, end: int, titled: bool, names: frozenset[str]) -> bool:
    found = text[start:end]
    if not is_capital(found):
        return False
    following = _AFTER.match(text, end)
    pair = plain(f"{found} {following.group(1)}") if following else ""
    if pair in names:
        return True
    if is_shouted(found):
        return " " not in found and len(found) <= _ACRONYM and not text.isupper()
    if titled:
        return False
    if not at_sentence_start(text, start):
        return True
    return following is not None and is_capital(following.group(1)) and " " not in found
