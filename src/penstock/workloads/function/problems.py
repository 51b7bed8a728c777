"""What is wrong with an input, in words that name the argument.

Translates msgspec's complaints (``Expected `str`, got `int` - at `$.text` ``) into
`InvalidRequest` (``input.text: expected str, got int``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.core.check import check_finite
from penstock.core.errors import InvalidRequest

INPUT = "input"

_PLACE = re.compile(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<name>.*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>.*)`")

JSON_TROUBLE = (TypeError, ValueError, OverflowError, RecursionError)
"""What msgspec raises for a value that JSON can't say, or text that is not JSON."""


def unreadable(problem: Exception, names: tuple[str, ...]) -> InvalidRequest:
    """The refusal of a payload that did not decode; `names` are the arguments there are."""
    if not isinstance(problem, msgspec.ValidationError):
        why = "nested too deeply" if isinstance(problem, RecursionError) else str(problem)
        return InvalidRequest(INPUT, f"is not a JSON object of arguments: {why}")
    place = _PLACE.fullmatch(str(problem))
    what, path = (place["what"], place["path"] or "") if place else (str(problem), "")
    if missing := _MISSING.fullmatch(what):
        return InvalidRequest(f"{INPUT}{path}.{missing['name']}", "is missing")
    if unknown := _UNKNOWN.fullmatch(what):
        return unexpected(unknown["name"], names if not path else (), path)
    what = what.replace("`", "")
    if place and place["key"]:
        what = f"in a key, {what[:1].lower()}{what[1:]}"
    return InvalidRequest(INPUT + path, what[:1].lower() + what[1:])


def unexpected(name: str, names: tuple[str, ...], path: str = "") -> InvalidRequest:
    """The refusal of an argument that the function does not have."""
    return InvalidRequest(f"{INPUT}{path}.{name}", "unexpected", hint=nearest(name, names))


def nearest(name: str, names: tuple[str, ...]) -> str:
    """A hint at what a misspelt name may have meant."""
    from difflib import get_close_matches  # rarely needed, and slow to import

    if close := get_close_matches(name, names, n=1):
        return f"did you mean {close[0]}?"
    return f"there are: {', '.join(names)}" if names else ""


def unstorable(arguments: Mapping[str, Any], problem: Exception) -> InvalidRequest:
    """The refusal of arguments that did not encode, naming the one that is to blame."""
    for name, value in arguments.items():
        try:
            msgspec.json.encode({name: value})
        except JSON_TROUBLE as own:
            return InvalidRequest(f"{INPUT}.{name}", f"can't be stored as JSON: {why_not(own)}")
    return InvalidRequest(INPUT, f"can't be stored as JSON: {why_not(problem)}")


def why_not(problem: Exception) -> str:
    if isinstance(problem, RecursionError):
        return "it is nested too deeply, or contains itself"
    return str(problem).replace("Encoding objects of type", "a value of type")


def check_numbers(field: str, value: Any, encoded: bytes) -> None:
    """Refuse NaN and infinity. msgspec writes them as null, so most need no look."""
    if b"null" in encoded and value is not None:
        check_finite(field, msgspec.to_builtins(value))
