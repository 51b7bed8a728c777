"""JSON that can be read in one way only.

Two readers of a body must not see two different things, so a name that comes twice is
refused, as is what JSON does not have (NaN, a byte order mark, half a character). The first
pass looks for that; the second decodes straight into the wanted type.

Every pass takes time in proportion to the body, and the first one builds nothing of a large
body: 8 MiB of brackets as Python objects are 300 MB, and seconds of garbage collection.
"""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from penstock.api.naming import explain
from penstock.api.problems import Refused, malformed

T = TypeVar("T")

INLINE = 64 << 10
"""Bytes. A larger body is to be read in a thread: it may take seconds."""
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
    """The first pass: refuses what could be understood in two ways, or is too deep."""
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
    """How many names the objects within have."""
    kind = type(value)
    if kind is dict:
        count, inner = len(value), value.values()
    elif kind is list:
        count, inner = 0, value
    else:
        return 0
    for one in inner:
        kind = type(one)
        if kind is dict or kind is list:
            count += _names(one)
    return count


def _walk(data: bytes, max_depth: int, parsed_depth: int) -> None:
    """Follow brackets and names. What is no JSON is left to the decoder, once it is met."""
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
    """A name as it is meant, of a string and its colon: without escapes."""
    text = token[:-1].rstrip()
    if b"\\" not in text:
        return text[1:-1]
    try:
        return msgspec.json.decode(text, type=str).encode()
    except msgspec.DecodeError:
        return text


def shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
