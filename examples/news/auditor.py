"""The auditor: compares a rewritten text with the original, and refuses it if facts changed.

Numbers, names, quotations and denials must be the same, in the same order. A rewrite by spans must
be the original outside its spans; a model's rewrite must keep most words. The source's own faults
of form are let be: only new ones count.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import msgspec

from .lexicon import (
    WORD,
    Lexicon,
    Region,
    Span,
    apply,
    article_for,
    at_sentence_start,
    is_titled,
    overlaps,
    plain,
    quoted,
    words,
)

BODY_LENGTH, TITLE_LENGTH = (0.7, 1.1), (0.2, 1.6)
"""How long a rewritten text may be, as a share of the original."""
KEPT_WORDS, NEW_WORDS = 0.8, 0.3
"""The share of words that a model's rewrite must keep, and of its words that may be new."""
_SLACK = 20
"""Characters by which a short text may differ in any case."""
_NUMBER = re.compile(r"[£$€¥]?\d+(?:[.,:/-]\d+)*(?:[^\S\n]?%)?")
_FAULTS = {
    "two spaces": re.compile(r"\S  +\S"),
    "a space before a comma or full stop": re.compile(r"\w +[,.;](?!\w)"),
    "two commas": re.compile(r",\s*[,.]"),
    "empty brackets": re.compile(r"\(\s*\)|\[\s*\]"),
    "a small letter after a full stop": re.compile(r"\w{2}[.!?] [a-z]"),
    "a comma at the start": re.compile(r"(?:^|[.!?\n]) *,"),
    "a word twice": re.compile(r"\b(\w+) \1\b", re.IGNORECASE),
}
_ARTICLES = re.compile(r"(?<![\w'’-])(an?) (?=([^\W_][\w'’-]*))")  # noqa: RUF001


class Facts(msgspec.Struct, frozen=True):
    """What a rewritten text must keep, in order."""

    number: tuple[str, ...]
    name: tuple[str, ...]
    quotation: tuple[str, ...]
    denial: tuple[str, ...]


def audit(original: str, spans: Sequence[Span], *, headline: bool = False) -> str:
    """'' if the spans may be applied, else why not."""
    quotations = quoted(original)
    before, after, at, shift = list[Region](), list[Region](), 0, 0
    for span in spans:
        if span.start < at or original[span.start : span.end] != span.text:
            return f"a span is out of place: {span.text!r}"
        if overlaps(quotations, span.start, span.end):
            return f"a quotation is changed: {span.text!r}"
        if _NUMBER.search(span.text) or _NUMBER.search(span.replacement):
            return f"a number is changed: {span.text!r}"
        before.append((span.start, span.end))
        after.append((span.start + shift, span.start + shift + len(span.replacement)))
        at, shift = span.end, shift + len(span.replacement) - (span.end - span.start)
    return _compared(original, apply(original, spans), before, after, headline)


def audit_model(original: str, rewritten: str, lexicon: Lexicon, *, headline: bool = False) -> str:
    """'' if a model's text may stand for the original, else why not."""
    if problem := _compared(original, rewritten, (), (), headline):
        return problem
    old, new = _words(original), _words(rewritten)
    if (old & new).total() < KEPT_WORDS * old.total() - 1:
        return "it keeps too few of the words"
    if (new - old).total() > NEW_WORDS * new.total() + 1:
        return "it has too many words of its own"
    if len(lexicon.spans(rewritten, headline=headline)) > 0:
        return "it still has phrases of the lexicon"
    return ""


def facts(
    text: str, known: frozenset[str], without: Sequence[Region] = (), *, titled: bool = False
) -> Facts:
    """The facts outside the regions `without`. `known` are names; a titled text tells no others."""
    names, numbers, denials = [], [], []
    for word in WORD.finditer(text):
        if overlaps(without, word.start(), word.end()):
            continue
        found, small = word.group(), plain(word.group())
        if small in words("number_words"):
            numbers.append((word.start(), small))
        elif small in words("denials") or small.endswith("n't"):
            denials.append(small)
        elif found[0].isupper() and (found in known or (not titled and _is_name(text, word))):
            names.append(found)
    for number in _NUMBER.finditer(text):
        if not overlaps(without, number.start(), number.end()):
            numbers.append((number.start(), number.group()))
    return Facts(
        tuple(value for _, value in sorted(numbers)),
        tuple(names),
        tuple(text[start:end] for start, end in quoted(text)),
        tuple(denials),
    )


def names_within(text: str) -> frozenset[str]:
    """Words with a capital where no sentence begins."""
    return frozenset(
        word.group()
        for word in WORD.finditer(text)
        if word.group()[0].isupper() and not at_sentence_start(text, word.start())
    )


def faults(text: str) -> Counter[str]:
    """Faults of form, and how often each is there."""
    found = Counter({name: len(pattern.findall(text)) for name, pattern in _FAULTS.items()})
    for one in _ARTICLES.finditer(text):
        if one[1].casefold() != article_for(one[2]):
            found[f"{one[1]} {one[2]}"] += 1
    return +found


def _is_name(text: str, word: re.Match[str]) -> bool:
    return not at_sentence_start(text, word.start()) or plain(word.group()) not in words("common")


def _compared(
    original: str,
    rewritten: str,
    before: Sequence[Region],
    after: Sequence[Region],
    headline: bool,
) -> str:
    if not rewritten.strip() and original.strip():
        return "nothing is left"
    titled = headline and is_titled(original)
    known = frozenset[str]() if titled else names_within(original)
    old = facts(original, known, before, titled=titled)
    new = facts(rewritten, known, after, titled=titled)
    for kind in ("quotation", "number", "name", "denial"):
        had, has = getattr(old, kind), getattr(new, kind)
        if lost := Counter(had) - Counter(has):
            return f"a {kind} is lost: {next(iter(lost))!r}"
        if added := Counter(has) - Counter(had):
            return f"a {kind} is new: {next(iter(added))!r}"
        if had != has:
            return f"the {kind}s are in another order"
    share = len(rewritten) / max(1, len(original))
    low, high = TITLE_LENGTH if headline else BODY_LENGTH
    if abs(len(original) - len(rewritten)) > _SLACK and not low <= share <= high:
        return f"its length is {share:.0%} of the original's"
    worse = faults(rewritten) - faults(original)
    return f"it reads badly: {next(iter(worse))!r}" if worse else ""


def _words(text: str) -> Counter[str]:
    return Counter(plain(word) for word in WORD.findall(text))
