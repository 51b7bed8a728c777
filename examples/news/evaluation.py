"""Evaluation: known phrases are planted in clean text, so precision and recall are exact.

Both the articles and the phrases are split in two. From one half (`dev`) the optimization learns
what is missed; the other half is held out, and what is reported and decided comes from it.
"""

from __future__ import annotations

import functools
import random
import re
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from .articles import Article
from .auditor import facts, faults, names_within
from .classify import sections
from .lexicon import WORD, Lexicon, Span, apply, article_for, plain, quoted, shipped, words
from .model import Model
from .neutralize import rewrite

PER_ARTICLE = 4
"""Phrases planted in one article."""
SHARES = {"tabloid": 0.3, "quality": 0.3, "other": 0.4}
"""Kinds of sources in a sample."""
MIN_ARTICLES = 2
"""Articles that either half must have."""
MODEL_SENTENCES = 4
"""Held-out sentences that the model is asked to rewrite, if there is one."""
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
_BEFORE_NOUN = re.compile(r"\b(the|an?|its|their) (?=[a-z]{3,})")
_AFTER_VERB = re.compile(r"\b(?:is|was|are|were) (?=[a-z]{3,})")
_SLOT = re.compile(r"\{(.+?)\}")

Half = Literal["dev", "held_out"]


class Plant(msgspec.Struct, frozen=True):
    """A phrase to be planted: before a noun, after a verb, or in a sentence of its own."""

    text: str
    """The phrase, or a sentence with the phrase in braces."""
    held_out: bool = False
    place: str = ""

    @property
    def phrase(self) -> str:
        slot = _SLOT.search(self.text)
        return plain(slot[1]) if slot else self.text


class Challenge(msgspec.Struct, frozen=True):
    adjectives: tuple[Plant, ...]
    adverbs: tuple[Plant, ...]
    sentences: tuple[Plant, ...]
    decoys: tuple[Plant, ...]
    quotations: tuple[str, ...]
    strong: dict[str, str]

    def plants(self, half: Half) -> list[Plant]:
        every = [
            msgspec.structs.replace(one, place=place)
            for place in ("adjectives", "adverbs", "sentences")
            for one in getattr(self, place)
        ]
        return [one for one in every if one.held_out == (half == "held_out")]


class Case(msgspec.Struct, frozen=True):
    """A text, and the phrases that are to be found in it (start, end, phrase): no others."""

    text: str
    planted: tuple[tuple[int, int, str], ...]


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Neutralization is 0 to 10, precision and recall 0 to 1."""

    neutralization: float
    precision: float
    recall: float
    planted: int
    missed: dict[str, int]
    """Planted phrases that were not found, and how often."""
    false_hits: dict[str, int]
    """Ids of phrases that were found where none is, and how often."""

    def overall(self, accuracy: float | None = None) -> float:
        """0 to 10. Without a known accuracy the other two parts keep their weights."""
        spans = 10 * (self.precision + self.recall) / 2
        if accuracy is None:
            return (0.5 * self.neutralization + 0.3 * spans) / 0.8
        return 0.2 * accuracy * 10 + 0.5 * self.neutralization + 0.3 * spans


@functools.cache
def challenge() -> Challenge:
    text = Path(__file__).with_name("challenge.toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text), Challenge)


def half_of(article: Article) -> Half:
    """Fixed for ever by the article's id."""
    return "held_out" if int(article.id[:8], 16) % 2 else "dev"


def sample(articles: Sequence[Article], size: int, seed: int) -> list[Article]:
    """30 % tabloid, 30 % quality, 40 % other, filled up from what is left."""
    shuffled = sorted(articles, key=lambda one: one.id)
    random.Random(f"sample/{seed}").shuffle(shuffled)
    chosen = [
        one
        for kind, share in SHARES.items()
        for one in [one for one in shuffled if one.kind == kind][: round(size * share)]
    ]
    return [*chosen, *(one for one in shuffled if one not in chosen)][:size]


def accuracy_of(chosen: Sequence[Article], teacher: Model) -> float | None:
    """The share of right labels among those that can be checked; None where none can. A label that
    was taken from the feed proves nothing."""
    verdicts = []
    for one in chosen:
        if one.method != "feed":
            expected = one.section or (teacher.label(f"{one.title}\n\n{one.text}", sections()))
            verdicts += [one.label == expected] if expected else []
    return sum(verdicts) / len(verdicts) if verdicts else None


# -- planting ------------------------------------------------------------------------------


def cases(articles: Sequence[Article], half: Half, seed: int) -> list[Case]:
    """A text for each article of this half; the phrases go round, so a small sample meets many."""
    given = challenge()
    plants = given.plants(half)
    random.Random(f"plants/{seed}").shuffle(plants)
    decoys = [one.text for one in given.decoys if one.held_out == (half == "held_out")]
    made = []
    for number, article in enumerate(one for one in articles if half_of(one) == half):
        lot = random.Random(f"{seed}/{article.id}")
        parts: list[tuple[str, str]] = [(one, "") for one in _clean_sentences(article.body)]
        for i in range(PER_ARTICLE):
            _plant(parts, plants[(number * PER_ARTICLE + i) % len(plants)], lot)
        for extra in (lot.choice(decoys), lot.choice(given.quotations)):
            parts.insert(lot.randint(0, len(parts)), (extra, ""))
        made.append(_joined(parts))
    return made


