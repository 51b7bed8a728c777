"""Values as JavaScript writes them, with every number as it was given.

The protocol's own worker reads a body with JSON.parse and hands JSON.stringify of it to the
container. The bytes on a container's standard input are the same here: no spaces, keys that
look like an index of an array first and in ascending order, and half a character (a lone
surrogate) written as an escape. Numbers are the exception: JavaScript would make each a double,
which changes long ones, so a number keeps the text that it had in the body.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from json.encoder import encode_basestring as _quoted
from typing import Any, Self

MAX_INDEX = 2**32 - 2
"""The largest name that JavaScript takes for an index."""

_SURROGATE = re.compile(r"[\ud800-\udfff]")
_INDEX = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)


class Literal(float):
    """A number of a JSON text that also knows how it was written there."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> Self:
        made = super().__new__(cls, text)
        made.text = text
        return made


def stringify(value: Any) -> str:
    """A decoded JSON value as compact JSON; ValueError for what JSON does not have.

    It calls itself for every level, so whoever takes a value from outside limits its depth."""
    parts: list[str] = []
    _write(value, parts.append)
    return "".join(parts)


def as_string(value: str | float | bool) -> str:
    """A plain value as text: what a variable or a part of a command becomes."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return _number(value)


def as_double(value: float) -> float:
    """The double nearest to a number; infinite where it is too large."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _write(value: Any, put: Callable[[str], None]) -> None:
    if isinstance(value, str):
        put(_string(value))
    elif value is None:
        put("null")
    elif isinstance(value, bool):
        put("true" if value else "false")
    elif isinstance(value, int | float):
        put(_number(value))
    elif isinstance(value, dict):
        _write_object(value, put)
    elif isinstance(value, list):
        put("[")
        for count, item in enumerate(value):
            if count:
                put(",")
            _write(item, put)
        put("]")
    else:
        raise ValueError(f"{type(value).__name__} is not JSON")


def _write_object(value: dict[Any, Any], put: Callable[[str], None]) -> None:
    put("{")
    for count, key in enumerate(_in_order(value)):
        put(("," if count else "") + _string(key) + ":")
        _write(value[key], put)
    put("}")


def _in_order(keys: Iterable[Any]) -> list[str]:
    indices: list[str] = []
    others: list[str] = []
    for key in keys:
        if not isinstance(key, str):
            raise ValueError(f"a key that is {type(key).__name__} is not JSON")
        (indices if _is_index(key) else others).append(key)
    return sorted(indices, key=int) + others


def _is_index(key: str) -> bool:
    return _INDEX.fullmatch(key) is not None and int(key) <= MAX_INDEX


def _string(text: str) -> str:
    written = _quoted(text)
    if written.isascii() or _SURROGATE.search(written) is None:
        return written
    # Two halves that stand side by side are one character to JavaScript.
    whole = written.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")
    return _SURROGATE.sub(lambda half: f"\\u{ord(half[0]):04x}", whole)


def _number(value: float) -> str:
    if isinstance(value, Literal):
        return value.text
    if not isinstance(value, int) and not math.isfinite(value):
        raise ValueError(f"{value} is not JSON")
    return repr(value)
