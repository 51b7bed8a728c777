"""What is known of outlets by their host, and of an article by the path of its address."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from penstock.workloads.pipeline.news.articles import SourceKind

OUTLETS: dict[str, tuple[str, SourceKind]] = {
    # The feeds that come along.
    "harbour.example": ("The Harbour Post", "quality"),
    "valley.example": ("Valley Courier", "other"),
    "echo.example": ("The Daily Echo", "tabloid"),
    # The public corpus.
    "abcnews.go.com": ("ABC News", "quality"),
    "aljazeera.com": ("Al Jazeera", "quality"),
    "bbc.co.uk": ("BBC", "quality"),
    "cnn.com": ("CNN", "quality"),
    "dw.com": ("DW", "quality"),
    "europe.chinadaily.com.cn": ("China Daily", "other"),
    "huffingtonpost.com": ("HuffPost", "tabloid"),
    "rte.ie": ("RTE", "quality"),
    "tass.com": ("TASS", "other"),
}
"""Name and kind, for a mixed sample; no judgement of any article."""

_SECTIONS: dict[str, str] = {
    word: category
    for category, words in {
        "world": "world international europe asia africa americas middleeast",
        "politics": "politics political election elections government parliament brexit",
        "business": "business economy money markets finance economics companies",
        "technology": "technology tech digital gadgets internet",
        "science": "science space",
        "health": "health wellness medicine",
        "environment": "environment climate weather",
        "culture": "culture entertainment arts music film movies books style lifestyle"
        " entertainment-arts celebrity",
        "sport": "sport sports football cricket tennis rugby rugby-union golf cycling olympics",
    }.items()
    for word in words.split()
}
_NUMBERED = re.compile(r"-?\d+$")


def host_of(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").removeprefix("www.")
    except ValueError:
        return ""


def outlet_of(url: str, otherwise: str) -> tuple[str, SourceKind]:
    return OUTLETS.get(host_of(url), (otherwise, "other"))


def section_of(url: str) -> str:
    """The category that the path names, as in /sport/football/..., or ''."""
    try:
        path = urlsplit(url).path
    except ValueError:
        return ""
    for part in path.lower().split("/")[1:]:
        found = section_named(_NUMBERED.sub("", part))
        if found:
            return found
    return ""


def section_named(label: str) -> str:
    """The category of a feed's own label, or ''. `world-europe` goes by its first word."""
    label = label.strip().lower()
    if label in _SECTIONS:
        return _SECTIONS[label]
    head, dash, tail = label.partition("-")
    # A headline in a path has many words; a section has one or two.
    return _SECTIONS.get(head, "") if dash and tail.count("-") <= 1 else ""
