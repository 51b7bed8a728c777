"""Fields of a submission: what each may be, and the sentence that says so when it isn't."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from penstock.workloads.container.job import Code
from penstock.workloads.container.protocol.javascript import as_double, as_string

_SURROGATE = re.compile(r"[\ud800-\udfff]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_SIMPLE = re.compile(r"[A-Za-z0-9_-]{1,60}", re.ASCII)


class Unacceptable(Exception):
    """A submission, or the field of one that is named, can't be taken."""

    def __init__(self, code: Code, message: str, field: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.field = field


def refuse(field: str, problem: str) -> NoReturn:
    """It can't be what it is."""
    raise Unacceptable(Code.INVALID_FIELD, f"{field} {problem}", field)


def forbid(field: str, problem: str) -> NoReturn:
    """It makes sense, but this worker does not grant it."""
    raise Unacceptable(Code.NOT_ALLOWED, f"{field} {problem}", field)


def member(field: str, name: str) -> str:
    """The path of a member whose name came from outside."""
    return f"{field}.{name}" if _SIMPLE.fullmatch(name) else f"{field}[{shown(name)}]"


def object_of(field: str, value: Any) -> Mapping[str, Any]:
    """None is taken for absent, here and everywhere."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        refuse(field, f"is {kind_of(value)}; it must be an object")
    return value


def list_of(field: str, value: Any) -> list[Any]:
    if value is None:
        return []
    if not isinstance(value, list):
        refuse(field, f"is {kind_of(value)}; it must be a list")
    return value


def flag_of(field: str, value: Any) -> bool:
    if value is None:
        return False
    if not isinstance(value, bool):
        refuse(field, f"is {kind_of(value)}; it must be true or false")
    return value


def number_of(field: str, value: Any, least: float, most: float) -> float:
    """A finite number from `least` on; more than `most` is what the worker does not grant."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        refuse(field, f"is {kind_of(value)}; it must be a number")
    if not math.isfinite(as_double(value)):
        refuse(field, "is not a finite number")
    if value < least:
        refuse(field, f"is {as_string(value)}; it must be at least {as_string(least)}")
    if value > most:
        forbid(field, f"is {as_string(value)}; this worker allows at most {as_string(most)}")
    return value if isinstance(value, int) else float(value)


def whole_of(field: str, value: Any, least: int, most: int) -> int:
    number = number_of(field, value, least, most)
    if number != int(number):
        refuse(field, f"is {as_string(number)}; it must be a whole number")
    return int(number)


def text_of(field: str, value: Any, *, nul: bool = False, most: int | None = None) -> str:
    """Text that can be handed to a program: whole characters, and no NUL unless it may."""
    if not isinstance(value, str):
        refuse(field, f"is {kind_of(value)}; it must be a string")
    if most is not None and len(value) > most:
        refuse(field, f"is {len(value)} characters long; at most {most} are allowed")
    if _SURROGATE.search(value):
        refuse(field, "has half of a character (a lone surrogate)")
    if "\0" in value and not nul:
        refuse(field, "has a NUL character")
    return value


def line_of(field: str, value: Any, most: int) -> str:
    """Short text on one line."""
    text = text_of(field, value, most=most)
    if _CONTROL.search(text):
        refuse(field, "has a control character")
    return text


def word_of(field: str, value: Any) -> str:
    """Text, or a number or truth value as it is written in JSON."""
    if isinstance(value, str):
        return text_of(field, value)
    if not isinstance(value, int | float):
        refuse(field, f"is {kind_of(value)}; it must be a string")
    if not math.isfinite(as_double(value)):
        refuse(field, "is not a finite number")
    return as_string(value)


def checked(field: str, value: str, check: Callable[[str], str]) -> str:
    """What a check returns; the sentence of its ValueError becomes the refusal."""
    try:
        return check(value)
    except ValueError as error:
        refuse(field, f"({shown(value)}) {error}")


def kind_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "true" if value else "false"
        case str():
            return "a string"
        case int() | float():
            return "a number"
        case list():
            return "a list"
        case _:
            return "an object"


def shown(value: str) -> str:
    return repr(value if len(value) <= 60 else value[:57] + "...")