def _plant(parts: list[tuple[str, str]], plant: Plant, lot: random.Random) -> None:
    """In a sentence that has room for the phrase; else in one made up for it."""
    if plant.place != "sentences":
        free = [i for i, (_, phrase) in enumerate(parts) if not phrase]
        lot.shuffle(free)
        for i in free:
            if grown := _grown(parts[i][0], plant):
                parts[i] = (grown, plant.text)
                return
    made_up = {"adjectives": "It was the {%s} outcome of a long meeting.",
               "adverbs": "The outcome was {%s} clear."}  # fmt: skip
    text = made_up.get(plant.place, "%s") % plant.text
    parts.insert(lot.randint(0, len(parts)), (_SLOT.sub(r"\1", text), _SLOT.findall(text)[0]))


def _grown(sentence: str, plant: Plant) -> str | None:
    pattern = _BEFORE_NOUN if plant.place == "adjectives" else _AFTER_VERB
    for slot in pattern.finditer(sentence):
        following = WORD.match(sentence, slot.end())
        if following and following.group() not in words("no_noun"):
            before = sentence[: slot.end()]
            if slot.group().strip() in ("a", "an"):
                before = sentence[: slot.start()] + article_for(plant.text) + " "
            return f"{before}{plant.text} {sentence[slot.end() :]}"
    return None


def _joined(parts: Sequence[tuple[str, str]]) -> Case:
    planted, at = [], 0
    for text, phrase in parts:
        if phrase:
            start = at + text.index(phrase)
            planted.append((start, start + len(phrase), plain(phrase)))
        at += len(text) + 1
    return Case(" ".join(text for text, _ in parts), tuple(planted))


def _clean_sentences(text: str) -> list[str]:
    """Those without a phrase that any list has, and without quotation marks."""
    every = Lexicon(shipped()[0])
    sentences = _SENTENCE.split(" ".join(text.split()))
    return [
        one
        for one in sentences
        if one.endswith((".", "!", "?"))
        and not any(True for _ in every.find(one))
        and not strength(one)
        and not quoted(one)
    ][:20]


# -- scoring -------------------------------------------------------------------------------


def score(cases: Sequence[Case], lexicon: Lexicon) -> Score:
    """Precision and recall are of all cases together: a text without a hit has none."""
    missed: Counter[str] = Counter()
    false: Counter[str] = Counter()
    found = hits = 0
    quality = []
    for case in cases:
        spans = lexicon.spans(case.text)
        right = [one for one in case.planted if any(_meets(span, one) for span in spans)]
        wrong = [span for span in spans if not any(_meets(span, one) for one in case.planted)]
        missed.update(one[2] for one in case.planted if one not in right)
        false.update(span.phrase for span in wrong)
        found, hits = found + len(right), hits + len(spans) - len(wrong)
        quality.append(_quality(case.text, apply(case.text, spans)))
    planted = sum(len(case.planted) for case in cases)
    return Score(
        neutralization=sum(quality) / len(quality) if quality else 10.0,
        precision=hits / (hits + false.total()) if hits + false.total() else 1.0,
        recall=found / planted if planted else 1.0,
        planted=planted,
        missed=dict(sorted(missed.items())),
        false_hits=dict(sorted(false.items())),
    )


def model_recall(model: Model, lexicon: Lexicon) -> float | None:
    """The share of held-out sentences that the model rewrites without their phrase, in a way that
    the auditor accepts; None without a model."""
    if not model:
        return None
    asked = [one for one in challenge().plants("held_out") if one.place == "sentences"]
    gone = 0
    for plant in asked[:MODEL_SENTENCES]:
        text = _SLOT.sub(r"\1", plant.text)
        done = rewrite(text, lexicon, model, lead=True)
        gone += done.by_model and plant.phrase not in plain(done.text)
    return gone / len(asked[:MODEL_SENTENCES])


def strength(text: str) -> int:
    """How strong the words of a text are, its quotations left out, by a list of its own."""
    for start, end in reversed(quoted(text)):
        text = text[:start] + text[end:]
    weights = _strong()
    return sum(weights.get(plain(word), 0) for word in WORD.findall(text))


@functools.cache
def _strong() -> dict[str, int]:
    listed = challenge().strong.items()
    return {word: int(weight) for weight, words in listed for word in words.split()}


def _meets(span: Span, planted: tuple[int, int, str]) -> bool:
    return span.start < planted[1] and planted[0] < span.end


def _quality(original: str, rewritten: str) -> float:
    """The mean of meaning, neutrality and form, 0 to 10 each."""
    before = strength(original)
    neutrality = 10.0 * (1 - strength(rewritten) / before) if before else 10.0
    form = 10.0 - 2.0 * (faults(rewritten) - faults(original)).total()
    return (_meaning(original, rewritten) + max(0.0, neutrality) + max(0.0, form)) / 3


def _meaning(original: str, rewritten: str) -> float:
    """The share of numbers, names, quotations and denials that are still there."""
    known = names_within(original)
    old, new = facts(original, known), facts(rewritten, known)
    there = [
        (Counter(getattr(old, one)), Counter(getattr(new, one))) for one in old.__struct_fields__
    ]
    total = sum(before.total() for before, _ in there)
    kept = sum((before & after).total() for before, after in there)
    return 10.0 * kept / total if total else 10.0
