"""Bytes of a stream as text: a character is never cut in two where a page ends."""

from __future__ import annotations

import codecs
from collections.abc import Iterator

from msgspec import Struct

from penstock.workloads.container.files.output import LogPage

_LONGEST = 4
"""Bytes of a character in UTF-8."""


class Words(Struct, frozen=True):
    """Some of a stream, as text. Offsets are those of bytes."""

    offset: int
    next: int
    """Where the first byte is that was not told."""
    skipped: int
    """Bytes before `offset` that were asked for and are not kept."""
    text: str
    held: bytes = b""
    """The beginning of a character, from `next` on, whose rest has not come."""


def words_of(page: LogPage, *, ragged: bool = False, final: bool = False) -> Words:
    """A page as text; `ragged` if it may begin within a character.

    What begins after a gap drops the rest of a character whose beginning is not there. The
    beginning of one at the end is held back, unless nothing can follow (`final`).
    """
    lead = _rest_of_one(page.data) if ragged or page.skipped else 0
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(page.data[lead:], final or page.end)
    held = decoder.getstate()[0]
    return Words(page.offset + lead, page.next - len(held), page.skipped + lead, text, held)


def _rest_of_one(data: bytes) -> int:
    """How many bytes at the start only go on with a character."""
    count = 0
    for byte in data[: _LONGEST - 1]:
        if byte & 0xC0 != 0x80:
            break
        count += 1
    return count


def joined(page: LogPage, following: LogPage) -> LogPage:
    """Two pages as one; the second begins where the first ends."""
    return LogPage(
        page.stream,
        page.offset,
        page.data + following.data,
        following.next,
        page.skipped,
        following.end,
    )


class Reader:
    """Reads one stream page by page, and tells it in whole characters."""

    def __init__(self, offset: int) -> None:
        self.told = max(0, offset)
        """Up to where it was told."""
        self.at = offset
        """Where to read next; negative: so many bytes before the end."""
        self.ended = False
        self._held: LogPage | None = None

    def take(self, page: LogPage) -> Iterator[Words]:
        """What can be told of the next page."""
        ragged = self.at < 0 and page.offset > 0
        held, self._held = self._held, None
        if held is not None:
            if not page.skipped:
                page = joined(held, page)
            else:  # its rest is not kept
                self.told = held.next
                yield words_of(held, final=True)
        words = words_of(page, ragged=ragged)
        self.at, self.told, self.ended = page.next, words.next, page.end
        if words.held:
            self._held = LogPage(page.stream, words.next, words.held, page.next)
        if words.text or words.skipped:
            yield words
