"""Bodies and queries, decoded and checked.

Two readers of a body must not see two different things, so a name that comes twice is
refused, as is what JSON does not have (NaN, a byte order mark, half a character). The first
pass looks for that; the second decodes straight into the wanted type.

Every pass takes time in proportion to the body, and the first one builds nothing of a large
body: 8 MiB of brackets as Python objects are 300 MB, and seconds of garbage collection.
"""

from __future__ import annotations

import re
from functools import cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct

from penstock.api.problems import Refused, malformed
from penstock.core.check import check_finite
from penstock.core.errors import InvalidRequest, did_you_mean

T = TypeVar("T")

INLINE = 64 << 10
"""Bytes up to which a body is decoded in the event loop; a larger one in a thread."""
_MOST_CONTAINERS = 250_000
"""Arrays and objects that one body may become: the decoder holds the GIL while it makes them."""

_BOM = b"\xef\xbb\xbf"
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)'
"""Without its end, it reaches to the end of the body: no place is tried as a start twice."""
_TOKENS = re.compile(
    rb'(?:[^"\[\]{}]++|' + _STRING + rb"(?!\s*+:)){0,500}+([\[{\]}]|" + _STRING + rb"\s*+:|)", re.S
)
"""What neither nests nor is a name is skipped, at most 500 values at a time: the GIL is held."""

_PLACE = re.compile(r"\(byte (\d+)\)$")
_CONSTANT = re.compile(rb"NaN|Infinity")


def read_json(
    data: bytes,
    kind: type[T],
    *,
    max_depth: int = 64,
    prefix: str = "",
    parsed_depth: int | None = None,
) -> T:
    """Decode a body, or raise: 400 for what is no clean JSON, InvalidRequest for a field.

    Values deeper than `parsed_depth` stay bytes (`msgspec.Raw`), so there may be any number.
    """
    scan(data, max_depth, parsed_depth)
    try:
        return decoder(kind).decode(data)
    except msgspec.ValidationError as error:
        _check_syntax(data)
        raise explain(str(error), _plainly(data), kind, prefix) from None
    except msgspec.DecodeError as error:
        raise _not_json(data, error) from None


_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    found = _decoders.get(kind)
    if found is None:
        found = _decoders[kind] = msgspec.json.Decoder(kind)
    return found


def _plainly(data: bytes) -> Any:
    """The body as plain values, to name a field by; not of a large one."""
    try:
        return _read(data) if len(data) <= INLINE else None
    except msgspec.DecodeError:
        return None


_read = msgspec.json.Decoder().decode
_skim = msgspec.json.Decoder(msgspec.Raw).decode


def _check_syntax(data: bytes) -> None:
    """A field can be wrong in what is not even JSON further on; that comes first."""
    try:
        _skim(data)
    except msgspec.DecodeError as error:
        raise _not_json(data, error) from None


def _not_json(data: bytes, error: Exception) -> Refused:
    if data.startswith(_BOM):
        return malformed("the body begins with a byte order mark", hint="leave it out")
    place = _PLACE.search(str(error))
    if place and (constant := _CONSTANT.match(data, int(place[1]))):
        return malformed(f"the body is not JSON: {constant[0].decode()} is not JSON")
    return malformed(f"the body is not JSON: {error}")


def scan(data: bytes, max_depth: int = 64, parsed_depth: int | None = None) -> None:
    """First pass: refuse ambiguous or too deeply nested JSON."""
    try:
        if not data.isascii():
            data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise malformed(
            f"the body is not UTF-8: byte {error.start} can't be read", hint="send UTF-8"
        ) from None
    if not (len(data) <= INLINE and _is_surely_clean(data, max_depth)):
        _walk(data, max_depth, max_depth if parsed_depth is None else parsed_depth)


def _is_surely_clean(data: bytes, max_depth: int) -> bool:
    """Whether a quick count shows that no name comes twice; most bodies have no other colons.

    Every name is followed by a colon. If there are as many colons as there are names in what
    was read, then no name was lost to another.
    """
    if data.count(b"[") + data.count(b"{") > max_depth:
        return False
    try:
        value = _read(data)
    except msgspec.DecodeError:
        return False
    return data.count(b":") == _names(value)


def _names(value: Any) -> int:
    """Number of keys in all nested objects."""
    count, ahead = 0, [value]
    for one in ahead:  # which grows meanwhile
        kind = type(one)
        if kind is dict:
            count += len(one)
            ahead.extend(one.values())
        elif kind is list:
            ahead.extend(one)
    return count


