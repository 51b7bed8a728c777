"""How good a lexicon is on texts with a known answer. Pure: the same cases score the same."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from penstock.workloads.pipeline.news.articles import Article, Span
from penstock.workloads.pipeline.news.auditor import facts, lints, names_within
from penstock.workloads.pipeline.news.challenge import Case, Planted, strength
from penstock.workloads.pipeline.news.lexicon import Lexicon
from penstock.workloads.pipeline.news.spans import apply, find_spans

SHARES = {"tabloid": 0.3, "quality": 0.3, "other": 0.4}
_FAULT = 2.0
"""Points off for each new fault of form."""


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Neutralization is 0 to 10, precision and recall 0 to 1."""

    neutralization: float
    precision: float
    recall: float
    planted: int
    found: int
    missed: dict[str, int]
    """Planted phrases that were not found, and how often."""
    false_hits: dict[str, int]
    """Phrases of the lexicon that were found where nothing is, and how often."""

    def overall(self, accuracy: float | None) -> float:
        """0 to 10. Without a known accuracy the other two parts keep their weights."""
        spans = 10 * (self.precision + self.recall) / 2
        if accuracy is None:
            return (0.5 * self.neutralization + 0.3 * spans) / 0.8
        return 0.2 * accuracy * 10 + 0.5 * self.neutralization + 0.3 * spans


def score(cases: Sequence[Case], lexicon: Lexicon) -> Score:
    """Precision and recall are of the whole sample: an article without a hit has none."""
    missed: Counter[str] = Counter()
    false: Counter[str] = Counter()
    planted = found = hits = 0
    quality = []
    for case in cases:
        spans = find_spans(case.text, lexicon)
        right = [one for one in case.planted if any(_meets(span, one) for span in spans)]
        wrong = [span for span in spans if not any(_meets(span, one) for one in case.planted)]
        missed.update(one.phrase for one in case.planted if one not in right)
        false.update(_phrase(span, lexicon) for span in wrong)
        planted, found = planted + len(case.planted), found + len(right)
        hits += len(spans) - len(wrong)
        quality.append(_quality(case.text, apply(case.text, spans)))
    wrong_hits = sum(false.values())
    return Score(
        neutralization=sum(quality) / len(quality) if quality else 10.0,
        precision=hits / (hits + wrong_hits) if hits + wrong_hits else 1.0,
        recall=found / planted if planted else 1.0,
        planted=planted,
        found=found,
        missed=dict(sorted(missed.items())),
        false_hits=dict(sorted(false.items())),
    )


def sample(articles: Sequence[Article], size: int, seed: int) -> list[Article]:
    """By lot: 30 % tabloid, 30 % quality, 40 % other, filled up from what is left."""
    lot = random.Random(f"sample/{seed}")
    shuffled = sorted(articles, key=lambda one: one.hash)
    lot.shuffle(shuffled)
    chosen: list[Article] = []
    for kind, share in SHARES.items():
        of_kind = [one for one in shuffled if one.source_kind == kind]
        chosen += of_kind[: round(size * share)]
    taken = {one.hash for one in chosen}
    chosen += [one for one in shuffled if one.hash not in taken]
    return chosen[:size]


def _meets(span: Span, planted: Planted) -> bool:
    return span.start < planted.end and planted.start < span.end


def _phrase(span: Span, lexicon: Lexicon) -> str:
    found = next(lexicon.find(span.text), None)
    return found[1].id if found else span.text


def _quality(original: str, rewritten: str) -> float:
    """The mean of meaning, neutrality and form, 0 to 10 each."""
    before = strength(original)
    neutrality = 10.0 * (1 - strength(rewritten) / before) if before else 10.0
    faults = sum((lints(rewritten) - lints(original)).values())
    form = max(0.0, 10.0 - _FAULT * faults)
    return (_meaning(original, rewritten) + max(0.0, neutrality) + form) / 3


def _meaning(original: str, rewritten: str) -> float:
    """The share of numbers, names, quotations and denials that are still there."""
    known = names_within(original)
    old, new = facts(original, known=known), facts(rewritten, known=known)
    kept = total = 0
    for name in old.__struct_fields__:
        there = Counter(getattr(old, name))
        kept += sum((there & Counter(getattr(new, name))).values())
        total += sum(there.values())
    return 10.0 * kept / total if total else 10.0
