"""Pages of what a container wrote, as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workloads.container.files.output import LogPage
from penstock.workloads.container.job import Stream

OUT = Stream.STDOUT


def pages(data: bytes, sizes: list[int]) -> list[LogPage]:
    """Text of all of it, asked for so many bytes at a time, as a caller does."""
    found, at, size = [], 0, iter(sizes)
    while True:
        part = data[at : at + next(size, 1000)]
        end = at + len(part) == len(data)
        found.append(LogPage(OUT, at, part, at + len(part), end=end).whole())
        at = found[-1].next
        if end:
            return found


@pytest.mark.seed("003", "10.6")
@given(st.binary(max_size=60), st.lists(st.integers(4, 9), max_size=15))
def test_wherever_pages_end_the_text_is_that_of_the_whole(data: bytes, sizes: list[int]) -> None:
    found = pages(data, sizes)
    assert "".join(page.text for page in found) == data.decode("utf-8", "replace")
    assert all(page.data for page in found[:-1])  # so a caller always gets on
    assert [page.offset for page in found] == [0, *(page.next for page in found[:-1])]


def test_the_beginning_of_a_character_is_held_back_unless_its_rest_can_never_come() -> None:
    page = LogPage(OUT, 0, b"a\xe2\x82", 3).whole()
    assert (page.text, page.next) == ("a", 1)
    page = LogPage(OUT, 0, b"a\xe2\x82", 3, cut=True).whole()
    assert (page.text, page.next) == ("a\ufffd", 3)


def test_what_begins_within_a_character_drops_its_rest_only_after_a_gap() -> None:
    page = LogPage(OUT, 5, b"\x82\xacb", 8, end=True)
    assert page.whole().text == "\ufffd\ufffdb"
    for found in (page.whole(ragged=True), LogPage(OUT, 5, b"\x82\xacb", 8, 3).whole()):
        assert (found.text, found.offset, found.next) == ("b", 7, 8)
    assert page.whole(ragged=True).skipped == 2


def test_bytes_that_are_no_text_are_dropped_three_at_most() -> None:
    page = LogPage(OUT, 5, b"\x80" * 5, 10, skipped=1, end=True)
    assert page.whole().text == "\ufffd\ufffd"
