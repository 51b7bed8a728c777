from __future__ import annotations

import dataclasses
import datetime as dt
import enum
import json
import math
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import values
from penstock.core.errors import InvalidRequest, Misconfigured
from penstock.ports.executor import Context
from penstock.testing.context import RecordingContext
from penstock.workloads.function.definition import Signature

if TYPE_CHECKING:
    from decimal import Decimal as OnlyForTheChecker


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


class Box(msgspec.Struct, forbid_unknown_fields=True):
    corner: Point
    colour: Colour = Colour.RED


def shout(text: str, times: int = 1) -> str:
    return text.upper() * times


def refusal(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    with pytest.raises(InvalidRequest) as caught:
        Signature(fn).bind(args, kwargs)
    return str(caught.value)


def refused_payload(fn: Callable[..., Any], payload: bytes) -> str:
    with pytest.raises(InvalidRequest) as caught:
        Signature(fn).decode(payload)
    return str(caught.value)


def test_positional_and_named_arguments_are_bound_by_name() -> None:
    assert json.loads(Signature(shout).bind(("hello",), {"times": 2})) == {
        "text": "hello",
        "times": 2,
    }


def test_an_absent_argument_is_left_to_the_default_at_the_worker() -> None:
    signature = Signature(shout)
    assert json.loads(signature.bind(("hello",), {})) == {"text": "hello"}
    assert signature.decode(b'{"text":"hello"}') == {"text": "hello", "times": 1}


def test_an_empty_payload_is_a_call_without_arguments() -> None:
    def nothing(x: int = 5) -> None: ...

    assert Signature(nothing).decode(b"") == {"x": 5}


def test_a_wrong_type_is_refused_by_name() -> None:
    assert refusal(shout, 5) == "input.text: expected str, got int"
    assert refused_payload(shout, b'{"text":5}') == "input.text: expected str, got int"


def test_a_missing_argument_is_refused_by_name() -> None:
    assert refusal(shout) == "input.text: is missing"


def test_an_unexpected_argument_is_refused_with_the_nearest_name() -> None:
    assert refusal(shout, txet="a") == "input.txet: unexpected (did you mean text?)"
    assert refusal(shout, qqq="a") == "input.qqq: unexpected (known are text, times)"


def test_too_many_positional_arguments_are_refused() -> None:
    assert "takes 2 positional arguments, 3 were given" in refusal(shout, "a", 1, 2)


def test_an_argument_given_twice_is_refused() -> None:
    assert refusal(shout, "a", text="b") == "input.text: is given twice"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_json_lacks_are_refused_at_any_depth(number: float) -> None:
    def take(value: Any) -> None: ...

    assert refusal(take, number) == f"input.value: {number} can't be stored as JSON"
    deep = {"a": [1, {"b": number}]}
    assert refusal(take, deep) == f"input.value.a[1].b: {number} can't be stored as JSON"
    assert refusal(take, Point(1, number)) == f"input.value.y: {number} can't be stored as JSON"


def test_none_is_an_honest_value() -> None:
    def take(value: Any) -> None: ...

    assert json.loads(Signature(take).bind((None,), {})) == {"value": None}


def test_what_json_cannot_say_is_refused_by_name() -> None:
    def take(first: Any, second: Any = None) -> None: ...

    problem = refusal(take, 1, object())
    assert problem == (
        "input.second: can't be stored as JSON: a value of type object is unsupported"
        " (penstock.values.register adds a type)"
    )
    loop: list[Any] = []
    loop.append(loop)
    assert refusal(take, loop).startswith("input.first: can't be stored as JSON: it is nested")
    assert refusal(take, "\ud800").startswith("input.first: can't be stored as JSON")


@pytest.mark.parametrize(
    "payload", [b"[1]", b"1", b"null", b'"x"', b"nope", b'{"text":', b'{"text":"\xff"}', b"\x00"]
)
def test_a_payload_that_is_no_json_object_is_refused(payload: bytes) -> None:
    assert refused_payload(shout, payload).startswith("input")


def test_a_payload_nested_too_deeply_is_refused() -> None:
    def take(value: Any) -> None: ...

    payload = b'{"value":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    assert "nested too deeply" in refused_payload(take, payload)


def test_a_fault_inside_a_structure_is_named_by_its_path() -> None:
    def take(boxes: list[Box], table: dict[int, str] | None = None) -> None: ...

    assert refused_payload(take, b'{"boxes":[{}]}') == "input.boxes[0].corner: is missing"
    wrong = b'{"boxes":[{"corner":{"x":"1"}}]}'
    assert refused_payload(take, wrong) == "input.boxes[0].corner.x: expected int, got str"
    unknown = b'{"boxes":[{"corner":{"x":1},"lid":1}]}'
    assert refused_payload(take, unknown) == "input.boxes[0].lid: unexpected"
    key = b'{"boxes":[],"table":{"x":"y"}}'
    assert refused_payload(take, key) == "input.table: in a key, expected int, got str"


def test_rich_types_arrive_as_themselves() -> None:
    def take(when: dt.datetime, box: Box, point: Point, colour: Colour, raw: bytes) -> None: ...

    signature = Signature(take)
    given = {
        "when": dt.datetime(2026, 1, 2, tzinfo=dt.UTC),
        "box": Box(Point(1, 2.0)),
        "point": Point(3),
        "colour": Colour.RED,
        "raw": b"\x00\xff",
    }
    assert signature.decode(signature.encode(given)) == given


def test_types_local_to_a_function_are_found_behind_string_annotations() -> None:
    class Local(msgspec.Struct):
        x: int

    def outer() -> Signature:
        class Inner(msgspec.Struct):
            y: int

        def take(a: Local, b: list[Inner]) -> None: ...

        return Signature(take)

    decoded = outer().decode(b'{"a":{"x":1},"b":[{"y":2}]}')
    assert isinstance(decoded["a"], Local)
    assert decoded["b"][0].y == 2


def test_an_annotation_that_cannot_be_resolved_is_named() -> None:
    def take(value: OnlyForTheChecker) -> None: ...

    with pytest.raises(Misconfigured, match=r"take: the annotation of value.*OnlyForTheChecker"):
        Signature(take)


def test_a_return_annotation_that_cannot_be_resolved_is_named() -> None:
    def take(value: int) -> OnlyForTheChecker:
        raise NotImplementedError

    with pytest.raises(Misconfigured, match=r"take: the annotation of its result.*OnlyForTheC"):
        Signature(take)


def test_a_type_that_json_cannot_carry_is_refused_when_the_job_is_defined() -> None:
    class Opaque: ...

    def take(value: Opaque) -> None: ...

    with pytest.raises(Misconfigured, match="take: value can't be read from JSON"):
        Signature(take)


def test_unannotated_parameters_take_any_json_value() -> None:
    def take(value, other: object = 1): ...  # type: ignore[no-untyped-def]

    assert Signature(take).decode(b'{"value":[1,"a",null]}') == {
        "value": [1, "a", None],
        "other": 1,
    }


def test_extra_named_arguments_are_taken_by_a_function_that_has_room_for_them() -> None:
    def take(first: int, **rest: Any) -> None: ...

    signature = Signature(take)
    assert json.loads(signature.bind((1,), {"b": 2})) == {"first": 1, "b": 2}
    assert signature.decode(b'{"first":1,"b":[2]}') == {"first": 1, "b": [2]}
    assert refusal(take, "x", b=2) == "input.first: expected int, got str"


def test_extra_named_arguments_are_checked_when_annotated() -> None:
    def take(**rest: int) -> None: ...

    assert Signature(take).decode(b'{"a":1}') == {"a": 1}
    assert refusal(take, a="x").endswith("expected int, got str")


def test_star_args_are_refused_when_the_job_is_defined() -> None:
    def take(*values: int) -> None: ...

    with pytest.raises(Misconfigured, match=r"\*values can't be an input"):
        Signature(take)


@pytest.mark.parametrize("name", ["annotated", "called_ctx", "unresolved"])
def test_the_context_is_injected_and_no_part_of_the_input(name: str) -> None:
    def annotated(job: Context, x: int) -> Any:
        return job, x

    def called_ctx(ctx, x):  # type: ignore[no-untyped-def]
        return ctx, x

    def unresolved(ctx: OnlyForTheChecker, x: int) -> Any:
        return ctx, x

    fn: Callable[..., Any] = {
        "annotated": annotated,
        "called_ctx": called_ctx,
        "unresolved": unresolved,
    }[name]
    signature, ctx = Signature(fn), RecordingContext()
    assert signature.names == ("x",)
    assert json.loads(signature.bind((5,), {})) == {"x": 5}
    assert signature.call(fn, signature.decode(b'{"x":5}'), ctx) == (ctx, 5)


def test_a_parameter_called_ctx_of_another_type_is_an_ordinary_one() -> None:
    def take(ctx: str) -> None: ...

    assert Signature(take).names == ("ctx",)


def test_the_context_cannot_be_smuggled_in() -> None:
    def take(ctx: Context, **rest: Any) -> None: ...

    assert refusal(take, ctx=1).startswith("input.ctx: unexpected")


def test_positional_only_parameters_are_passed_by_position() -> None:
    def take(a: int, b: int = 2, /, *, c: int) -> tuple[int, int, int]:
        return a, b, c

    signature = Signature(take)
    decoded = signature.decode(b'{"a":1,"c":3}')
    assert signature.call(take, decoded, RecordingContext()) == (1, 2, 3)


def test_a_mutable_default_is_the_functions_own() -> None:
    def take(items: list[int] = [1, 2]) -> None: ...  # noqa: B006

    assert Signature(take).decode(b"{}") == {"items": [1, 2]}


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=10,
)


