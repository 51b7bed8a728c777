"""Wait for what another process, thread or task does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = 50.0
"""Seconds: less than a test's own time limit, and enough on a machine with other work."""


def eventually(claim: Callable[[], T], what: str = "", within: float = PATIENCE) -> T:
    """Return the claim's value as soon as it is true; fail, naming `what`, if it never is."""
    end = time.monotonic() + within
    while not (value := claim()):
        assert time.monotonic() < end, _never(what, within)
        time.sleep(0.01)
    return value


async def soon(claim: Callable[[], T], what: str = "", within: float = PATIENCE) -> T:
    """`eventually` for the event loop: other tasks run meanwhile."""
    end = time.monotonic() + within
    while not (value := claim()):
        assert time.monotonic() < end, _never(what, within)
        await asyncio.sleep(0.002)
    return value


def _never(what: str, within: float) -> str:
    return f"not within {within:g} s: {what or 'what the test waits for'}"
