"""The config of a run, put together from a file and from `--set`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click
import msgspec
from msgspec import Struct

from penstock.cli.parameters import read_object
from penstock.core.errors import InvalidRequest


def gather(file: str | None, pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """What the file says, with each pair on top of it; a later one wins."""
    config = {} if file is None else read_config(file)
    for key, text in pairs:
        _put(config, key, read_value(text))
    return config


def read_value(text: str) -> Any:
    """JSON where it is (true, 5, [1, 2]), else the text itself."""
    try:
        return msgspec.json.decode(text.encode("utf-8", "surrogateescape"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return text


def read_config(path: str) -> dict[str, Any]:
    """A file of JSON, or of TOML if its name ends so."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise click.BadParameter(
            f"can't read {path}: {error.strerror}", param_hint="--config"
        ) from error
    if not path.endswith(".toml"):
        return read_object("--config", data, f"{path}: ")
    try:
        return tomllib.loads(data.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise click.BadParameter(
            f"{path}: not valid TOML: {error}", param_hint="--config"
        ) from error


def _put(config: dict[str, Any], key: str, value: Any) -> None:
    """Set a field; dots lead into objects."""
    *path, last = key.split(".")
    if not all((*path, last)):
        raise click.BadParameter(
            f"{key!r} is not a field; write NAME=VALUE or OUTER.INNER=VALUE", param_hint="--set"
        )
    here = config
    for depth, name in enumerate(path, 1):
        inner = here.setdefault(name, {})
        if not isinstance(inner, dict):
            whole = ".".join(path[:depth])
            raise click.BadParameter(
                f"{key}: {whole} is set already, and not an object", param_hint="--set"
            )
        here = inner
    here[last] = value


def explained(error: InvalidRequest, pairs: Iterable[tuple[str, str]]) -> InvalidRequest:
    """The same error; if a text was read as something else, with how to write it."""
    name = error.field.removeprefix("config.")
    said = dict(pairs).get(name)
    wanted = error.problem.lower().partition(", got")[0]
    if error.hint or said is None or not ("`str`" in wanted or "string" in wanted):
        return error
    return InvalidRequest(
        error.field, error.problem, hint=f"""text that looks like JSON: --set '{name}="{said}"'"""
    )


class Field(Struct, frozen=True):
    """A field of a config, as its JSON schema tells."""

    name: str
    """With dots if it is inside another."""
    kind: str
    default: str
    """As JSON; empty if it has none."""
    bounds: str
    doc: str = ""


def fields_of(schema: Mapping[str, Any]) -> list[Field]:
    return list(_fields(schema, schema, ""))


def changed_fields(config: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a config that are not at their defaults, as JSON."""
    known = _meant(schema, schema).get("properties", {})
    return {
        name: msgspec.json.encode(value).decode()
        for name, value in config.items()
        if "default" not in (field := known.get(name, {})) or field["default"] != value
    }


def _fields(whole: Mapping[str, Any], schema: Mapping[str, Any], outer: str) -> Iterator[Field]:
    schema = _meant(whole, schema)
    for name, given in schema.get("properties", {}).items():
        meant = _meant(whole, given)
        if meant.get("properties") and outer.count(".") < _DEEPEST:
            yield from _fields(whole, meant, f"{outer}{name}.")
        else:
            default = msgspec.json.encode(given["default"]).decode() if "default" in given else ""
            said = given.get("description") or meant.get("description", "")
            yield Field(f"{outer}{name}", _kind(whole, meant), default, _bounds(whole, meant), said)


_DEEPEST = 4
"""How deep objects in objects are shown; a type may hold itself."""


def _meant(whole: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a schema refers to, or is."""
    while "$ref" in schema:
        schema = whole.get("$defs", {}).get(schema["$ref"].rpartition("/")[2], {})
    return schema


def _kind(whole: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    schema = _meant(whole, schema)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(whole, one) for one in schema["anyOf"]))
    if "enum" in schema:
        return "choice"
    kind = schema.get("type", "any")
    if kind == "array" and schema.get("items"):
        return f"list of {_kind(whole, schema['items'])}"
    return " or ".join(kind) if isinstance(kind, list) else _KINDS.get(kind, str(kind))


_KINDS = {"array": "list", "string": "text", "boolean": "true/false", "integer": "whole number"}


def _bounds(whole: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    schema = _meant(whole, schema)
    if "anyOf" in schema:
        return ", ".join(filter(None, (_bounds(whole, one) for one in schema["anyOf"])))
    if "enum" in schema:
        return ", ".join(str(one) for one in schema["enum"])
    said = [
        _between(schema.get("minimum"), schema.get("maximum")),
        *(f"{words} {schema[name]}" for name, words in _LIMITS.items() if name in schema),
    ]
    for noun, least, most in _SIZES:
        if size := _between(schema.get(least), schema.get(most)):
            said.append(f"{size} {noun}")
    if "pattern" in schema:
        said.append(f"matching {schema['pattern']}")
    return ", ".join(filter(None, said))


_LIMITS = {
    "exclusiveMinimum": "above",
    "exclusiveMaximum": "below",
    "multipleOf": "a multiple of",
}
_SIZES = (("characters", "minLength", "maxLength"), ("entries", "minItems", "maxItems"))


def _between(least: Any, most: Any) -> str:
    if least is None and most is None:
        return ""
    if least is None:
        return f"at most {most}"
    return f"at least {least}" if most is None else f"{least} to {most}"
