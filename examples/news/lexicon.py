"""Manipulative phrases: which are looked for, where they stand in a text, and what replaces them.

The phrases are data (`lexicon.toml`). A phrase is never changed inside a quotation or in a name.
"""

# ruff: noqa: RUF001 (quotation marks and dashes are what this is about)

from __future__ import annotations

import functools
import re
import tomllib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

Region = tuple[int, int]
WORD = re.compile(r"[^\W_]+(?:[-'’.&][^\W_]+)*")


class Phrase(msgspec.Struct, frozen=True, kw_only=True):
    """Forms that are switched on and off together."""

    id: str
    """`category/first form`."""
    category: str
    replacements: dict[str, str]
    """For each form what stands in its place; '' takes it out."""
    not_after: tuple[str, ...] = ()
    not_before: tuple[str, ...] = ()
    only_before: tuple[str, ...] = ()
    attributive: bool = False
    headline: bool = False


class Choice(msgspec.Struct, frozen=True):
    """What is changed of the lexicon as it is shipped: categories and ids of phrases."""

    on: tuple[str, ...] = ()
    off: tuple[str, ...] = ()


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A phrase of the original text, and what stands in its place."""

    start: int
    end: int
    text: str
    phrase: str
    replacement: str


class Lexicon:
    """The phrases that are switched on."""

    def __init__(self, phrases: Iterable[Phrase]) -> None:
        self.phrases = tuple(phrases)
        self.by_form = {form: one for one in self.phrases for form in one.replacements}
        longest_first = sorted(self.by_form, key=lambda form: (-len(form), form))
        forms = "|".join(
            re.escape(form).replace("'", "['’]").replace(r"\ ", r"\s+") for form in longest_first
        )
        # Whole words only; what is glued to / # @ or a full stop is an address or a tag.
        self._pattern = re.compile(
            rf"(?<![\w/#@.])(?<!\w[-'’])(?:{forms or '(?!)'})(?![\w/@])(?![-'’.]\w)", re.IGNORECASE
        )

    def find(self, text: str) -> Iterator[tuple[int, int, Phrase, str]]:
        """Every place of a form, whatever stands around it."""
        for match in self._pattern.finditer(text):
            form = plain(match.group())
            if form in self.by_form:
                yield match.start(), match.end(), self.by_form[form], form

    def spans(self, text: str, *, headline: bool = False) -> list[Span]:
        """The phrases of a text that are to be changed: in order, none overlapping."""
        quotations, titled = quoted(text), headline and is_titled(text)
        found: list[Span] = []
        for start, end, phrase, form in reversed([*self.find(text)]):
            if phrase.headline and not headline:
                continue
            if overlaps(quotations, start, end) or not _fits(phrase, text, start, end):
                continue
            if not titled and _is_name(text, start, end):
                continue
            # From the right: what will follow a phrase decides between a and an.
            later = found[-1] if found else None
            span = _edit(text, start, end, phrase, phrase.replacements[form], titled, later)
            if span is None or overlaps(quotations, span.start, span.end):
                continue
            if later is None or span.end <= later.start:
                found.append(span)
        return found[::-1]


@functools.cache
def shipped() -> tuple[tuple[Phrase, ...], frozenset[str]]:
    """All phrases of the file, and the categories that are on."""
    text = Path(__file__).with_name("lexicon.toml").read_text(encoding="utf-8")
    tables = {name: one for name, one in tomllib.loads(text).items() if isinstance(one, dict)}
    phrases = tuple(_phrase(name, one) for name in tables for one in tables[name]["phrases"])
    return phrases, frozenset(name for name, one in tables.items() if one["on"])


@functools.lru_cache(maxsize=32)
def lexicon_of(choice: Choice) -> Lexicon:
    phrases, on = shipped()

    def is_on(phrase: Phrase) -> bool:
        for name in (phrase.id, phrase.category):
            if name in choice.off or name in choice.on:
                return name in choice.on
        return phrase.category in on

    return Lexicon(filter(is_on, phrases))


def apply(text: str, spans: Iterable[Span]) -> str:
    parts, at = [], 0
    for span in spans:
        parts += [text[at : span.start], span.replacement]
        at = span.end
    return "".join([*parts, text[at:]])


@functools.cache
def words(name: str) -> frozenset[str]:
    """A list of english.toml."""
    text = Path(__file__).with_name("english.toml").read_text(encoding="utf-8")
    return frozenset(tomllib.loads(text)[name].split())


def plain(text: str) -> str:
    """As forms are written: small letters, straight apostrophes, single spaces."""
    return " ".join(text.replace("’", "'").casefold().split())


def _phrase(category: str, entry: Mapping[str, Any]) -> Phrase:
    forms = [plain(form) for form in entry["forms"].split("/")]
    to = entry["to"].split("/")
    to = to * len(forms) if len(to) == 1 else to
    rest = {name: value for name, value in entry.items() if name not in ("forms", "to")}
    return Phrase(
        id=f"{category}/{forms[0]}",
        category=category,
        replacements=dict(zip(forms, to, strict=True)),
        **rest,
    )


# -- whether a phrase is meant -------------------------------------------------------------

_BEFORE = re.compile(r"([^\W_]+)[^\w.!?]*$")
_AFTER = re.compile(r"[^\S\n]+[\"“‘«']?([^\W_]+(?:-[^\W_]+)*)")
_OBJECT = re.compile(r"\s+(?:the|an?|his|her|its|their|my|our|your)\s+([^\W_]+)", re.IGNORECASE)
_REACH = 60


def _fits(phrase: Phrase, text: str, start: int, end: int) -> bool:
    before, after = _BEFORE.search(text, max(0, start - _REACH), start), _AFTER.match(text, end)
    following = plain(after[1]) if after else ""
    if before and plain(before[1]) in phrase.not_after:
        return False
    thing = _OBJECT.match(text, end)
    if following in phrase.not_before or (thing and plain(thing[1]) in phrase.not_before):
        return False
    if phrase.only_before and following not in phrase.only_before:
        return False
    return not phrase.attributive or (
        following[:1].isalpha() and following not in words("not_described")
    )


def _is_name(text: str, start: int, end: int) -> bool:
    """A capital within a sentence, or two words with capitals at its start."""
    found = text[start:end]
    if not found[:1].isupper() or found.isupper():
        return False
    following = _AFTER.match(text, end)
    return not at_sentence_start(text, start) or bool(
        following and following[1][:1].isupper() and " " not in found
    )


# -- the change that is made ---------------------------------------------------------------

_ARTICLE = re.compile(r"(?<![\w'’-])(an?)([^\S\n]+)$", re.IGNORECASE)
_COMMA_BEFORE = re.compile(r",[^\S\n]+$")
_BREAK_BEFORE = re.compile(r"(?:[,;:]|\s+[-–—])[^\S\n]+$")
_END_AFTER = re.compile(r"[^\S\n]*(?:[.!?]|\n|$)")
_JOINED = re.compile(r"and|or|but|nor|than|as|so|very|too|more|most|quite|how", re.IGNORECASE)


def _edit(
    text: str, start: int, end: int, phrase: Phrase, to: str, titled: bool, later: Span | None
) -> Span | None:
    """None: the phrase can't be taken out without leaving the sentence in pieces."""
    before, opens = text[max(0, start - _REACH) : start], at_sentence_start(text, start)
    if not to:
        before_word, after = _BEFORE.search(before), _AFTER.match(text, end)
        joined = (before_word, after) if after else (before_word,)
        if any(one and _JOINED.fullmatch(one[1]) for one in joined):
            return None
        if opens:
            following = re.compile(r",?[^\S\n]+([^\W\d_])").match(text, end)
            if following is None:
                return None
            to = following[1].upper() if text[start].isupper() else following[1]
            end = following.end()
        elif (left := _COMMA_BEFORE.search(before)) and text[end : end + 1] == ",":
            start, end = start - len(left[0]), end + 1
        elif (left := _BREAK_BEFORE.search(before)) and _END_AFTER.match(text, end):
            start -= len(left[0])
        elif after and before[-1:].isspace():
            end = after.start(1)
        else:
            return None
    elif text[start:end].isupper() and end - start > 1:
        to = to.upper()
    elif text[start].isupper():
        to = to.title() if titled and not opens else to[:1].upper() + to[1:]
    article = _ARTICLE.search(text, max(0, start - _REACH), start)
    if article and (article[1].islower() or titled or at_sentence_start(text, article.start())):
        rest = text[end : end + _REACH]
        if later and end <= later.start < end + _REACH:
            rest = text[end : later.start] + later.replacement + text[later.end :][:_REACH]
        right = article_for(to + rest)
        if article[1].casefold() != right:
            right = right.capitalize() if article[1][0].isupper() else right
            start, to = article.start(), right + article[2] + to
    return Span(start=start, end=end, text=text[start:end], phrase=phrase.id, replacement=to)


