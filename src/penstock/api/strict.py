"""JSON that can be read in one way only.

Two readers of a body must not see two different things, so a name that comes twice is
refused, as is what JSON does not have (NaN, a byte order mark, half a character). The first
pass looks for that; the second decodes straight into the wanted type.
"""

from __future__ import annotations

import json
import re
from typing import Any, TypeVar

import msgspec

from penstock.api.naming import explain
from penstock.api.problems import Refused, malformed

T = TypeVar("T")

_BOM = b"\xef\xbb\xbf"
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.S)


class _Twice(ValueError):
    """A name that stands twice in an object."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise _Twice(name)
            seen.add(name)
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


# Numbers are only passed over: what they may be, the type says.
_scan = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=str, parse_float=str
).decode


def read_json(data: bytes, kind: type[T], *, max_depth: int = 64, prefix: str = "") -> T:
    """Decode a body, or raise: 400 for what is no clean JSON, InvalidRequest for a field."""
    scan(data, max_depth)
    try:
        return decoder(kind).decode(data)
    except msgspec.ValidationError as error:
        raise explain(str(error), _plainly(data), kind, prefix) from None
    except msgspec.DecodeError as error:
        raise malformed(f"the body is not JSON that can be read: {error}") from None


_decoders: dict[type, msgspec.json.Decoder[Any]] = {}


def decoder(kind: type[T]) -> msgspec.json.Decoder[T]:
    found = _decoders.get(kind)
    if found is None:
        found = _decoders[kind] = msgspec.json.Decoder(kind)
    return found


def _plainly(data: bytes) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return None


def scan(data: bytes, max_depth: int = 64) -> None:
    """The first pass: refuses what could be understood in two ways."""
    if data.count(b"[") + data.count(b"{") > max_depth:
        _check_depth(data, max_depth)
    if _is_surely_clean(data):
        return
    try:
        _scan(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise malformed(
            f"the body is not UTF-8: byte {error.start} can't be read", hint="send UTF-8"
        ) from None
    except _Twice as error:
        raise Refused(
            400,
            "DUPLICATE_FIELD",
            f"the body names {shown(str(error))} twice in one object",
            hint="name it once",
        ) from None
    except ValueError as error:
        if data.startswith(_BOM):
            raise malformed("the body begins with a byte order mark", hint="leave it out") from None
        raise malformed(f"the body is not JSON: {error}") from None


def _is_surely_clean(data: bytes) -> bool:
    """Whether a quick count shows that no name comes twice; most bodies have no other colons.

    Every name is followed by a colon. If there are as many colons as there are names in what
    was read, then no name was lost to another.
    """
    try:
        value = _read(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return data.count(b":") == _names(value)


_read = msgspec.json.Decoder().decode


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


def _check_depth(data: bytes, most: int) -> None:
    """Brackets in strings don't count."""
    depth = 0
    for token in _TOKENS.finditer(data):
        first = data[token.start()]
        if first in b"[{":
            depth += 1
            if depth > most:
                raise Refused(
                    400, "TOO_DEEP", f"the body is nested deeper than {most}", hint="flatten it"
                )
        elif first in b"]}":
            depth -= 1


def shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
