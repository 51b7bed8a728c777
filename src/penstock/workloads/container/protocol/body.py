"""The body of a submission, as JSON that can be read in one way only."""

from __future__ import annotations

import json
from typing import Any

from penstock.workloads.container.protocol.fields import shown

MAX_DEPTH = 64
_BOM = b"\xef\xbb\xbf"


class Unreadable(ValueError):
    """It is no clean JSON; the message says why."""


def read_body(data: bytes) -> Any:
    """Decode it, with every number a double as far as JavaScript could tell."""
    if data.startswith(_BOM):
        raise Unreadable("the body begins with a byte order mark")
    try:
        value = _decode(data.decode("utf-8"))
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
    # Short ones are exact, and Python refuses to read very long ones as integers.
    return int(text) if len(text) <= 15 else float(text)


_decode = json.JSONDecoder(
    object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_whole
).decode
