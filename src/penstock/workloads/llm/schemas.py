"""What of a JSON schema an answer of llama.cpp is held to: by its own grammars, by llguidance, or
not at all."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

_UNHELD = frozenset(
    {
        "contains",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "minContains",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
_GUIDED = frozenset({"maxProperties", "minProperties", "multipleOf", "patternProperties"})
"""Keywords that llguidance knows, and llama.cpp's grammars don't."""
_RANGES = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_FORMATS = frozenset({"date", "time", "date-time", "uuid", "uuid1", "uuid2", "uuid3", "uuid4"})
_GUIDED_FORMATS = frozenset({"duration", "email", "hostname", "ipv4", "ipv6", "uri"})
_UNREADABLE = re.compile(r"\\[1-9bB]|\(\?(?!:)")
"""Of a pattern: references back and looks around, which fail the whole schema in llguidance."""
_CLASSES = re.compile(r"\\[dDwWsS]")
_NAMED = ("properties", "$defs", "definitions", "patternProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_INNER = ("items", "additionalProperties")
_MOST = 8
"""Places that are named at most."""
_OPTIONS = {
    "lenient": True,
    "coerce_one_of": True,
    # With free spaces, a small model may write nothing else.
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
_encode = msgspec.json.Encoder().encode


class Hold(Struct, frozen=True):
    """How an answer is held to a schema."""

    guided: bool = False
    """Whether by llguidance, which holds more; llama.cpp's own grammars are read faster, and let
    the models think first that do."""
    loose: tuple[str, ...] = ()
    """Places of the schema that an answer may break, as `age.not`."""


def hold_of(schema: dict[str, Any]) -> Hold:
    guided: list[str] = []
    loose: list[str] = []
    readable = True
    for place, name, value in _places(schema, ""):
        if name == "pattern" and (not isinstance(value, str) or _UNREADABLE.search(value)):
            readable = False
            loose.append(place)
        elif name in _UNHELD or (name == "format" and value not in _GUIDED_FORMATS):
            loose.append(place)
        else:
            guided.append(place)
    if not readable:
        loose += guided
    named = (*loose[:_MOST], "...") if len(loose) > _MOST else tuple(loose)
    return Hold(bool(guided) and readable, named)


def not_enforced(request: Any) -> str:
    """What an answer may break of the request's schema and of its tools' parameters, for people;
    empty if nothing."""
    schema = getattr(request, "schema", None)
    loose = [] if schema is None else [*hold_of(schema).loose]
    if getattr(request, "tool_choice", None) != "none":
        for tool in getattr(request, "tools", ()):
            function = tool.get("function") or {}
            places = hold_of(function.get("parameters") or {}).loose
            loose += [f"{function.get('name')}.{place}" for place in places]
    return f"not enforced by the schema's grammar: {', '.join(loose)}" if loose else ""


def guided_grammar(schema: dict[str, Any]) -> str:
    """The schema as a grammar of llguidance. Keywords that it does not know are ignored."""
    return "%llguidance {}\nstart: %json " + _encode({**schema, "x-guidance": _OPTIONS}).decode()


def _places(schema: Any, where: str) -> Iterator[tuple[str, str, Any]]:
    """Keywords that llama.cpp's grammars don't enforce. Depth is bounded by what a body may
    have."""
    if not isinstance(schema, dict):
        return
    for name, value in schema.items():
        if _is_loose(schema, name, value):
            yield f"{where}{name}", name, value
    for group in _NAMED:
        inner = schema.get(group)
        for name, value in inner.items() if isinstance(inner, dict) else ():
            yield from _places(value, f"{where}{name}.")
    for group in _LISTS:
        several = schema.get(group)
        for value in several if isinstance(several, list) else ():
            yield from _places(value, where)
    for group in _INNER:
        yield from _places(schema.get(group), f"{where}{group}.")


def _is_loose(schema: dict[str, Any], name: str, value: Any) -> bool:
    if name in _UNHELD or name in _GUIDED:
        return value is not False
    if name in _RANGES:
        return schema.get("type") != "integer"
    if name == "format":
        return isinstance(value, str) and value not in _FORMATS
    if name == "pattern":
        return not _is_held_pattern(value)
    return False


def _is_held_pattern(value: Any) -> bool:
    """Anchored, and without classes such as `\\d`, which its converter does not know."""
    if not isinstance(value, str):
        return False
    return (
        value.startswith("^")
        and value.endswith("$")
        and not _CLASSES.search(value)
        and not _UNREADABLE.search(value)
    )