# -- small facts about English writing -----------------------------------------------------

_START = re.compile(r"(?:^|[\n.!?:•])[\s\"'“‘«(\[–—-]*$")
_ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sen|Rep|Gov|Gen|Lt|Col|Sgt|Capt|Rev|Hon|vs|No)|\b[A-Z])\.\s*$"
)
_AN = re.compile(r"(?:[aeio]|u(?!ni(?!m|n)|s[aeiu]|tili|tens|k)|heir|hono|honest|hour)", re.I)
_A = re.compile(r"(?:eu|ewe|one(?!\w*r)|once|ouija)", re.I)
_LETTERS = re.compile(r"[AEFHILMNORSX](?:[A-Z0-9]*$|-)")


def at_sentence_start(text: str, at: int) -> bool:
    """Whether a word at this place opens its sentence, or what follows a colon."""
    before = text[max(0, at - 40) : at]
    if at > 40 and not re.search(r"[\n.!?:•]", before):
        return False
    return not _ABBREVIATION.search(before) and _START.search(before) is not None


def is_titled(text: str) -> bool:
    """Whether Most Words Begin With a Capital, as in many headlines."""
    words = [word for word in WORD.findall(text) if len(word) > 3 and word[0].isalpha()]
    return len(words) > 1 and sum(word[0].isupper() for word in words) > 0.6 * len(words)


