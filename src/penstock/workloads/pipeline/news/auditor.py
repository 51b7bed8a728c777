"""Reads a rewritten text against the original, and refuses it where it says something else.

Every number, name, quotation and denial must be there, in the same order. A rewrite by spans must
besides be the original to the letter outside its spans. The source's own faults are let be:
only new ones count.
"""

# ruff: noqa: RUF001 (quotation marks and dashes are what this is about)

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from penstock.workloads.pipeline.news.articles import Span
from penstock.workloads.pipeline.news.lexicon import plain
from penstock.workloads.pipeline.news.quotes import Region, overlaps, quoted
from penstock.workloads.pipeline.news.spans import apply
from penstock.workloads.pipeline.news.wording import (
    WORD,
    article,
    at_sentence_start,
    is_capital,
    is_titled,
    words,
)

_NUMBER = re.compile(r"[£$€¥]?\d+(?:[.,:/-]\d+)*(?:[^\S\n]?%)?")
_NUMBER_WORDS = words(
    """
    two three four five six seven eight nine ten eleven twelve dozen twenty thirty forty
    fifty sixty seventy eighty ninety hundred hundreds thousand thousands million millions
    billion billions trillion half third quarter double triple first second
    """
)
_DENIALS = words(
    """
    no not never none nobody nothing neither nor cannot without
    """
)
_COMMON = words(
    """
    a about after all also although an and any as at be because before both but by did do
    does during each even every few for from had has have he her here his how however i if
    in into is it its just last later many may meanwhile more most much my new next no nor
    not now of on once one only or other our over people she since so some soon still such
    than that the their them then there these they this those though through to today under
    until was we were what when where whether which while who why will with without would
    yet you your
    """
)
"""Words that open a sentence without being a name."""
_LINTS = {
    "a double space": re.compile(r"\S  +\S"),
    "a space before a comma or a full stop": re.compile(r"\w +[,.;](?!\w)"),
    "two commas": re.compile(r",\s*,"),
    "a comma before a full stop": re.compile(r",\s*\."),
    "empty brackets": re.compile(r"\(\s*\)|\[\s*\]"),
    "a small letter after a full stop": re.compile(r"\w{2}[.!?] [a-z]"),
    "an opening comma": re.compile(r"(?:^|[.!?\n]) *,"),
}
_TWICE = re.compile(r"\b(\w+) \1\b", re.IGNORECASE)
_ARTICLES = re.compile(r"(?<![\w'’-])(an?) (?=([^\W_][\w'’-]*))")

BODY_LENGTH = (0.7, 1.1)
"""How long a rewritten body may be, as a share of the original."""
TITLE_LENGTH = (0.2, 1.6)
_SLACK = 20
"""Characters by which a short text may differ in any case."""


class Facts(msgspec.Struct, frozen=True):
    """What a rewritten text must keep, in order."""

    numbers: tuple[str, ...]
    names: tuple[str, ...]
    quotations: tuple[str, ...]
    denials: tuple[str, ...]


def audit(
    original: str, rewritten: str, spans: Sequence[Span] | None = None, *, headline: bool = False
) -> str:
    """'' if the text may stand for the original, else why not. Without spans it is taken for a
    model's, where any word may have been changed."""
    if not rewritten.strip() and original.strip():
        return "nothing is left"
    if spans is not None and (problem := _outside(original, rewritten, spans)):
        return problem
    before, after = _changed(spans or ())
    titled = headline and is_titled(original)
    known = frozenset() if titled else names_within(original)
    old = facts(original, known=known, without=before, titled=titled)
    new = facts(rewritten, known=known, without=after, titled=titled)
    return (
        _kept("quotation", old.quotations, new.quotations)
        or _kept("number", old.numbers, new.numbers)
        or _kept("name", old.names, new.names)
        or _kept("denial", old.denials, new.denials)
        or _length(original, rewritten, TITLE_LENGTH if headline else BODY_LENGTH)
        or _new_faults(original, rewritten)
    )


