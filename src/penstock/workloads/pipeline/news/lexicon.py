"""The phrases that are looked for, by category, and which of them are switched on.

The phrases are data (`lexicon.toml`). `Settings` says what a run makes of them; optimization
makes new settings and never touches the file.
"""

# ruff: noqa: RUF001 (quotation marks and dashes are what this is about)

from __future__ import annotations

import functools
import hashlib
import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

import msgspec

from penstock.core.errors import Misconfigured

_GAP = r"(?:[^\S\n]+|[^\S\n]*\n[^\S\n]*)"


class Phrase(msgspec.Struct, frozen=True, kw_only=True):
    """A group of forms that are switched together."""

    id: str
    """`category/first form`."""
    category: str
    forms: tuple[str, ...]
    to: tuple[str, ...]
    """What stands in place of each form; '' takes it out."""
    not_after: frozenset[str] = frozenset()
    not_before: frozenset[str] = frozenset()
    only_before: frozenset[str] = frozenset()
    attributive: bool = False
    headline: bool = False

    def replacement(self, form: str) -> str:
        return self.to[self.forms.index(form)]


class Addition(msgspec.Struct, frozen=True, kw_only=True):
    """A phrase that the file does not have."""

    category: str
    forms: str
    to: str = ""


class Settings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is changed of the lexicon as it is shipped. Order carries no meaning."""

    on: tuple[str, ...] = ()
    """Categories or phrases that are off in the file."""
    off: tuple[str, ...] = ()
    """Categories or phrases that are on in the file; a phrase's own switch wins."""
    additions: tuple[Addition, ...] = ()


class Lexicon:
    """The phrases that are switched on, ready to be looked for."""

    def __init__(self, phrases: tuple[Phrase, ...], version: str) -> None:
        self.phrases, self.version = phrases, version
        self.by_form = {form: phrase for phrase in phrases for form in phrase.forms}
        self.pattern = _pattern(self.by_form)

    def __len__(self) -> int:
        return len(self.phrases)

    def find(self, text: str) -> Iterator[tuple[re.Match[str], Phrase, str]]:
        """Every place a form stands in, from the left, the longest first, none overlapping."""
        for match in self.pattern.finditer(text):
            form = plain(match.group())
            # `re` takes a few letters for the same that casefold does not.
            if form in self.by_form:
                yield match, self.by_form[form], form


class Shipped(msgspec.Struct, frozen=True, kw_only=True):
    """The file: all phrases, and which categories are on."""

    version: str
    phrases: tuple[Phrase, ...]
    on: frozenset[str]

    @property
    def categories(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(phrase.category for phrase in self.phrases))

    def with_(self, settings: Settings | None = None) -> Lexicon:
        """Raises Misconfigured where the settings name what there isn't."""
        settings = settings or Settings()
        self._check(settings)
        added = tuple(_added(one) for one in settings.additions)
        chosen = tuple(p for p in (*self.phrases, *added) if self._is_on(p, settings))
        return Lexicon(chosen, version_of(self.version, settings))

    def everything(self) -> Lexicon:
        """Every phrase of the file, whether it is on or not."""
        return Lexicon(self.phrases, f"{self.version}+all")

    def _is_on(self, phrase: Phrase, settings: Settings) -> bool:
        for name in (phrase.id, phrase.category):
            if name in settings.off:
                return False
            if name in settings.on:
                return True
        return phrase.category in self.on or phrase.category not in self.categories

    def _check(self, settings: Settings) -> None:
        known = {*self.categories, *(phrase.id for phrase in self.phrases)}
        known |= {_added(one).id for one in settings.additions}
        for name in (*settings.on, *settings.off):
            if name not in known:
                raise Misconfigured(
                    f"the lexicon has no {name!r}",
                    hint=f"categories are {', '.join(self.categories)}; a phrase is known by"
                    " category/first form",
                )


@functools.cache
def shipped() -> Shipped:
    text = resources.files(__package__).joinpath("lexicon.toml").read_text(encoding="utf-8")
    return parse(tomllib.loads(text))


@functools.lru_cache(maxsize=32)
def lexicon_of(settings: Settings) -> Lexicon:
    """The shipped lexicon with these settings; made once."""
    return shipped().with_(settings)


def parse(tables: Mapping[str, Any]) -> Shipped:
    """Raises Misconfigured for a phrase whose forms and replacements do not match."""
    categories = {name: table for name, table in tables.items() if isinstance(table, dict)}
    phrases = tuple(
        _phrase(category, entry)
        for category, table in categories.items()
        for entry in table["phrases"]
    )
    seen: dict[str, str] = {}
    for phrase in phrases:
        for form in phrase.forms:
            if form in seen:
                raise Misconfigured(f"the lexicon has {form!r} in {seen[form]} and in {phrase.id}")
            seen[form] = phrase.id
    on = frozenset(name for name, table in categories.items() if table.get("on", True))
    return Shipped(version=str(tables["version"]), phrases=phrases, on=on)


def version_of(version: str, settings: Settings) -> str:
    """The same for the same settings, in whatever order they are written."""
    if settings == Settings():
        return version
    additions = sorted((a.category, a.forms, a.to) for a in settings.additions)
    parts = [sorted(settings.on), sorted(settings.off), additions]
    return f"{version}+{hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:8]}"


def plain(text: str) -> str:
    """As forms are written: small letters, straight apostrophes, single spaces."""
    return " ".join(text.replace("’", "'").casefold().split())


def _phrase(category: str, entry: Mapping[str, Any]) -> Phrase:
    forms = tuple(plain(form) for form in entry["forms"].split("/"))
    to = tuple(entry.get("to", "").split("/"))
    if len(to) == 1:
        to *= len(forms)
    if len(to) != len(forms) or not all(forms):
        raise Misconfigured(
            f"lexicon, {category}: {len(forms)} forms and {len(to)} replacements: {forms[0]!r}",
            hint="give one replacement for all forms, or one for each",
        )
    words = {
        name: frozenset(entry.get(name, ())) for name in ("not_after", "not_before", "only_before")
    }
    return Phrase(
        id=f"{category}/{forms[0]}",
        category=category,
        forms=forms,
        to=to,
        attributive=entry.get("attributive", False),
        headline=entry.get("headline", False),
        **words,
    )


def _added(one: Addition) -> Phrase:
    return _phrase(one.category, {"forms": one.forms, "to": one.to})


def _pattern(forms: Mapping[str, Phrase]) -> re.Pattern[str]:
    """Whole words only: a hyphen or an apostrophe goes on with a word, and what is glued to
    one by / # @ or a full stop is an address or a tag. A phrase may be broken over two lines."""
    if not forms:
        return re.compile(r"(?!)")
    longest_first = sorted(forms, key=lambda form: (-len(form), form))
    alternatives = "|".join(
        re.escape(form).replace("'", "['’]").replace(r"\ ", _GAP) for form in longest_first
    )
    return re.compile(
        rf"(?<![\w/#@.])(?<!\w[-'’])(?:{alternatives})(?![\w/@])(?![-'’.]\w)", re.IGNORECASE
    )
