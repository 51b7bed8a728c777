"""Where a text quotes somebody. Quotations are never touched.

Where a mark could be read two ways, the reading that protects more is taken: an unclosed
quotation goes on to the end of its paragraph.
"""

# ruff: noqa: RUF001 (quotation marks and dashes are what this is about)

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

Region = tuple[int, int]

_PARAGRAPH = re.compile(r"\n[^\S\n]*\n")
_OPEN = re.compile(
    r"(?P<nested>[“«‹])|(?P<low>[„‚])|(?P<turned>(?<!\S)»(?=\S))"
    # An apostrophe stands inside a word or at its end; 6" is a length.
    r"|(?P<curly>(?<!\w)‘(?=\S))|(?P<single>(?<!\w)'(?=\S))|(?P<double>(?<!\d)\")"
)
_ENDS = {"“": "”", "«": "»", "‹": "›", "„": "“”", "‚": "‘’", "»": "«"}
_CLOSE = {
    "‘": re.compile(r"(?<=\S)’(?!\w)"),
    "'": re.compile(r"(?<=\S)'(?!\w)"),
    # A mark with a space before and none after opens the next paragraph of the quotation.
    '"': re.compile(r"(?<=\S)\"|\"(?=\s|$)"),
}
_PLURAL = re.compile(r"[sS]['’]\s+[a-z]")


def quoted(text: str) -> list[Region]:
    """The quotations of a text, marks included, in order."""
    regions: list[Region] = []
    start = 0
    for end in [match.start() for match in _PARAGRAPH.finditer(text)] + [len(text)]:
        paragraph = text[start:end]
        regions += [(start + left, start + right) for left, right in _of(paragraph)]
        start = end
    return regions


def overlaps(regions: Sequence[Region], start: int, end: int) -> bool:
    """Whether [start, end) touches one of the regions, which are in order."""
    first = bisect_right(regions, start, key=lambda region: region[1])
    return first < len(regions) and regions[first][0] < end


def _of(paragraph: str) -> list[Region]:
    regions: list[Region] = []
    closers = {mark: [m.start() for m in _CLOSE[mark].finditer(paragraph)] for mark in _CLOSE}
    at = 0
    while mark := _OPEN.search(paragraph, at):
        at = mark.end()
        kind = mark.group()
        if kind in closers:
            end = _close(paragraph, kind, at, closers[kind])
        else:
            end = _close_nested(paragraph, kind, at)
        if end is not None:
            regions.append((mark.start(), end))
            at = end
    return regions


def _close(text: str, kind: str, at: int, closers: list[int]) -> int | None:
    """For marks that are something else too. None: this one was no quotation mark."""
    first = bisect_left(closers, at)
    if kind == '"':
        return closers[first] + 1 if first < len(closers) else len(text)
    for close in closers[first:]:
        # The first that can't be a plural's apostrophe (the workers' union), else the last.
        if not _PLURAL.match(text, close - 1):
            return close + 1
    return closers[-1] + 1 if first < len(closers) else None


def _close_nested(text: str, kind: str, at: int) -> int:
    depth = 1
    for i in range(at, len(text)):
        if text[i] in _ENDS[kind]:
            depth -= 1
        elif text[i] == kind and text[i - 1] != "\n":
            depth += 1
        if depth == 0:
            return i + 1
    return len(text)
