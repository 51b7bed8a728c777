"""Small facts about English writing: sentence starts, capitals, a and an."""

# ruff: noqa: RUF001 (quotation marks and dashes are what this is about)

from __future__ import annotations

import re

WORD = re.compile(r"[^\W_]+(?:[-'’.&][^\W_]+)*")
_START = re.compile(r"(?:^|[\n.!?:•])[\s\"'“‘«(\[–—-]*$")
_ABBREVIATION = re.compile(
    r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Sen|Rep|Gov|Gen|Lt|Col|Sgt|Capt|Rev|Hon|vs|No)|\b[A-Z])\.\s*$"
)
_LOOK_BACK = 40
_AN = re.compile(r"(?:[aeio]|u(?!ni(?!m|n)|s[aeiu]|tili|tens|k)|heir|hono|honest|hour)", re.I)
_A = re.compile(r"(?:eu|ewe|one(?!\w*r)|once|ouija)", re.I)
_LETTERS = re.compile(r"[AEFHILMNORSX](?:[A-Z0-9]*$|-)")


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def at_sentence_start(text: str, at: int) -> bool:
    """Whether a word at this place is the first of its sentence, or of what follows a colon."""
    before = text[max(0, at - _LOOK_BACK) : at]
    if at > _LOOK_BACK and not before.strip():
        return False
    if _ABBREVIATION.search(before):
        return False
    if at > _LOOK_BACK and not re.search(r"[\n.!?:•]", before):
        return False
    return _START.search(before) is not None


def is_capital(word: str) -> bool:
    return word[:1].isupper()


def is_shouted(word: str) -> bool:
    return len(word) > 1 and word.isupper()


def is_titled(text: str) -> bool:
    """Whether Most Words Begin With a Capital, as in many headlines."""
    words = [word for word in WORD.findall(text) if len(word) > 3 and word[0].isalpha()]
    return len(words) > 1 and sum(map(is_capital, words)) > 0.6 * len(words)


def article(following: str) -> str:
    """`a` or `an`, by the sound that what follows begins with, as far as letters tell."""
    word = WORD.match(following)
    first = word.group() if word else following
    if len(first) > 1 and first[:2].isupper():
        return "an" if _LETTERS.match(first) and not _says_word(first) else "a"
    if first[:1] == "8" or re.match(r"1[18](?:\b|,\d)", first):
        return "an"
    return "an" if _AN.match(first) and not _A.match(first) else "a"


def _says_word(capitals: str) -> bool:
    """Whether NATO is read as a word; HMRC has no vowel to be one with."""
    return len(capitals) > 3 and capitals[0] not in "AEIO" and bool(re.search("[AEIOU]", capitals))


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


def like(original: str, text: str, *, titled: bool = False) -> str:
    """`text` with the capitals of `original`; in a titled text with those of a title."""
    if is_shouted(original):
        return text.upper()
    if not is_capital(original):
        return text
    return " ".join(map(capitalised, text.split(" "))) if titled else capitalised(text)
