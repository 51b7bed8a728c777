"""What is said of the fields of a Struct: the docstring below each."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from functools import cache
from textwrap import dedent
from typing import Any, get_args, get_type_hints

from msgspec import Struct


@cache
def sentences(kind: type[Struct]) -> dict[str, str]:
    """By field, inherited ones included; none where the source is not at hand."""
    found: dict[str, str] = {}
    for ancestor in reversed(kind.__mro__):
        if issubclass(ancestor, Struct) and ancestor is not Struct:
            found |= _own(ancestor)
    return found


def _own(kind: type) -> dict[str, str]:
    try:
        body = ast.parse(dedent(inspect.getsource(kind))).body[0]
    except (OSError, TypeError, SyntaxError):
        return {}
    assert isinstance(body, ast.ClassDef)
    found = {}
    for item, after in zip(body.body, body.body[1:], strict=False):
        match item, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split())
    return found


def structs_in(kinds: Iterable[Any]) -> dict[str, type[Struct]]:
    """Every Struct that these types are made of, by name."""
    found: dict[str, type[Struct]] = {}
    ahead = list(kinds)
    while ahead:
        kind = ahead.pop()
        ahead.extend(get_args(kind))
        if isinstance(kind, type) and issubclass(kind, Struct) and kind.__name__ not in found:
            found[kind.__name__] = kind
            ahead.extend(get_type_hints(kind).values())
    return found
