"""Which field of a body or query is wrong, in words, with the name that was probably meant."""

from __future__ import annotations

import re
from difflib import get_close_matches
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from msgspec import Struct

from penstock.core.errors import InvalidRequest

_AT = re.compile(r"(?P<what>.*?)(?: - at `(?P<path>.*)`)?", re.S)
_UNKNOWN = re.compile(r"Object contains unknown field `(.*)`", re.S)
_MISSING = re.compile(r"Object missing required field `(.*)`")
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_WRONG = re.compile(r"got `(\w+)`")
_KINDS: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


def explain(message: str, parsed: Any, kind: type, prefix: str = "") -> InvalidRequest:
    """The error that a decoder's message stands for, naming the field."""
    found = _AT.fullmatch(message)
    assert found is not None
    what, path = found["what"], found["path"] or "$"
    place = _place(path, parsed, what)
    if unknown := _UNKNOWN.fullmatch(what):
        return unknown_field(
            _join(prefix, place, unknown[1]), unknown[1], fields_of(type_at(kind, path))
        )
    if missing := _MISSING.fullmatch(what):
        return InvalidRequest(_join(prefix, place, missing[1]), "is missing", hint="it is required")
    return InvalidRequest(_join(prefix, place) or "body", _plain(what))


def unknown_field(where: str, name: str, known: list[str]) -> InvalidRequest:
    near = get_close_matches(name, known, 1)
    hint = f"did you mean {near[0]}?" if near else f"known are: {', '.join(known) or 'none'}"
    return InvalidRequest(where[:200], "there is no such field", hint=hint)


def fields_of(kind: Any) -> list[str]:
    known = isinstance(kind, type) and issubclass(kind, Struct)
    return list(kind.__struct_encode_fields__) if known else []


def type_at(kind: Any, path: str) -> Any:
    """The type that a path, as `$.jobs[3].retry`, leads to; None where it can't be told."""
    kind = _bare(kind)
    for name, index in _STEP.findall(path):
        if index:
            inner = [arg for arg in get_args(kind) if arg is not ...]
            kind = _bare(inner[-1]) if inner else None
        elif fields_of(kind):
            kind = _bare(get_type_hints(kind).get(name))
        else:
            return None
    return kind


def _bare(kind: Any) -> Any:
    """Without its None or its other outs: the Struct or container of a union."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    inner = [arg for arg in get_args(kind) if fields_of(arg) or get_origin(arg) is not None]
    return inner[0] if inner else None


def _place(path: str, parsed: Any, what: str) -> str:
    """The path with the keys that the decoder leaves out."""
    place = ""
    for name, index in _STEP.findall(path):
        if name:
            place, parsed = _join(place, name), _into(parsed, name)
        elif index == "...":
            name = _culprit(parsed, what)
            place, parsed = _join(place, name), _into(parsed, name)
        else:
            place, parsed = f"{place}[{index}]", _into(parsed, int(index))
    return place


def _into(parsed: Any, key: str | int) -> Any:
    try:
        return parsed[key]
    except (KeyError, IndexError, TypeError):
        return None


def _culprit(parsed: Any, what: str) -> str:
    """The key of a mapping whose value is what the decoder complains of."""
    wrong = _WRONG.search(what)
    kind = _KINDS.get(wrong[1]) if wrong else None
    if isinstance(parsed, dict):
        for name, value in parsed.items():
            if kind is not None and isinstance(value, kind):
                return str(name)[:100]
        if len(parsed) == 1:
            return str(next(iter(parsed)))[:100]
    return "*"


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _plain(what: str) -> str:
    """msgspec's words, without its signs."""
    said = what.replace("`", "")
    return said[0].lower() + said[1:]
