"""Keywords of JSON schemas that llama.cpp's grammars do not enforce."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.workloads.llm.values import ChatRequest, CompletionRequest, LlmRequest

_LOOSE = frozenset(
    {
        "contains",
        "dependentRequired",
        "dependentSchemas",
        "else",
        "if",
        "maxContains",
        "maxProperties",
        "minContains",
        "minProperties",
        "multipleOf",
        "not",
        "patternProperties",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
        "uniqueItems",
    }
)
_RANGES = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_FORMATS = frozenset({"date", "time", "date-time", "uuid", "uuid1", "uuid2", "uuid3", "uuid4"})
_NAMED = ("properties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_INNER = ("items", "additionalProperties")
_MOST = 8
"""Places that are named at most."""


def not_enforced(request: LlmRequest) -> list[str]:
    """Places of the request's schema that an answer may break, as `age.multipleOf`."""
    if not isinstance(request, ChatRequest | CompletionRequest) or request.schema is None:
        return []
    found: list[str] = []
    for place in _loose(request.schema, ""):
        if len(found) == _MOST:
            return [*found, "..."]
        found.append(place)
    return found


def _loose(schema: Any, where: str) -> Iterator[str]:
    """Depth is bounded by what a body may have."""
    if not isinstance(schema, dict):
        return
    for name, value in schema.items():
        if _is_loose(schema, name, value):
            yield f"{where}{name}"
    for group in _NAMED:
        inner = schema.get(group)
        for name, value in inner.items() if isinstance(inner, dict) else ():
            yield from _loose(value, f"{where}{name}.")
    for group in _LISTS:
        several = schema.get(group)
        for value in several if isinstance(several, list) else ():
            yield from _loose(value, where)
    for group in _INNER:
        yield from _loose(schema.get(group), f"{where}{group}.")


def _is_loose(schema: dict[str, Any], name: str, value: Any) -> bool:
    if name in _LOOSE:
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
        and not any(f"\\{letter}" in value for letter in "dDwWsSbB")
    )
