"""JSON that can be read in one way only, and names for what is wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw, Struct

from penstock.api.decoding import read_json, read_query, refuse_query, scan
from penstock.api.problems import Refused
from penstock.core.errors import InvalidRequest

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=30,
)


PADDING = st.sampled_from([b"", b" " * 70_000])
"""A large body is scanned in another way than a small one."""


@given(VALUES, PADDING, st.booleans())
def test_every_clean_document_passes(value: Any, padding: bytes, ascii_only: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only)
    scan(text.encode("utf-8", "replace") + padding)


@given(st.dictionaries(st.text(max_size=5), st.integers(), min_size=1), PADDING, st.data())
def test_every_name_that_comes_twice_is_found(
    value: dict[str, int], padding: bytes, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(sorted(value)))
    pairs = [f"{json.dumps(key)}: {number}" for key, number in value.items()]
    spelt = "".join(f"\\u{ord(c):04x}" if ord(c) < 0x10000 else c for c in name)
    again = data.draw(st.sampled_from([json.dumps(name), f'"{spelt}"']))
    pairs.insert(data.draw(st.integers(0, len(pairs))), f"{again} : 0")
    text = '[{"inner": {' + ", ".join(pairs) + "}}]"
    with pytest.raises(Refused) as refused:
        scan(text.encode() + padding)
    assert refused.value.name == "DUPLICATE_FIELD"


@pytest.mark.parametrize("depth", [1, 63, 64])
def test_a_depth_up_to_the_limit_passes(depth: int) -> None:
    scan(b"[" * depth + b"]" * depth)
    scan(b'{"a":' * depth + b"1" + b"}" * depth)


@pytest.mark.parametrize("depth", [65, 100, 100_000])
def test_a_depth_beyond_the_limit_does_not(depth: int) -> None:
    for opening in (b"[", b'{"a":'):
        with pytest.raises(Refused, match="nested deeper than 64"):
            scan(opening * depth)


def test_many_brackets_side_by_side_or_in_texts_are_not_deep() -> None:
    scan(b"[" + b",".join([b"[{}]"] * 1000) + b"]")
    scan(json.dumps({"a": '\\"[[{' * 1000}).encode())


LARGE = 8 << 20


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"[]," * 65 + b'"' + b'\\"' * (LARGE // 2),
        b'{"' * (LARGE // 2),
        b'["' + b"\\" * LARGE,
        b'{"a":' + b'"",' * (LARGE // 3),
        b'{"a" ' + b" " * LARGE,
    ],
    ids=["escaped quotes", "quotes", "backslashes", "strings", "spaces"],
)
@pytest.mark.timeout(60)  # a quadratic scan takes days
def test_a_hostile_body_is_scanned_in_linear_time(body: bytes) -> None:
    with pytest.raises(Refused):
        read_json(body, dict)


def test_a_body_of_a_great_many_values_is_refused_unless_they_stay_bytes() -> None:
    body = b'{"a":[' + b"[]," * 300_000 + b"0]}"
    with pytest.raises(Refused, match="more than 250,000 arrays and objects"):
        read_json(body, dict)
    assert bytes(read_json(body, dict[str, Raw], parsed_depth=1)["a"]) == body[5:-1]


class Inner(Struct, forbid_unknown_fields=True):
    size: int = 0


class Outer(Struct, forbid_unknown_fields=True):
    name: str
    inner: Inner | None = None
    many: tuple[Inner, ...] = ()
    words: dict[str, str] = {}
    by_name: dict[str, Inner] = {}


@pytest.mark.parametrize(
    ("body", "field", "problem", "hint"),
    [
        ({}, "name", "is missing", "it is required"),
        ({"name": 1}, "name", "expected str, got int", ""),
        ({"nmae": "a"}, "nmae", "unknown field", "did you mean name?"),
        ({"zzz": "a"}, "zzz", "unknown field", "known are by_name, inner, many"),
        ({"name": "a", "inner": {"sise": 1}}, "inner.sise", "unknown", "did you mean size?"),
        ({"name": "a", "many": [{}, {"sise": 1}]}, "many[1].sise", "unknown", "did you mean size"),
        ({"name": "a", "many": [{}, {"size": "x"}]}, "many[1].size", "expected int, got str", ""),
        ({"name": "a", "words": {"x": "y", "z": 5}}, "words.z", "expected str, got int", ""),
        ({"name": "a", "words": {"x": "y", "z": None}}, "words.z", "expected str, got null", ""),
        ({"name": "a", "by_name": {"k": {"sise": 1}}}, "by_name.k.sise", "unknown", "did you mean"),
        ([], "body", "expected object, got array", ""),
    ],
)
def test_the_field_that_is_wrong_is_named(body: Any, field: str, problem: str, hint: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_json(json.dumps(body).encode(), Outer)
    assert refused.value.field == field
    assert refused.value.problem.startswith(problem)
    assert refused.value.hint.startswith(hint)


@pytest.mark.parametrize(
    "name",
    ["x - at `$" + "[0]" * (LARGE // 3), "x - at `$.a" * (LARGE // 11), "a`" * (LARGE // 2)],
    ids=["steps", "paths", "quotes"],
)
@pytest.mark.timeout(60)  # a quadratic explanation takes minutes
def test_a_hostile_field_name_is_explained_in_linear_time(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_json(json.dumps({name: 1}).encode(), Outer)
    assert refused.value.problem == "unknown field"
    assert len(refused.value.field) <= 200


@pytest.mark.parametrize("name", ["x - at `$[" + "1" * 5000 + "]", "x - at `$.inner[0]", "`", ""])
def test_a_field_whose_name_looks_like_a_path_is_an_unknown_field(name: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_json(json.dumps({name: 1}).encode(), Outer)
    assert refused.value.problem == "unknown field"


class Query(Struct, frozen=True):
    name: str | None = None
    limit: int = 5
    tag: tuple[str, ...] = ()
    flag: bool = False
    at: float | None = None


def test_a_query_becomes_its_struct() -> None:
    query = read_query(b"name=a%20b&limit=7&tag=x&tag=y&flag=true&at=1.5", Query)
    assert query == Query("a b", 7, ("x", "y"), True, 1.5)
    assert read_query(b"", Query) == Query()
    assert read_query(b"name=", Query).name == ""


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (b"nmae=a", "nmae"),
        (b"limit=x", "limit"),
        (b"limit=1&limit=2", "limit"),
        (b"at=nan", "at"),
        (b"at=inf", "at"),
        (b"flag=maybe", "flag"),
        (b"name=%00", "name"),
        (b"name=%ff", "query"),
    ],
)
def test_a_parameter_that_is_wrong_is_named(text: bytes, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_query(text, Query)
    assert refused.value.field == field


def test_an_operation_without_parameters_takes_none() -> None:
    refuse_query(b"")
    with pytest.raises(InvalidRequest, match="x: unknown field"):
        refuse_query(b"x=1")