@given(json_values)
def test_every_json_value_crosses_unchanged(value: Any) -> None:
    def take(value: Any) -> None: ...

    signature = Signature(take)
    assert signature.decode(signature.encode({"value": value})) == {"value": value}


@given(st.binary(max_size=60))
def test_any_bytes_are_either_arguments_or_a_refusal(payload: bytes) -> None:
    signature = Signature(shout)
    with suppress(InvalidRequest):
        assert set(signature.decode(payload)) == {"text", "times"}


# -- JSON schemas ------------------------------------------------------------------


def test_a_signature_has_json_schemas() -> None:
    def fn(ctx: Context, count: int, tags: list[str] | None = None) -> dict[str, float]:
        raise NotImplementedError

    assert Signature(fn).schemas() == {
        "input": {
            "type": "object",
            "properties": {
                "count": {"type": "integer"},
                "tags": {
                    "anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}],
                    "default": None,
                },
            },
            "required": ["count"],
            "additionalProperties": False,
        },
        "output": {"type": "object", "additionalProperties": {"type": "number"}},
    }


def test_further_arguments_are_in_the_schema() -> None:
    def fn(**more: int): ...

    schemas = Signature(fn).schemas()
    assert schemas["input"]["additionalProperties"] == {"type": "integer"}
    assert "output" not in schemas


def test_a_type_that_contains_itself_keeps_its_definition() -> None:
    def fn(tree: Tree) -> None: ...

    schema = Signature(fn).schemas()["input"]
    assert schema["properties"]["tree"] == {"$ref": "#/$defs/Tree"}
    assert "Tree" in schema["$defs"]
    assert values.json_schema(Tree)["$defs"].keys() == {"Tree"}


def test_a_type_that_only_a_codec_can_read_is_described_by_its_name() -> None:
    def fn(place: Path) -> None: ...

    assert Signature(fn).schemas()["input"]["properties"] == {"place": {"title": "Path"}}


class Tree(msgspec.Struct):
    children: list[Tree] = []
