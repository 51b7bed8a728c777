"""How a stage's function is called: what it takes, and what it says it returns."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from penstock.core.errors import Misconfigured

CTX = "ctx"
"""The parameter by which a function asks for its context."""


class Shape(Struct, frozen=True):
    """A function's parameters, as far as they matter here."""

    takes_input: bool
    takes_ctx: bool
    is_async: bool
    """A coroutine function, or an async generator function."""
    is_generator: bool
    """It yields its outputs, plainly or asynchronously."""
    input_type: Any
    """What its input is converted to; Any leaves it as JSON has it."""
    output_type: Any
    """What it said it returns, or yields; Any is not checked."""
    parameter: str
    """The name of the parameter for the input."""


def shape_of(fn: Callable[..., Any], stage: str) -> Shape:
    """Look at a function once. Raises Misconfigured for one that can't be called as a stage."""
    if not callable(fn):
        raise Misconfigured(f"stage {stage}: {fn!r} can't be called")
    parameters = list(inspect.signature(fn).parameters.values())
    plain = [p for p in parameters if p.name != CTX]
    wanted = [p for p in plain if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    if len(wanted) > 1 or any(p.kind is p.KEYWORD_ONLY for p in wanted):
        raise Misconfigured(
            f"stage {stage}: its function wants {', '.join(p.name for p in wanted)}",
            hint="a stage's function takes one input and, if it likes, ctx",
        )
    try:
        hints = typing.get_type_hints(fn)
    except Exception as error:
        raise Misconfigured(f"stage {stage}: its annotations can't be read: {error}") from error
    given = wanted[0] if wanted else next(iter(plain), None)
    yields = inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn)
    returned = hints.get("return", Any)
    return Shape(
        takes_input=given is not None,
        takes_ctx=any(p.name == CTX for p in parameters),
        is_async=inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn),
        is_generator=yields,
        input_type=hints.get(given.name, Any) if given is not None else Any,
        output_type=_yielded(returned) if yields else returned,
        parameter=given.name if given is not None else "",
    )


def _yielded(annotation: Any) -> Any:
    """T of `Iterator[T]`, `AsyncIterator[T]` or `Generator[T, ...]`."""
    arguments = typing.get_args(annotation)
    return arguments[0] if arguments else Any