def article_for(following: str) -> str:
    """`a` or `an`, by the sound that what follows begins with, as far as letters tell."""
    word = WORD.match(following)
    first = word.group() if word else following
    if len(first) > 1 and first[:2].isupper():
        said = len(first) > 3 and first[0] not in "AEIO" and re.search("[AEIOU]", first)
        return "an" if _LETTERS.match(first) and not said else "a"
    if first[:1] == "8" or re.match(r"1[18](?:\b|,\d)", first):
        return "an"
    return "an" if _AN.match(first) and not _A.match(first) else "a"


# -- quotations ----------------------------------------------------------------------------

_OPEN = re.compile(
    # An apostrophe stands inside a word or at its end; 6" is a length.
    r"[“«‹„‚]|(?<!\S)»(?=\S)|(?<!\w)[‘'](?=\S)|(?<!\d)\""
)
_CLOSE = {
    "“": "”", "«": "»", "‹": "›", "„": "[“”]", "‚": "[‘’]", "»": "«", "‘": r"(?<=\S)’(?!\w)",
    "'": r"(?<=\S)'(?!\w)",
    # A mark with a space before and none after opens the next paragraph of the quotation.
    '"': r"(?<=\S)\"|\"(?=\s|$)",
}  # fmt: skip
_PLURAL = re.compile(r"[sS]['’]\s+[a-z]")


def quoted(text: str) -> list[Region]:
    """The quotations of a text, marks included. Where a mark could be read two ways, the reading
    that protects more is taken: an unclosed quotation goes on to the end of its paragraph."""
    regions: list[Region] = []
    for paragraph in re.finditer(r"[^\n]+", text):
        at, end = paragraph.span()
        while mark := _OPEN.search(text, at, end):
            close = _closing(text, mark[0], mark.end(), end)
            at = close or mark.end()
            if close:
                regions.append((mark.start(), close))
    return regions


def _closing(text: str, mark: str, at: int, end: int) -> int | None:
    """Where a quotation ends; None: this mark was an apostrophe."""
    closers = [one.end() for one in re.compile(_CLOSE[mark]).finditer(text, at, end)]
    if mark not in "'‘":
        return closers[0] if closers else end
    # The first that can't be a plural's apostrophe (the workers' union), else the last.
    own = (one for one in closers if not _PLURAL.match(text, one - 2))
    return next(own, closers[-1] if closers else None)


def overlaps(regions: Sequence[Region], start: int, end: int) -> bool:
    """Whether [start, end) touches one of the regions, which are in order."""
    first = bisect_right(regions, start, key=lambda region: region[1])
    return first < len(regions) and regions[first][0] < end
