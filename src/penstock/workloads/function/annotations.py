"""What a function's annotations mean, also when they are strings.

With `from __future__ import annotations` a function carries the text of its types. The
names in it may live in its module, in what it closes over, or, when it was defined
inside another function, in the frames that are running its decorator right now.
"""

from __future__ import annotations

import inspect
import sys
import typing
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

UNRESOLVED: Any = object()
"""The meaning of an annotation whose names can't be found."""


class Annotations:
    """The annotations of one function, read while it is being decorated."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        plain = inspect.unwrap(fn)
        self._globals: dict[str, Any] = getattr(plain, "__globals__", {})
        self._locals = _surrounding(plain, self._globals)

    def meaning(self, annotation: Any) -> Any:
        """The type that an annotation names: Any for none, UNRESOLVED for unknown names."""
        if annotation is inspect.Parameter.empty or annotation is object:
            return Any
        holder = SimpleNamespace(__annotations__={"it": annotation})
        try:
            hints = typing.get_type_hints(holder, self._globals, self._locals, include_extras=True)
        except (NameError, AttributeError, SyntaxError, TypeError):
            return UNRESOLVED
        return Any if hints["it"] is object else hints["it"]


def _surrounding(fn: Any, module: dict[str, Any]) -> dict[str, Any]:
    """The local names in sight where `fn` is defined, the innermost winning."""
    qualname = getattr(fn, "__qualname__", "")
    found: list[dict[str, Any]] = [_closure(fn)]
    frame: FrameType | None = sys._getframe(2) if "<locals>" in qualname else None
    while frame is not None:
        scope = frame.f_code.co_qualname + ".<locals>."
        if frame.f_globals is module and qualname.startswith(scope):
            found.append(frame.f_locals)
        frame = frame.f_back
    return {name: value for scope in reversed(found) for name, value in scope.items()}


def _closure(fn: Any) -> dict[str, Any]:
    try:
        return dict(inspect.getclosurevars(fn).nonlocals)
    except (TypeError, ValueError):
        return {}
