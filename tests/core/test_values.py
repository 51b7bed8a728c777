"""Values on their way to JSON and back."""

from __future__ import annotations

import datetime as dt
import enum
import math
import os
import pickle
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import attrs
import msgspec
import pytest

from penstock import values
from penstock.core.errors import InvalidRequest, Misconfigured
from penstock.core.pointer import JSON
from penstock.values import Reader


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Point:
    x: int
    y: float = 0.0


@dataclass
class Circle:
    centre: Point
    radius: float


@attrs.define
class Bag:
    things: set[str]


class Place(NamedTuple):
    name: str
    at: Point


class Box(msgspec.Struct):
    corner: Point
    when: dt.datetime
    colours: list[Colour] = []


class Money:
    """A type that JSON has no form for."""

    def __init__(self, cents: int) -> None:
        self.cents = cents

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Money) and other.cents == self.cents

    __hash__ = None  # type: ignore[assignment]


class Opaque:
    pass


@pytest.fixture
def money() -> Iterator[None]:
    values.register(Money, encode=lambda it: it.cents, decode=Money, form=int)
    yield
    del values._codecs[Money]
    values._found.clear()


def crossed(value: Any, kind: Any) -> Any:
    return Reader(kind).read(*values.encode_result(value))


NOW = dt.datetime(2026, 1, 2, 3, 4, 5, tzinfo=dt.UTC)


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (Point(1, 2.5), Point, '{"x":1,"y":2.5}'),
        (Bag({"a"}), Bag, '{"things":["a"]}'),
        (Place("here", Point(1)), Place, '["here",{"x":1,"y":0.0}]'),
        (NOW, dt.datetime, '"2026-01-02T03:04:05Z"'),
        (NOW.date(), dt.date, '"2026-01-02"'),
        (NOW.timetz(), dt.time, '"03:04:05Z"'),
        (dt.timedelta(minutes=90), dt.timedelta, '"PT5400S"'),
        (Decimal("1.10"), Decimal, '"1.10"'),
        (uuid.UUID(int=7), uuid.UUID, '"00000000-0000-0000-0000-000000000007"'),
        (Colour.RED, Colour, '"red"'),
        ({1}, set[int], "[1]"),
        (frozenset({1}), frozenset[int], "[1]"),
        ((1, "a"), tuple[int, str], '[1,"a"]'),
        (b"\x00\xff", bytes, '"AP8="'),
        (Path("a/b"), Path, '"a/b"'),
        (PurePosixPath("a"), PurePosixPath, '"a"'),
        ({Colour.RED: [NOW]}, dict[Colour, list[dt.datetime]], '{"red":["2026-01-02T03:04:05Z"]}'),
        ({dt.date(2026, 1, 2): 1}, dict[dt.date, int], '{"2026-01-02":1}'),
        ([Path("a"), None], list[Path | None], '["a",null]'),
        (None, Point | None, "null"),
    ],
)
def test_a_value_is_plain_json_and_comes_back_as_its_type(value: Any, kind: Any, text: str) -> None:
    data, media_type = values.encode_result(value)
    assert (data.decode(), media_type) == (text, JSON)
    back = Reader(kind).read(data)
    assert back == value
    assert type(back) is type(value)


def test_values_nest() -> None:
    box = Box(Point(1), NOW, [Colour.RED])
    assert crossed({"a": [box, None]}, dict[str, list[Box | None]]) == {"a": [box, None]}


def test_without_a_type_a_value_is_plain_json() -> None:
    assert values.PLAIN.read(*values.encode_result([Point(1)])) == [{"x": 1, "y": 0.0}]


@pytest.mark.parametrize("kind", [Point | Circle, Circle | Point, list[Point | Circle] | Point])
def test_a_union_of_dataclasses_is_read_as_the_first_member_that_fits(kind: Any) -> None:
    assert crossed(Point(1), kind) == Point(1)
    circle = Circle(Point(1), 2.0)
    assert crossed(circle, Point | Circle) == circle
    assert crossed([circle, None], list[Point | Circle | None]) == [circle, None]


