"""What could be changed in the lexicon's settings after an evaluation, smallest change each."""

from __future__ import annotations

from collections import Counter

import msgspec
from msgspec.structs import replace

from penstock.workloads.pipeline.news.challenge import challenge
from penstock.workloads.pipeline.news.lexicon import Addition, Settings, lexicon_of, shipped
from penstock.workloads.pipeline.news.versions import Evaluation

MAX_PROPOSALS = 12
_WHOLE_CATEGORY = 2
"""Misses of a category that is off for which all of it is proposed."""


class Proposal(msgspec.Struct, frozen=True):
    what: str
    on: tuple[str, ...] = ()
    off: tuple[str, ...] = ()
    addition: Addition | None = None

    def apply(self, settings: Settings) -> Settings:
        """In a fixed order, so that equal settings are equal."""
        on = (set(settings.on) - set(self.off)) | set(self.on)
        off = (set(settings.off) - set(self.on)) | set(self.off)
        added = settings.additions + ((self.addition,) if self.addition else ())
        return replace(settings, on=tuple(sorted(on)), off=tuple(sorted(off)), additions=added)


def proposals(evaluation: Evaluation, settings: Settings) -> list[Proposal]:
    """What was missed is switched on or added, what hit falsely is dropped; the most frequent
    first."""
    found = [*_switched_on(evaluation, settings), *_added(evaluation, settings)]
    found += [
        Proposal(f"drop {name!r}", off=(name,))
        for name, _ in _by_frequency(evaluation.false_hits)
        if name in _ids(settings)
    ]
    return found[:MAX_PROPOSALS]


def _switched_on(evaluation: Evaluation, settings: Settings) -> list[Proposal]:
    known = {form: phrase for phrase in shipped().phrases for form in phrase.forms}
    in_use = _ids(settings)
    off = {
        form: known[form]
        for form in evaluation.missed
        if form in known and known[form].id not in in_use
    }
    misses = Counter(
        {
            category: sum(evaluation.missed[f] for f, p in off.items() if p.category == category)
            for category in {phrase.category for phrase in off.values()}
        }
    )
    whole = [
        category
        for category, count in _by_frequency(misses)
        if count >= _WHOLE_CATEGORY and category not in _categories(in_use)
    ]
    found = [Proposal(f"switch on {category!r}", on=(category,)) for category in whole]
    single = sorted({p.id for p in off.values() if p.category not in whole})
    return found + [Proposal(f"switch on {name!r}", on=(name,)) for name in single]


def _added(evaluation: Evaluation, settings: Settings) -> list[Proposal]:
    known = {form for phrase in shipped().phrases for form in phrase.forms}
    known |= {one.forms for one in settings.additions}
    found = []
    for form, _ in _by_frequency(evaluation.missed):
        plant = challenge().plant(form)
        if form in known or plant is None or not plant.to:
            continue
        addition = Addition(category=plant.category, forms=form, to=plant.to)
        found.append(Proposal(f"add {form!r}", addition=addition))
    return found


def _ids(settings: Settings) -> frozenset[str]:
    return frozenset(phrase.id for phrase in lexicon_of(settings).phrases)


def _categories(ids: frozenset[str]) -> set[str]:
    return {name.partition("/")[0] for name in ids}


def _by_frequency(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda one: (-one[1], one[0]))
