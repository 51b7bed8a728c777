"""The config of a pipeline run: the JSON object that is the input of its job.

`check_fields` checks it against a JSON schema, as far as msgspec writes one for a type. An engine
whose pipelines are served by workers elsewhere knows the config's type only by its schema; the
worker checks the config again, as its type.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from penstock.core.errors import InvalidRequest

MAX_DEPTH = 100
"""Objects and lists within each other. Reading and writing deeper ones may fail."""


def read_config(payload: bytes) -> dict[str, Any]:
    """Decode the input of a run's job; no input is an empty config. Raises InvalidRequest."""
    if not payload:
        return {}
    try:
        config = msgspec.json.decode(payload)
    except RecursionError:
        raise _too_deep() from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InvalidRequest("config", f"is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise InvalidRequest("config", f"expected an object, got {type(config).__name__}")
    check_depth(config)
    return config


def check_depth(config: dict[str, Any]) -> None:
    """Raise InvalidRequest for a config that is nested too deeply to be stored."""
    level: list[Any] = [config]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, dict) else value)
            if isinstance(inner, dict | list | tuple)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> InvalidRequest:
    return InvalidRequest("config", f"is nested more than {MAX_DEPTH} levels deep")


_TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list, tuple),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
}


def check_fields(field: str, value: Mapping[str, Any], schema: Mapping[str, Any]) -> None:
    """Raise InvalidRequest, naming the field, for a config that its type would refuse."""
    resolved = resolved_schema(schema, schema)
    known = resolved.get("properties")
    if known is not None:
        for name in value:
            if name not in known:
                hint = f"there are {', '.join(known)}"
                raise InvalidRequest(f"{field}.{name}", "unknown field", hint=hint)
    _check(field, dict(value), resolved, schema)


def _check(field: str, value: Any, schema: Mapping[str, Any], root: Mapping[str, Any]) -> None:
    schema = resolved_schema(schema, root)
    if "anyOf" in schema:
        _check_any(field, value, schema["anyOf"], root)
        return
    if "enum" in schema and value not in schema["enum"]:
        raise InvalidRequest(field, f"must be one of {', '.join(map(repr, schema['enum']))}")
    kind = schema.get("type")
    if isinstance(kind, str) and not _is(value, kind):
        given = next((one for one in _TYPES if _is(value, one)), type(value).__name__)
        raise InvalidRequest(field, f"expected {kind}, got {given}")
    if isinstance(value, str):
        _check_bounds(field, len(value), schema, "Length", " characters")
        if (pattern := schema.get("pattern")) and re.search(pattern, value) is None:
            raise InvalidRequest(field, f"does not match {pattern}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        _check_bounds(field, value, schema, "imum")
    elif isinstance(value, list | tuple):
        _check_bounds(field, len(value), schema, "Items", " items")
        if isinstance(items := schema.get("items"), Mapping):
            for index, item in enumerate(value):
                _check(f"{field}[{index}]", item, items, root)
    elif isinstance(value, dict):
        for name in schema.get("required", ()):
            if name not in value:
                raise InvalidRequest(f"{field}.{name}", "is missing")
        for name, inner in schema.get("properties", {}).items():
            if name in value:
                _check(f"{field}.{name}", value[name], inner, root)


def _check_any(
    field: str, value: Any, choices: list[Mapping[str, Any]], root: Mapping[str, Any]
) -> None:
    """One of them must fit; if none does, what the first of its kind says is told."""
    problem: InvalidRequest | None = None
    for choice in choices:
        try:
            _check(field, value, choice, root)
        except InvalidRequest as wrong:
            is_kind = _is(value, str(resolved_schema(choice, root).get("type")))
            problem = wrong if problem is None or is_kind else problem
        else:
            return
    if problem is not None:
        raise problem


def _check_bounds(
    field: str, value: float, schema: Mapping[str, Any], of: str, unit: str = ""
) -> None:
    """By the keywords that end in `of`: minLength, maximum, exclusiveMaximum ..."""
    for keyword, fits, words in (
        (f"min{of}", operator.ge, "at least"),
        (f"max{of}", operator.le, "at most"),
        (f"exclusiveMin{of}", operator.gt, "above"),
        (f"exclusiveMax{of}", operator.lt, "below"),
    ):
        limit = schema.get(keyword)
        if limit is not None and not fits(value, limit):
            raise InvalidRequest(field, f"must be {words} {limit}{unit}")


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES.get(kind, (object,)))


def resolved_schema(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a `$ref` into the schema's own definitions stands for."""
    seen = 0
    while (reference := schema.get("$ref")) is not None and seen < 20:
        name = str(reference).rpartition("/")[2]
        schema = root.get("$defs", {}).get(name, {})
        seen += 1
    return schema


# -- a config for people ---------------------------------------------------------

Schema = Mapping[str, Any]
_DEEPEST = 4
"""How deep objects in objects are shown; a type may hold itself."""
_NO_BOUNDS = ("type", "default", "title", "description")


class ConfigField(Struct, frozen=True):
    """One field of a config, in the words of JSON schema; inside an object it is OUTER.INNER."""

    name: str
    type: str
    default: str
    """As JSON; empty if it is required."""
    about: str
    """Its bounds and description."""


def config_fields(
    schema: Schema, whole: Schema | None = None, outer: str = ""
) -> Iterator[ConfigField]:
    whole = schema if whole is None else whole
    for name, given in resolved_schema(schema, whole).get("properties", {}).items():
        field = resolved_schema(given, whole)
        if field.get("properties") and outer.count(".") < _DEEPEST:
            yield from config_fields(field, whole, f"{outer}{name}.")
            continue
        kind, bounds = _type(field, whole)
        about = (bounds, given.get("description") or field.get("description"))
        said = "; ".join(filter(None, about))
        yield ConfigField(f"{outer}{name}", kind, _default(given), said)


def _default(field: Schema) -> str:
    return msgspec.json.encode(field["default"]).decode() if "default" in field else ""


def changed_fields(config: Mapping[str, Any], schema: Schema) -> dict[str, str]:
    """The fields of a config that are not at their defaults, as JSON."""
    known = resolved_schema(schema, schema).get("properties", {})
    return {
        name: msgspec.json.encode(value).decode()
        for name, value in config.items()
        if "default" not in (field := known.get(name, {})) or field["default"] != value
    }


def _type(schema: Schema, whole: Schema) -> tuple[str, str]:
    """A type and its bounds, in the words of JSON schema."""
    schema = resolved_schema(schema, whole)
    if "anyOf" in schema:
        kinds, limits = zip(*(_type(one, whole) for one in schema["anyOf"]), strict=True)
        return " or ".join(dict.fromkeys(kinds)), ", ".join(filter(None, limits))
    if "enum" in schema:
        return "enum", ", ".join(map(str, schema["enum"]))
    kind = schema.get("type", "any")
    bounds = {name: of for name, of in schema.items() if type(of) in (int, float, str)}
    said = [f"{name} {of}" for name, of in bounds.items() if name not in _NO_BOUNDS]
    if kind == "array" and schema.get("items"):
        kind = f"array of {_type(schema['items'], whole)[0]}"
    return kind if isinstance(kind, str) else " or ".join(kind), ", ".join(said)
