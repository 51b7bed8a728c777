"""Which part of a payload is meant, and where a page ended."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.problems import Refused
from penstock.api.ranges import Part, part_of
from penstock.core.errors import InvalidRequest
from penstock.ports.operations import cursor, position

ETAG = b'"abc"'


def part(value: bytes | None, size: int = 10, **conditions: bytes) -> Part:
    headers = {name.replace("_", "-").encode(): text for name, text in conditions.items()}
    if value is not None:
        headers[b"range"] = value
    return part_of(headers, size, ETAG)


@pytest.mark.parametrize(
    ("value", "start", "length"),
    [
        (b"bytes=0-0", 0, 1),
        (b"bytes=2-4", 2, 3),
        (b"bytes=2-", 2, 8),
        (b"bytes=-3", 7, 3),
        (b"bytes=-30", 0, 10),
        (b"bytes=9-99", 9, 1),
        (b"BYTES=1-1", 1, 1),
    ],
)
def test_one_range_is_that_part(value: bytes, start: int, length: int) -> None:
    found = part(value)
    assert (found.status, found.start, found.length) == (206, start, length)
    told = b"bytes %d-%d/10" % (start, start + length - 1)
    assert found.headers == ((b"content-range", told),)


@pytest.mark.parametrize(
    "value", [None, b"", b"bytes=", b"bytes=-", b"bytes=4-2", b"lines=1-2", b"bytes=0-1,3-4", b"x"]
)
def test_what_is_no_single_range_is_the_whole(value: bytes | None) -> None:
    assert part(value) == Part(200, 0, 10)


@pytest.mark.parametrize("value", [b"bytes=10-", b"bytes=99-100", b"bytes=-0"])
def test_a_part_that_is_not_there_is_refused_with_the_size(value: bytes) -> None:
    with pytest.raises(Refused) as refused:
        part(value)
    assert refused.value.status == 416
    assert refused.value.headers == ((b"content-range", b"bytes */10"),)


@pytest.mark.timeout(10)  # a quadratic one takes a minute
def test_a_hostile_range_is_read_in_linear_time() -> None:
    spaces = b" " * 200_000
    assert part(b"bytes=" + spaces + b"x").status == 200
    assert part(b"bytes=" + spaces + b"2" + spaces + b"-" + spaces + b"4" + spaces).length == 3


def test_nothing_has_no_parts() -> None:
    with pytest.raises(Refused):
        part(b"bytes=0-", size=0)
    assert part(None, size=0) == Part(200, 0, 0)


def test_a_condition_that_names_another_version_gets_the_whole() -> None:
    assert part(b"bytes=0-1", if_range=ETAG).status == 206
    assert part(b"bytes=0-1", if_range=b'"other"').status == 200
    assert part(b"bytes=0-1", if_range=b"Wed, 21 Oct 2015 07:28:00 GMT").status == 200


@pytest.mark.parametrize("tags", [ETAG, b'"x", "abc"', b'W/"abc"', b"*"])
def test_a_version_that_is_known_is_not_sent_again(tags: bytes) -> None:
    assert part(b"bytes=0-1", if_none_match=tags).status == 304
    assert part(None, if_none_match=b'"x"').status == 200


@given(st.integers(0, 1000), st.integers(0, 1200), st.integers(0, 1200))
def test_a_part_is_what_a_slice_is(size: int, first: int, last: int) -> None:
    data = bytes(n % 251 for n in range(size))
    try:
        found = part(b"bytes=%d-%d" % (first, last), size)
    except Refused:
        assert first >= size
        assert first <= last
        return
    cut = data[found.start : found.start + found.length]
    assert cut == (data[first : last + 1] if found.status == 206 else data)


@given(st.sampled_from("nowa"), st.integers(-1, (1 << 62) - 1))
def test_a_cursor_is_read_back(order: str, at: int) -> None:
    assert position(order, int | None, cursor(order, at)) == at


@given(st.text(max_size=30))
def test_any_other_text_is_no_cursor_or_a_harmless_one(text: str) -> None:
    place = 0
    with suppress(InvalidRequest):
        place = position("n", int, text)
    assert -1 <= place < 1 << 62


def test_a_cursor_of_another_listing_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="another listing"):
        position("o", int, cursor("n", 5))
    with pytest.raises(InvalidRequest, match="another listing"):
        position("o", int | None, cursor("o", None))
    assert position("o", int, None) is None
