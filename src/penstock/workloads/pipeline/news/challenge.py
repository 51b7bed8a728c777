"""Texts with a known answer: clean sentences of real articles, with known phrases planted.

What was planted, and where, is known to the letter, so precision and recall are exact. The same
seed gives the same texts.
"""

from __future__ import annotations

import functools
import random
import re
import tomllib
from collections.abc import Sequence
from importlib import resources
from typing import Any

import msgspec

from penstock.workloads.pipeline.news.articles import Article
from penstock.workloads.pipeline.news.lexicon import Lexicon, plain, shipped
from penstock.workloads.pipeline.news.quotes import quoted
from penstock.workloads.pipeline.news.wording import WORD, article, words

PER_ARTICLE = 4
"""Phrases planted in one article."""
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_BEFORE_NOUN = re.compile(r"\b(the|an?|its|their) (?=[a-z]{3,})")
_AFTER_VERB = re.compile(r"\b(?:is|was|are|were) (?=[a-z]{3,})")
_NO_NOUN = words("same first last next few lot number other most more less least many only own")
_SLOT = re.compile(r"\{(.+?)\}")
_MAX_SENTENCES = 20


class Plant(msgspec.Struct, frozen=True, kw_only=True):
    """A phrase to be planted."""

    phrase: str
    category: str
    text: str = ""
    """The sentence it comes in, its slot in braces."""
    to: str = ""
    """A replacement for one that the lexicon does not know."""
    where: str = "sentence"


class Challenge(msgspec.Struct, frozen=True, kw_only=True):
    plants: tuple[Plant, ...]
    decoys: tuple[str, ...]
    quotations: tuple[str, ...]
    strong: dict[str, int]

    def plant(self, phrase: str) -> Plant | None:
        return next((one for one in self.plants if one.phrase == phrase), None)


class Planted(msgspec.Struct, frozen=True):
    start: int
    end: int
    phrase: str


class Case(msgspec.Struct, frozen=True):
    """One text, and what is to be found in it: this and nothing else."""

    text: str
    planted: tuple[Planted, ...]


@functools.cache
def challenge() -> Challenge:
    text = resources.files(__package__).joinpath("challenge.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    plants = [_plant(entry, "sentence") for entry in tables["sentences"]]
    plants += [_plant(entry, "adjective") for entry in tables["adjectives"]]
    plants += [_plant(entry, "adverb") for entry in tables["adverbs"]]
    strong = {
        word: int(weight) for weight, listed in tables["strong"].items() for word in listed.split()
    }
    return Challenge(
        plants=tuple(plants),
        decoys=tuple(tables["decoys"]),
        quotations=tuple(tables["quotations"]),
        strong=strong,
    )


def cases(articles: Sequence[Article], seed: int) -> list[Case]:
    """A text for each article. The plants go round, so that a small sample meets many."""
    given = challenge()
    lot = random.Random(f"plants/{seed}")
    plants = lot.sample(given.plants, len(given.plants))
    made = []
    for number, one in enumerate(articles):
        chosen = [plants[(number * PER_ARTICLE + i) % len(plants)] for i in range(PER_ARTICLE)]
        made.append(_case(one, chosen, random.Random(f"{seed}/{one.hash}")))
    return made


def strength(text: str) -> int:
    """How strong the words of a text are, its quotations left out."""
    outside, at = [], 0
    for start, end in quoted(text):
        outside.append(text[at:start])
        at = end
    outside.append(text[at:])
    strong = challenge().strong
    return sum(strong.get(plain(word), 0) for word in WORD.findall(" ".join(outside)))


def clean_sentences(text: str) -> list[str]:
    """Those without a phrase that any list has, and without quotation marks."""
    everything = _known_phrases()
    found = []
    for sentence in _SENTENCE.split(" ".join(text.split())):
        known = next(everything.find(sentence), None) or strength(sentence)
        if sentence.endswith((".", "!", "?")) and not known and not quoted(sentence):
            found.append(sentence)
    return found[:_MAX_SENTENCES]


@functools.cache
def _known_phrases() -> Lexicon:
    return shipped().everything()


def _plant(entry: dict[str, Any], where: str) -> Plant:
    text = entry.get("text", "")
    slot = _SLOT.search(text)
    phrase = plain(slot.group(1)) if slot else entry["phrase"]
    return Plant(
        phrase=phrase,
        category=entry["category"],
        text=text,
        to=entry.get("to", ""),
        where=where,
    )


def _case(one: Article, plants: Sequence[Plant], lot: random.Random) -> Case:
    given = challenge()
    sentences: list[tuple[str, Planted | None]] = [(s, None) for s in clean_sentences(one.body)]
    for plant in plants:
        _put(sentences, plant, lot)
    for extra in (lot.choice(given.decoys), lot.choice(given.quotations)):
        sentences.insert(lot.randint(0, len(sentences)), (extra, None))
    return _joined(sentences)


def _put(sentences: list[tuple[str, Planted | None]], plant: Plant, lot: random.Random) -> None:
    """In a sentence that has room for it; else in one made up for it."""
    fields = [i for i, (_, planted) in enumerate(sentences) if planted is None]
    lot.shuffle(fields)
    for i in fields if plant.where != "sentence" else ():
        if (grown := _grown(sentences[i][0], plant)) is not None:
            sentences[i] = grown
            return
    text = (
        plant.text
        or {
            "adjective": f"It was the {{{plant.phrase}}} outcome of a long meeting.",
            "adverb": f"The outcome was {{{plant.phrase}}} clear.",
        }[plant.where]
    )
    slot = _SLOT.search(text)
    assert slot is not None
    bare = text[: slot.start()] + slot.group(1) + text[slot.end() :]
    planted = Planted(slot.start(), slot.start() + len(slot.group(1)), plant.phrase)
    sentences.insert(lot.randint(0, len(sentences)), (bare, planted))


def _grown(sentence: str, plant: Plant) -> tuple[str, Planted] | None:
    pattern = _BEFORE_NOUN if plant.where == "adjective" else _AFTER_VERB
    for slot in pattern.finditer(sentence):
        following = WORD.match(sentence, slot.end())
        if following is None or following.group() in _NO_NOUN:
            continue
        before = sentence[: slot.end()]
        if slot.group().strip() in ("a", "an"):
            before = sentence[: slot.start()] + article(plant.phrase) + " "
        start = len(before)
        text = f"{before}{plant.phrase} {sentence[slot.end() :]}"
        return text, Planted(start, start + len(plant.phrase), plant.phrase)
    return None


def _joined(sentences: Sequence[tuple[str, Planted | None]]) -> Case:
    parts, planted, at = [], [], 0
    for text, one in sentences:
        if one is not None:
            planted.append(Planted(at + one.start, at + one.end, one.phrase))
        parts.append(text)
        at += len(text) + 1
    return Case(" ".join(parts), tuple(planted))