def facts(
    text: str, *, known: frozenset[str], without: Sequence[Region] = (), titled: bool = False
) -> Facts:
    """What stands in a text, outside the regions `without`. `known` are words that are names;
    in a titled text there are no others to be told."""
    quotations = quoted(text)
    names, numbers, denials = [], [], []
    for word in WORD.finditer(text):
        if overlaps(without, word.start(), word.end()):
            continue
        small = plain(word.group())
        if small in _NUMBER_WORDS:
            numbers.append((word.start(), small))
        elif small in _DENIALS or small.endswith("n't"):
            denials.append(small)
        elif _is_name(text, word, titled, known):
            names.append(word.group())
    for number in _NUMBER.finditer(text):
        if not overlaps(without, number.start(), number.end()):
            numbers.append((number.start(), number.group()))
    return Facts(
        tuple(value for _, value in sorted(numbers)),
        tuple(names),
        tuple(text[start:end] for start, end in quotations),
        tuple(denials),
    )


def names_within(text: str) -> frozenset[str]:
    """Words with a capital where no sentence begins."""
    return frozenset(
        word.group()
        for word in WORD.finditer(text)
        if is_capital(word.group()) and not at_sentence_start(text, word.start())
    )


def lints(text: str) -> Counter[str]:
    """Faults of form, and how often each is there."""
    found = Counter({name: len(pattern.findall(text)) for name, pattern in _LINTS.items()})
    found.update(one.group().casefold() for one in _TWICE.finditer(text))
    for one in _ARTICLES.finditer(text):
        if one.group(1).casefold() != article(one.group(2)):
            found[f"{one.group(1)} {one.group(2)}"] += 1
    return +found


def _is_name(text: str, word: re.Match[str], titled: bool, known: frozenset[str]) -> bool:
    found = word.group()
    if not is_capital(found):
        return False
    if found in known:
        return True
    if titled:
        return False
    return not at_sentence_start(text, word.start()) or plain(found) not in _COMMON


def _outside(original: str, rewritten: str, spans: Sequence[Span]) -> str:
    quotations = quoted(original)
    at = 0
    for span in spans:
        if not at <= span.start < span.end <= len(original):
            return f"a span is out of place: {span.text!r}"
        if original[span.start : span.end] != span.text:
            return f"a span is not where it says: {span.text!r}"
        if overlaps(quotations, span.start, span.end):
            return f"a quotation is touched: {span.text!r}"
        if _NUMBER.search(span.text) or _NUMBER.search(span.replacement):
            return f"a number is touched: {span.text!r}"
        at = span.end
    return "" if apply(original, spans) == rewritten else "text outside the spans is changed"


def _changed(spans: Sequence[Span]) -> tuple[list[Region], list[Region]]:
    """Where the spans are in the original, and where their replacements are after."""
    before, after, shift = [], [], 0
    for span in spans:
        before.append((span.start, span.end))
        after.append((span.start + shift, span.start + shift + len(span.replacement)))
        shift += len(span.replacement) - (span.end - span.start)
    return before, after


def _kept(kind: str, old: tuple[str, ...], new: tuple[str, ...]) -> str:
    if old == new:
        return ""
    lost, added = Counter(old) - Counter(new), Counter(new) - Counter(old)
    if lost:
        return f"a {kind} is lost: {next(iter(lost))!r}"
    if added:
        return f"a {kind} is new: {next(iter(added))!r}"
    return f"the {kind}s are in another order"


def _length(original: str, rewritten: str, bounds: tuple[float, float]) -> str:
    if abs(len(original) - len(rewritten)) <= _SLACK:
        return ""
    share = len(rewritten) / max(1, len(original))
    return "" if bounds[0] <= share <= bounds[1] else f"its length is {share:.0%} of the original's"


def _new_faults(original: str, rewritten: str) -> str:
    new = lints(rewritten) - lints(original)
    return f"it reads badly: {next(iter(new))!r}" if new else ""
