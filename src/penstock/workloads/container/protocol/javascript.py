"""Values as JavaScript writes them.

The protocol's own worker reads a body with JSON.parse and hands JSON.stringify of it to the
container, so the bytes on a container's standard input are JavaScript's: no spaces, keys that
look like an index of an array first and in ascending order, every number a double, and half a
character (a lone surrogate) written as an escape.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from json.encoder import encode_basestring as _quoted
from typing import Any

MAX_INDEX = 2**32 - 2
"""The largest name that JavaScript takes for an index."""
MAX_EXACT = 2**53
"""Whole numbers up to here are doubles as they are."""

_SURROGATE = re.compile(r"[\ud800-\udfff]")
_INDEX = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)


def stringify(value: Any) -> str:
    """JSON.stringify of a decoded JSON value; ValueError for what JSON does not have.

    It calls itself for every level, so whoever takes a value from outside limits its depth."""
    parts: list[str] = []
    _write(value, parts.append)
    return "".join(parts)


def as_string(value: str | float | bool) -> str:
    """String(value)."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return _number(value)


def as_double(value: float) -> float:
    """The double that a number is in JavaScript; too large a one is infinite."""
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
        put(_number(value) if math.isfinite(as_double(value)) else "null")
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
    if isinstance(value, int) and -MAX_EXACT <= value <= MAX_EXACT:
        return str(value)
    double = as_double(value)
    if not math.isfinite(double):
        return "NaN" if math.isnan(double) else ("Infinity" if double > 0 else "-Infinity")
    if double == 0:
        return "0"
    return ("-" if double < 0 else "") + _positive(abs(double))


def _positive(double: float) -> str:
    """Number::toString of ECMA-262. Python's repr has the same digits, and writes them in the
    same way from 0.0001 to 1e16."""
    written = repr(double)
    mantissa, is_power, exponent = written.partition("e")
    if not is_power:
        return written.removesuffix(".0")
    digits, power = mantissa.replace(".", ""), int(exponent)
    if 0 < power < 21:
        return digits.ljust(power + 1, "0")
    if -7 < power < 0:
        return "0." + "0" * (-power - 1) + digits
    return f"{mantissa}e{power:+d}"