def test_a_union_refuses_what_no_member_fits() -> None:
    with pytest.raises(InvalidRequest, match=r"result\[1\]: expected Point \| Circle"):
        crossed([Point(1), "x"], list[Point | Circle])


def test_a_registered_type_crosses_at_any_depth(money: None) -> None:
    assert crossed({"a": [Money(5)]}, dict[str, list[Money]]) == {"a": [Money(5)]}
    assert crossed(Money(5), Money | int) == Money(5)


def test_a_registered_type_is_checked_by_its_form(money: None) -> None:
    with pytest.raises(
        InvalidRequest, match=r"result\[0\]\[0\]: expected Money: expected int, got"
    ):
        crossed([["x"]], list[list[Money]])


def test_a_registered_type_with_a_media_type_is_stored_as_its_bytes() -> None:
    values.register(
        Money,
        encode=lambda it: str(it.cents).encode(),
        decode=lambda data: Money(int(data)),
        media_type="application/x-money",
    )
    try:
        assert values.encode_result(Money(5)) == (b"5", "application/x-money")
        assert values.PLAIN.read(b"5", "application/x-money") == Money(5)
        assert crossed(Money(5), Money) == Money(5)
        assert values.encode_result([Money(5)]) == (b'["NQ=="]', JSON)
        assert crossed([Money(5)], list[Money]) == [Money(5)]
        with pytest.raises(InvalidRequest, match="result: expected int, got Money"):
            Reader(int).read(b"5", "application/x-money")
        with pytest.raises(
            InvalidRequest, match="result: can't be read as application/x-money: invalid literal"
        ):
            Reader(Money).read(b"x", "application/x-money")
    finally:
        del values._codecs[Money]
        values._found.clear()


def test_bytes_of_an_unknown_media_type_are_bytes() -> None:
    assert values.PLAIN.read(b"\x89PNG", "image/png") == b"\x89PNG"


def test_a_type_that_needs_no_codec_is_not_registered() -> None:
    with pytest.raises(Misconfigured, match="Point has a JSON form already"):
        values.register(Point, encode=str, decode=Point)
    with pytest.raises(Misconfigured, match="is not a class"):
        values.register("Money", encode=str, decode=str)  # type: ignore[arg-type]


def test_an_unknown_type_cannot_be_read() -> None:
    with pytest.raises(TypeError, match=r"Opaque.* is not supported"):
        Reader(list[Opaque])


