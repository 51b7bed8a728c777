"""Layers as people write them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workloads.pipes.config import LayerRange, check_within, parse_layers


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("auto", None),
        (" Auto ", None),
        ("none", ()),
        ("0-14", (LayerRange(0, 15),)),
        ("7", (LayerRange(7, 8),)),
        ("0-4, 20 - 29", (LayerRange(0, 5), LayerRange(20, 30))),
        ("20-29,0-4", (LayerRange(0, 5), LayerRange(20, 30))),
        ("0-4,5-9", (LayerRange(0, 10),)),
        ("3,4,5,9", (LayerRange(3, 6), LayerRange(9, 10))),
    ],
)
def test_ranges_are_read_as_they_are_meant(text: str, meant: tuple[LayerRange, ...] | None) -> None:
    assert parse_layers(text) == meant


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "not a range of layers"),
        ("0-", "not a range of layers"),
        ("0-4,", "not a range of layers"),
        ("a-b", "not a range of layers"),
        ("0..4", "not a range of layers"),
        ("1-2-3", "not a range of layers"),
        ("٣", "not a range of layers"),
        ("auto,0-4", "not a range of layers"),
        ("14-0", "wrong way round: write 0-14"),
        ("-3", "counted from 0"),
        ("-3-4", "counted from 0"),
        ("0-14,10-20", "0-14 and 10-20 overlap"),
        ("5,5", "5-5 and 5-5 overlap"),
        ("0-99999999999", "no model has so many"),
    ],
)
def test_what_is_no_range_is_refused_with_the_part_that_is_wrong(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_layers(text)


def test_layers_beyond_the_model_are_refused() -> None:
    ranges = parse_layers("0-4,20-29")
    assert ranges is not None
    check_within(ranges, 30)
    with pytest.raises(ValueError, match=r"20-29 goes beyond the model: it has 24 layers, 0 to 23"):
        check_within(ranges, 24)


@given(st.sets(st.integers(0, 60)))
def test_any_set_of_layers_can_be_written_and_is_read_back(layers: set[int]) -> None:
    ranges = parse_layers(",".join(map(str, layers)) or "none")
    assert ranges is not None
    assert {n for one in ranges for n in range(one.start, one.end)} == layers
    assert all(a.end < b.start for a, b in itertools.pairwise(ranges))
    assert parse_layers(",".join(map(str, ranges)) or "none") == ranges
