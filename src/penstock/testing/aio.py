"""Async tests without a plug-in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def run_async(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Turn an async test into a plain one that runs in an event loop of its own.

    Fixtures and parameters are passed through; below `@given` every example gets a new
    loop. Tasks that the test leaves behind are cancelled when it ends.
    """

    @wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        return asyncio.run(test(*args, **kwargs))

    return run
