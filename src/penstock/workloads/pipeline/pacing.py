"""A rate limit for calls."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from penstock.ports.clock import Clock
from penstock.ports.executor import CancelToken


async def pause(
    clock: Clock,
    seconds: float | None,
    cancel: CancelToken | None = None,
    wake: asyncio.Future[Any] | None = None,
) -> None:
    """Sleep, or until `wake` is done; None: only until then. `wake` is left as it is.

    Raises `penstock.Cancelled` as soon as the token asks for it, from whichever thread.
    """
    if cancel is not None:
        cancel.raise_if_requested()
    asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    forget = _tell(asked, cancel)
    sleeper = None if seconds is None else asyncio.ensure_future(clock.sleep(seconds))
    try:
        ends = [end for end in (sleeper, asked, wake) if end is not None]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        forget()
        if sleeper is not None and not sleeper.done():
            sleeper.cancel()
            await asyncio.wait((sleeper,))
    if cancel is not None:
        cancel.raise_if_requested()


def release(waiting: Iterable[asyncio.Future[None]]) -> None:
    """Wake all of them that still wait."""
    for future in waiting:
        if not future.done():
            future.set_result(None)


def _tell(asked: asyncio.Future[None], cancel: CancelToken | None) -> Callable[[], None]:
    """Have the token wake the future in its own loop."""
    if cancel is None:
        return lambda: None
    loop = asked.get_loop()

    def hear() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(release, (asked,))

    return cancel.when_requested(hear)


class Pace:
    """Lets callers through one at a time, `1 / rate` seconds apart, in the order they came.

    Unused time is not saved up for a burst. A cancelled waiter leaves no gap.
    """

    def __init__(self, rate: float, clock: Clock) -> None:
        self._gap = 1.0 / rate
        self._clock = clock
        self._next = -float("inf")
        self._line: deque[asyncio.Future[None]] = deque()

    async def turn(self, cancel: CancelToken | None = None) -> None:
        """Wait until it is the caller's turn. Raises `penstock.Cancelled` if asked to end."""
        if cancel is not None:
            cancel.raise_if_requested()
        due = self._due()
        if self._line or due > self._clock.monotonic():
            due = await self._stand_in_line(cancel)
        # From when it was due, not from when a late timer let it go: lateness does not add up.
        self._next = due + self._gap

    async def _stand_in_line(self, cancel: CancelToken | None) -> float:
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._line.append(place)
        try:
            if self._line[0] is not place:
                await pause(self._clock, None, cancel, wake=place)
            due = self._due()
            while (rest := due - self._clock.monotonic()) > _EXACT:
                await pause(self._clock, rest, cancel)
            return due
        finally:
            self._line.remove(place)
            if self._line:
                release((self._line[0],))

    def _due(self) -> float:
        return max(self._next, self._clock.monotonic())


_EXACT = 1e-9
"""Seconds too short to sleep for: what is left by rounding."""