def _walk(data: bytes, max_depth: int, parsed_depth: int) -> None:
    """Check nesting and duplicate keys. Invalid JSON is left to the decoder."""
    names: set[bytes] | None = None
    outer: list[set[bytes] | None] = []
    containers = 0
    for found in _TOKENS.finditer(data):
        token = found[1]
        if token in (b"[", b"{"):
            outer.append(names)
            names = set() if token == b"{" else None
            if len(outer) > max_depth:
                raise Refused(
                    400,
                    "TOO_DEEP",
                    f"the body is nested deeper than {max_depth}",
                    hint="flatten it",
                )
            containers += len(outer) <= parsed_depth
            if containers > _MOST_CONTAINERS:
                raise Refused(
                    400,
                    "TOO_MANY_VALUES",
                    f"the body has more than {_MOST_CONTAINERS:,} arrays and objects",
                    hint="send large inputs to /v1/blobs and pass the pointer",
                )
        elif token in (b"]", b"}"):
            if not outer:
                return
            names = outer.pop()
        elif token:
            if names is None:
                return
            name = _name(token)
            if name in names:
                raise Refused(
                    400,
                    "DUPLICATE_FIELD",
                    f"the body names {shown(name.decode())} twice in one object",
                    hint="name it once",
                )
            names.add(name)


def _name(token: bytes) -> bytes:
    """An object key, unescaped, from its JSON string and colon."""
    text = token[:-1].rstrip()
    if b"\\" not in text:
        return text[1:-1]
    try:
        return msgspec.json.decode(text, type=str).encode()
    except msgspec.DecodeError:
        return text


def shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


_AT = re.compile(
    r"(?P<what>.*?)(?: - at `(?P<path>\$(?:\.[^.\[`]{1,100}|\[(?:\d{1,9}|\.{3})\]){0,1000})`)?",
    re.S,
)
"""A decoder's message. An unknown field's name is part of it, and may look like a path."""
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`?", re.S)
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
    return InvalidRequest(where[:200], "unknown field", hint=did_you_mean(name[:100], known))


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
    """The Struct or container type of a union, without None."""
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
    """msgspec's message, without its markup."""
    said = what.replace("`", "")
    return said[0].lower() + said[1:]


S = TypeVar("S", bound=Struct)

_MOST = 200


def read_query(text: bytes, kind: type[S], *, pass_over: bool = False) -> S:
    """Raises InvalidRequest, naming the parameter; `pass_over` those that are not known."""
    if not text:
        return kind()
    given = _given(text, kind, pass_over)
    try:
        query = msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise explain(str(error), given, kind) from None
    for name, value in given.items():
        check_finite(name, getattr(query, name))
        if isinstance(value, str) and "\x00" in value:
            raise InvalidRequest(name, "has a control character")
    return query


def refuse_query(text: bytes) -> None:
    """Refuse query parameters of operations that take none."""
    for name, _ in _pairs(text):
        raise unknown_field(name, name, [])


def _given(text: bytes, kind: type[Struct], pass_over: bool) -> dict[str, Any]:
    given: dict[str, Any] = {}
    lists = _lists(kind)
    for name, value in _pairs(text):
        if name not in kind.__struct_fields__:
            if pass_over:
                continue
            raise unknown_field(name, name, list(kind.__struct_fields__))
        if name in lists:
            given.setdefault(name, []).append(value)
        elif name in given:
            raise InvalidRequest(name, "is given twice", hint="give it once")
        else:
            given[name] = value
    return given


def _pairs(text: bytes) -> list[tuple[str, str]]:
    try:
        return parse_qsl(
            text.decode("ascii"),
            keep_blank_values=True,
            strict_parsing=False,
            errors="strict",
            max_num_fields=_MOST,
        )
    except UnicodeDecodeError:
        raise InvalidRequest("query", "is not UTF-8, escaped as %XX") from None
    except ValueError:
        raise InvalidRequest("query", f"has more than {_MOST} parameters") from None


@cache
def _lists(kind: type[Struct]) -> frozenset[str]:
    """Parameters that may be repeated."""
    hints = get_type_hints(kind)
    return frozenset(
        name
        for name, hint in hints.items()
        if get_origin(hint) is tuple or any(get_origin(arg) is tuple for arg in get_args(hint))
    )
