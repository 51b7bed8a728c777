"""Pages of bytes as text."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.api.container.characters import Reader, words_of
from penstock.workloads.container.files.output import LogPage
from penstock.workloads.container.job import Stream

OUT = Stream.STDOUT


def pages(data: bytes, cuts: list[int], start: int = 0) -> list[LogPage]:
    """The bytes in as many pages as there are cuts, the last one at the end."""
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [
        LogPage(OUT, start + a, data[a:b], start + b, 0, end=b == len(data) and a == places[-2])
        for a, b in pairwise(places)
    ]


@given(st.binary(max_size=60), st.lists(st.integers(0, 1000), max_size=8))
def test_wherever_pages_end_the_text_is_that_of_the_whole(data: bytes, cuts: list[int]) -> None:
    reader, told, place = Reader(0), [], 0
    for page in pages(data, cuts):
        for words in reader.take(page):
            assert words.offset == place
            place = words.next
            told.append(words.text)
    assert "".join(told) == data.decode("utf-8", "replace")
    assert reader.ended
    assert reader.told == len(data)


@given(st.text(min_size=1, max_size=20), st.lists(st.integers(0, 1000), max_size=8))
def test_who_comes_back_at_any_place_that_was_told_misses_and_repeats_nothing(
    text: str, cuts: list[int]
) -> None:
    data = text.encode("utf-8", "surrogatepass")
    data = data if data.decode("utf-8", "ignore") == text else b"x"
    told = ""
    reader = Reader(0)
    for page in pages(data, cuts):
        for words in reader.take(page):
            told += words.text
        rest = "".join(
            words.text
            for again in pages(data[reader.told :], [], reader.told)
            for words in Reader(reader.told).take(again)
        )
        assert told + rest == data.decode()


def test_the_beginning_of_a_character_before_a_gap_is_told_as_what_it_is() -> None:
    reader = Reader(0)
    assert [w.text for w in reader.take(LogPage(OUT, 0, b"a\xe2\x82", 3))] == ["a"]
    assert reader.told == 1
    first, second = reader.take(LogPage(OUT, 10, b"\x82\xacb", 13, skipped=7, end=True))
    assert (first.offset, first.next, first.text) == (1, 3, "\ufffd")
    assert (second.offset, second.next, second.skipped, second.text) == (12, 13, 9, "b")


def test_what_begins_within_a_character_drops_its_rest_only_after_a_gap() -> None:
    page = LogPage(OUT, 5, b"\x82\xacb", 8, end=True)
    assert words_of(page).text == "\ufffd\ufffdb"
    assert words_of(page, ragged=True).text == "b"
    assert (words_of(page, ragged=True).offset, words_of(page, ragged=True).skipped) == (7, 2)


def test_bytes_that_are_no_text_are_dropped_three_at_most() -> None:
    page = LogPage(OUT, 5, b"\x80" * 5, 10, skipped=1, end=True)
    assert words_of(page).text == "\ufffd\ufffd"