@dataclass
class Order:
    lines: list[Any] = field(default_factory=list)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Opaque(), "result: can't be stored as JSON: a value of type Opaque is unsupported"),
        ({"a": [1, Opaque()]}, "result.a[1]: can't be stored as JSON: a value of type Opaque"),
        (Order([{"who": Opaque()}]), "result.lines[0].who: can't be stored as JSON"),
        (Box(Point(1), NOW, [Opaque()]), "result.colours[0]: can't be"),  # type: ignore[list-item]
        (Bag({Opaque()}), "result.things[0]: can't be stored"),  # type: ignore[arg-type]
        ({"a": {(1, 2): 3}}, "result.a: can't be stored as JSON: "),
        (["a", "\ud800"], "result[1]: can't be stored as JSON: "),
        ({"a": math.nan}, "result.a: nan can't be stored as JSON"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_path(value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        values.encode(value, "result")
    assert str(caught.value).startswith(message)


def test_what_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidRequest, match=r"result.a.*nested too deeply, or contains itself"):
        values.encode({"a": loop}, "result")


def test_what_an_encoder_raises_is_a_refusal() -> None:
    values.register(Money, encode=lambda it: 1 // 0, decode=Money)  # type: ignore[arg-type, return-value]
    try:
        with pytest.raises(InvalidRequest, match=r"r\[0\]: can't.*Money: integer division"):
            values.encode([Money(1)], "r")
    finally:
        del values._codecs[Money]
        values._found.clear()


# -- packages that users have ---------------------------------------------------------------------


def test_pydantic_models_cross_and_say_what_is_wrong() -> None:
    pydantic = pytest.importorskip("pydantic")

    class Item(pydantic.BaseModel):  # type: ignore[name-defined, misc]
        name: str = pydantic.Field(alias="Name")
        when: dt.datetime
        tags: frozenset[str] = frozenset()

        @pydantic.computed_field  # type: ignore[prop-decorator, untyped-decorator]
        @property
        def loud(self) -> str:
            return str(self.name).upper()

        model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    item = Item(Name="a", when=NOW, tags=frozenset({"x"}))
    assert values.encode(item, "r") == (b'{"Name":"a","when":"2026-01-02T03:04:05Z","tags":["x"]}')
    assert crossed({"a": [item]}, dict[str, list[Item]]) == {"a": [item]}
    assert crossed(item, Item | Point) == item
    wrong = b'[{"Name":"a","when":"yesterday"}]'
    with pytest.raises(
        InvalidRequest, match=r"result\[0\]: expected .*Item: when: Input should be"
    ):
        Reader(list[Item]).read(wrong)


def test_numpy_arrays_and_numbers_cross_without_pickle() -> None:
    np = pytest.importorskip("numpy")
    array = np.arange(6, dtype="float32").reshape(2, 3)
    data, media_type = values.encode_result(array)
    assert media_type == "application/x-npy"
    for reader in (values.PLAIN, Reader(np.ndarray), Reader(np.ndarray | None)):
        back = reader.read(data, media_type)
        assert back.dtype == array.dtype
        assert (back == array).all()
    deep = crossed({"a": [array]}, dict[str, list[np.ndarray]])  # type: ignore[name-defined]
    assert (deep["a"][0] == array).all()
    assert crossed([np.float32(1.5), np.int64(2)], list[float]) == [1.5, 2.0]
    assert isinstance(crossed(np.float64(1.5), np.float64), np.float64)


def test_numpy_objects_are_refused_both_ways() -> None:
    np = pytest.importorskip("numpy")
    with pytest.raises(InvalidRequest, match=r"result\.a: .*allow_pickle=False"):
        values.encode_result({"a": np.array([object()])})
    with pytest.raises(InvalidRequest, match=r"result: .*allow_pickle=False"):
        values.encode_result(np.array([object()]))
    import io

    file = io.BytesIO()
    np.save(file, np.array([Colour.RED], dtype=object), allow_pickle=True)
    for hostile in (file.getvalue(), pickle.dumps(1), b"", b"\x93NUMPY"):
        with pytest.raises(InvalidRequest, match=r"^result: can't be read as"):
            Reader(np.ndarray).read(hostile, values.NPY)
    with pytest.raises(InvalidRequest, match="result: expected ndarray: expected bytes, got array"):
        crossed([1, 2], np.ndarray)


@pytest.mark.parametrize("with_arrow", [True, False])
def test_pandas_frames_cross(with_arrow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pd = pytest.importorskip("pandas")
    if with_arrow:
        pytest.importorskip("pyarrow")
    else:
        monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    values._found.clear()
    try:
        frame = pd.DataFrame({"a": [1, 2], "b": ["x", "y"], "c": [0.5, None]})
        data, media_type = values.encode_result(frame)
        assert media_type == (values.ARROW if with_arrow else JSON)
        assert Reader(pd.DataFrame).read(data, media_type).equals(frame)
        frames = list[pd.DataFrame]  # type: ignore[name-defined]
        assert crossed([frame], frames)[0].equals(frame)
    finally:
        values._found.clear()


def test_equal_inputs_are_equal_in_every_process() -> None:
    script = (
        "from penstock import values\n"
        "names = {f'name {n}' for n in range(50)}\n"
        "print(values.encode_input({'names': names, 'more': [{'b': names, 'a': 1}]}).in_order)\n"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(printed) == 1


def test_a_mapping_keeps_its_order_on_the_way() -> None:
    assert values.encode_input({"b": {"z": 1, "a": 2}, "a": 0}) == b'{"b":{"z":1,"a":2},"a":0}'
