"""The body of a submission: JSON that can be read in one way only, and written back unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

MAX_DEPTH = 64
_MAX_DIGITS = 1000
"""Of a number; Python refuses to read much longer ones."""
_BOM = b"\xef\xbb\xbf"
_STRING_OR_SPACE = re.compile(rb'("(?:[^"\\]|\\.)*")|[ \t\r\n]+', re.DOTALL)


class Unreadable(ValueError):
    """The body is not clean JSON; the message says why."""


def read_body(data: bytes) -> Any:
    """Decode it. Integers stay integers, whatever their size; a name that stands twice in an object
    is refused."""
    return _read(data, _strict)


def read_input(data: bytes) -> Any:
    """The same for a value that an engine has accepted: the last of two equal names counts."""
    return _read(data, _lenient)


def pointers_in(data: bytes) -> Iterator[str]:
    """Every blob that a job names, in whatever field; none if it can't be read."""
    try:
        stack = [_lenient(data.decode())]
    except (ValueError, RecursionError):
        return
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            if value.startswith("blob:"):
                yield value
        elif isinstance(value, dict | list):
            stack += value.values() if isinstance(value, dict) else value


def compact(data: bytes) -> bytes:
    """A JSON text without the spaces between its parts, and without needless escapes in strings,
    as the protocol's own worker writes it; every number as it was."""
    return _STRING_OR_SPACE.sub(_compacted, data)


def _compacted(found: re.Match[bytes]) -> bytes:
    text = found[1] or b""
    return encode(json.loads(text)) if b"\\" in text else text


def encode(value: Any) -> bytes:
    """A decoded value as compact JSON. Raises ValueError for what JSON does not have."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    try:
        return text.encode()
    except UnicodeEncodeError:  # half of a character, which only an escape can write
        return _HALF.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


_HALF = re.compile("[\ud800-\udfff]")


def _read(data: bytes, decode: Callable[[str], Any]) -> Any:
    if data.startswith(_BOM):
        raise Unreadable("the body begins with a byte order mark")
    try:
        value = decode(data.decode("utf-8"))
    except Unreadable:
        raise
    except UnicodeDecodeError as error:
        raise Unreadable(f"the body is not UTF-8: byte {error.start} can't be read") from None
    except RecursionError:
        raise Unreadable(f"the body is nested deeper than {MAX_DEPTH}") from None
    except ValueError as error:
        raise Unreadable(f"the body is not JSON: {error}") from None
    check_depth(value)
    return value


def check_depth(value: Any, left: int = MAX_DEPTH) -> None:
    """Raise Unreadable for objects and lists within each other beyond what is left."""
    if not isinstance(value, dict | list):
        return
    if not left:
        raise Unreadable(f"the body is nested deeper than {MAX_DEPTH}")
    for inner in value.values() if isinstance(value, dict) else value:
        if isinstance(inner, dict | list):
            check_depth(inner, left - 1)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                raise Unreadable(f"the body names {name[:60]!r} twice in one object")
            seen.add(name)
    return found


def _no_constant(name: str) -> Any:
    raise Unreadable(f"the body is not JSON: {name} is not a number in JSON")


def _whole(text: str) -> float:
    return int(text) if len(text) <= _MAX_DIGITS else float(text)


_strict = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_whole
).decode
_lenient = json.JSONDecoder(parse_constant=_no_constant, parse_int=_whole).decode
