"""Sections by the words of a text: what is left when nothing trained can be asked."""

from __future__ import annotations

import re

from penstock.workloads.pipeline.news.articles import CATEGORIES

_WORDS: dict[str, str] = {
    "world": "foreign minister|ambassador|embassy|refugee|ceasefire|truce|troop|border|rebel|"
    "united nations|diplomat*|militant|airstrike|missile|peacekeep*|insurgen*|navy|army|sanction|"
    "hostage|treaty|summit|militar*|nato|war|bomb|abroad|consulate|earthquake",
    "politics": "parliament*|election|voter|vote|voted|minister|president*|senat*|congress*|"
    "lawmaker|governor|cabinet|coalition|referendum|opposition|campaign*|democrat*|republican|"
    "candidate|councillor|mayor|bill|legislat*|poll|party|government|white house|politic*",
    "business": "share|profit*|revenue|market|bank*|inflation|interest rate|investor|investment|"
    "economy|economic|company|companies|trade|tariff|export*|price|quarterly|shareholder|merger|"
    "unemployment|wage|debt|retailer|stock|currency|chief executive|billion",
    "technology": "software|hacker|internet|smartphone|app|computer|artificial intelligence|robot*|"
    "online|website|cyber*|chip|algorithm|browser|digital|data centre|password|download*|server|"
    "social network|gadget|encrypt*|network",
    "science": "scientist|researcher|astronom*|planet|telescope|space|physic*|fossil|genome|dna|"
    "particle|experiment|laborator*|galaxy|species|dinosaur|chemist*|biolog*|spacecraft|rocket|"
    "archaeolog*|neuro*|light year|journal",
    "health": "patient|hospital|doctor|vaccin*|disease|virus|drug|cancer|clinic*|nurse|surgeon|flu|"
    "outbreak|treatment|medical|health|diabetes|infection|symptom|therap*|obesity",
    "environment": "climate|emission|drought|flood*|storm|wildfire|pollut*|forest|wildlife|carbon|"
    "renewable|reservoir|glacier|conservation*|heatwave|weather|rainfall|plastic waste|wind farm|"
    "habitat|warming|coral",
    "culture": "film|movie|museum|novel|album|singer|concert|theatre|artist|painting|actor|actress|"
    "orchestra|festival|exhibition|gallery|poet|band|director|television series|music*|book",
    "sport": "match|goal|coach|league|cup|striker|champion*|tournament|player|olympic|team|season|"
    "marathon|tennis|football*|rugby|cricket*|golf*|athlet*|final|scored|defeat|midfielder|referee",
    "other": "police|arrested|court|school|pupil|teacher|crash*|collid*|fire brigade|firefighter|"
    "robbed|burglar*|prison|sentenced|jury|murder*|detective|bus|lorry|resident|missing",
}
"""A star stands for any ending; else a word may only have a plural's."""
_TITLE_WEIGHT = 3
_FRONT = 4_000
_ENOUGH = 2
"""Points below which a text is of no section in particular."""


def _pattern(words: str) -> re.Pattern[str]:
    forms = (
        word.replace("*", r"\w*") if word.endswith("*") else word + "(?:s|es)?"
        for word in words.split("|")
    )
    return re.compile(rf"\b(?:{'|'.join(forms)})\b")


_PATTERNS = [_pattern(_WORDS[category]) for category in CATEGORIES]


def by_keywords(title: str, body: str) -> tuple[str, float]:
    """The section with the most of its words in the text, and its share of all points."""
    heads, bodies = keyword_counts(title), keyword_counts(body)
    points = [_TITLE_WEIGHT * head + body for head, body in zip(heads, bodies, strict=True)]
    # Of equals, the first in the order of sections.
    best = max(range(len(points)), key=points.__getitem__)
    if points[best] < _ENOUGH:
        return "other", 0.0
    return CATEGORIES[best], points[best] / sum(points)


def keyword_counts(text: str) -> list[int]:
    """How many different words of each section are at the front of a text."""
    front = text[:_FRONT].lower()
    return [len(set(pattern.findall(front))) for pattern in _PATTERNS]
