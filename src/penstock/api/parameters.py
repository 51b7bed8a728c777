"""A request's query, as a Struct: unknown, repeated and malformed parameters are refused."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl

import msgspec
from msgspec import Struct

from penstock.api.naming import explain, unknown_field
from penstock.core.check import check_finite
from penstock.core.errors import InvalidRequest

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
    """For operations that take none."""
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
    """The parameters that may come several times."""
    hints = get_type_hints(kind)
    return frozenset(
        name
        for name, hint in hints.items()
        if get_origin(hint) is tuple or any(get_origin(arg) is tuple for arg in get_args(hint))
    )
