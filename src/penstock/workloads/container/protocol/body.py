"""The body of a submission, as JSON that can be read in one way only."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from penstock.workloads.container.protocol.fields import shown
from penstock.workloads.container.protocol.javascript import Literal

MAX_DEPTH = 64
_LONGEST = 1000
"""Digits of a number that is read as an integer."""
_BOM = b"\xef\xbb\xbf"


class Unreadable(ValueError):
    """It is no clean JSON; the message says why."""


def read_body(data: bytes) -> Any:
    """Decode it; every number keeps the text it was written with."""
    return _read(data, _strict)


def read_input(data: bytes) -> Any:
    """The same for a value that an engine has accepted: the last of two equal names counts."""
    return _read(data, _lenient)


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
                raise Unreadable(f"the body names {shown(name)} twice in one object")
            seen.add(name)
    return found


def _no_constant(name: str) -> Any:
    raise Unreadable(f"the body is not JSON: {name} is no number that JSON has")


def _whole(text: str) -> float:
    # Python refuses to read very long ones as integers, and does not know -0.
    return Literal(text) if len(text) > _LONGEST or text == "-0" else int(text)


_strict = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_whole, parse_float=Literal
).decode
_lenient = json.JSONDecoder(
    parse_constant=_no_constant, parse_int=_whole, parse_float=Literal
).decode
