"""A config is checked by its schema as its type would check it."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.rows import every

from penstock.core.errors import InvalidRequest
from penstock.workloads.pipeline.run_config import check_fields


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Inner(msgspec.Struct):
    size: Annotated[int, msgspec.Meta(gt=0, lt=9)] = 1


class Config(msgspec.Struct):
    name: Annotated[str, msgspec.Meta(min_length=1, max_length=5, pattern="^[a-z]*$")]
    count: Annotated[int, msgspec.Meta(ge=1, le=10)] = 1
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    colour: Colour = Colour.RED
    parts: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(max_length=3)] = []
    inner: Inner = msgspec.field(default_factory=Inner)
    on: bool = False


SCHEMA = msgspec.json.schema(Config)


@every(
    "given, field",
    [
        ({}, "config.name"),
        ({"name": ""}, "config.name"),
        ({"name": "abcdef"}, "config.name"),
        ({"name": "A"}, "config.name"),
        ({"name": 3}, "config.name"),
        ({"name": "a", "count": 0}, "config.count"),
        ({"name": "a", "count": 11}, "config.count"),
        ({"name": "a", "count": True}, "config.count"),
        ({"name": "a", "count": "3"}, "config.count"),
        ({"name": "a", "share": 1.5}, "config.share"),
        ({"name": "a", "share": "x"}, "config.share"),
        ({"name": "a", "colour": "green"}, "config.colour"),
        ({"name": "a", "parts": [1, -1]}, "config.parts[1]"),
        ({"name": "a", "parts": [1, 1, 1, 1]}, "config.parts"),
        ({"name": "a", "parts": 1}, "config.parts"),
        ({"name": "a", "inner": {"size": 0}}, "config.inner.size"),
        ({"name": "a", "inner": {"size": 9}}, "config.inner.size"),
        ({"name": "a", "on": 1}, "config.on"),
        ({"name": "a", "nmae": 1}, "config.nmae"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_field(given: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_fields("config", given, SCHEMA)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "given",
    [
        {"name": "a"},
        {"name": "abc", "count": 10, "share": None, "colour": "blue", "parts": [0, 1, 2]},
        {"name": "a", "share": 1, "inner": {"size": 8}, "on": True},
    ],
)
def test_what_fits_passes(given: dict[str, Any]) -> None:
    check_fields("config", given, SCHEMA)


@given(
    st.fixed_dictionaries(
        {"name": st.one_of(st.text(max_size=7), st.integers())},
        optional={
            "count": st.one_of(st.integers(-2, 12), st.booleans(), st.none()),
            "share": st.one_of(st.floats(-1, 2), st.none(), st.text(max_size=2)),
            "parts": st.lists(st.integers(-1, 3), max_size=5),
            "inner": st.fixed_dictionaries({"size": st.integers(-1, 10)}),
            "on": st.one_of(st.booleans(), st.integers(0, 1)),
            "colour": st.sampled_from(["red", "blue", "green", ""]),
        },
    )
)
def test_schema_and_type_refuse_the_same(given: dict[str, Any]) -> None:
    try:
        msgspec.convert(given, Config)
        fits = True
    except msgspec.ValidationError:
        fits = False
    try:
        check_fields("config", given, SCHEMA)
        passes = True
    except InvalidRequest:
        passes = False
    assert passes is fits


def test_any_object_fits_where_there_is_no_type() -> None:
    check_fields("config", {"a": 1, "b": [None]}, {})
