"""The config of a run as it is typed, and as its schema is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import click
import msgspec
import pytest

from penstock.cli.pipeline import explained, gather
from penstock.core.errors import InvalidRequest
from penstock.workloads.pipeline.run_config import changed_fields, config_fields


class Inner(msgspec.Struct):
    depth: Annotated[int, msgspec.Meta(ge=1, le=9)] = 3


class Config(msgspec.Struct):
    name: str
    sources: list[str] = []
    size: Annotated[int, msgspec.Meta(ge=1, le=50, description="how many")] = 10
    share: Annotated[float, msgspec.Meta(gt=0)] = 0.5
    code: Annotated[str, msgspec.Meta(min_length=2, pattern="^[a-z]+$")] = "ab"
    kind: Literal["a", "b"] = "a"
    maybe: float | None = None
    inner: Inner = msgspec.field(default_factory=Inner)


SCHEMA = msgspec.json.schema(Config)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("5", 5),
        ("[1, 2]", [1, 2]),
        ('"5"', "5"),
        ("null", None),
        ("plain words", "plain words"),
        ("", ""),
        ("http://a/b?c=d", "http://a/b?c=d"),
        ("nan", "nan"),
        ("{", "{"),
    ],
)
def test_a_value_is_json_where_it_can_be_and_text_elsewhere(text: str, value: object) -> None:
    assert gather(None, [("field", text)]) == {"field": value}


def test_pairs_lie_on_top_of_the_file_and_dots_lead_into_objects(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('size = 5\n[inner]\ndepth = 2\nkeep = "me"\n')
    pairs = [("inner.depth", "4"), ("a.b.c", "x"), ("size", "6"), ("size", "7")]
    assert gather(str(file), pairs) == {
        "size": 7,
        "inner": {"depth": 4, "keep": "me"},
        "a": {"b": {"c": "x"}},
    }


def test_json_and_toml_files_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text('{"sources": ["a"]}')
    (tmp_path / "c.toml").write_text('sources = ["a"]')
    assert gather(str(tmp_path / "c.json"), []) == gather(str(tmp_path / "c.toml"), [])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("c.json", "[1]", "expected a JSON object"),
        ("c.json", "{", "not valid JSON"),
        ("c.toml", "size =", "not valid TOML"),
        ("missing/c.json", None, "can't read"),
    ],
)
def test_a_file_that_is_no_config_is_refused(
    tmp_path: Path, name: str, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(click.BadParameter, match=words):
        gather(str(tmp_path / name), [])


@pytest.mark.parametrize("key", ["a.b", "a.b.c", ".", "a.", ".a", "a..b"])
def test_a_key_that_leads_nowhere_is_refused(key: str) -> None:
    with pytest.raises(click.BadParameter):
        gather(None, [("a", "1"), (key, "2")])


@pytest.mark.parametrize("problem", ["Expected `str`, got `int`", "expected string, got integer"])
def test_whoever_meant_text_is_told_how_to_write_it(problem: str) -> None:
    wrong = InvalidRequest("config.name", problem)
    assert explained(wrong, [("name", "5")]).hint.endswith("""--set 'name="5"'""")
    assert explained(wrong, []) is wrong
    other = InvalidRequest("config.size", "Expected `int`, got `str`")
    assert explained(other, [("size", "x")]) is other


def test_fields_are_told_with_type_default_and_bounds() -> None:
    told = [list(msgspec.structs.astuple(field)) for field in config_fields(SCHEMA)]
    assert told == [
        ["name", "string", "", ""],
        ["sources", "array of string", "[]", ""],
        ["size", "integer", "10", "minimum 1, maximum 50; how many"],
        ["share", "number", "0.5", "exclusiveMinimum 0"],
        ["code", "string", '"ab"', "minLength 2, pattern ^[a-z]+$"],
        ["kind", "enum", '"a"', "a, b"],
        ["maybe", "number or null", "null", ""],
        ["inner.depth", "integer", "3", "minimum 1, maximum 9"],
    ]


def test_a_config_type_that_holds_itself_is_told_up_to_a_depth() -> None:
    schema = {
        "$ref": "#/$defs/Node",
        "$defs": {"Node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/Node"}}}},
    }
    (field,) = config_fields(schema)
    assert field.name == "next.next.next.next.next"


def test_only_what_was_said_is_told_of_a_config() -> None:
    config = {**msgspec.to_builtins(Config(name="x", size=11))}
    assert changed_fields(config, SCHEMA).keys() >= {"name", "size"}
    assert not {"sources", "share", "kind", "maybe"} & changed_fields(config, SCHEMA).keys()
    assert changed_fields({"a": [1]}, {}) == {"a": "[1]"}


def test_a_schema_that_refers_to_itself_shows_no_fields() -> None:
    circle = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
    assert list(config_fields(circle)) == []
