"""Time, handed in, so that tests own it."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Protocol


class Clock(Protocol):
    recheck: float = 1.0
    """Seconds after which a waiter should look at the clock again: it may be set,
    it goes on while the computer sleeps, and it need not be the event loop's."""

    def now(self) -> float:
        """Wall-clock seconds since the epoch, UTC: for records and for callers' times."""

    def monotonic(self) -> float:
        """Seconds that never jump: for leases and other durations."""

    async def sleep(self, seconds: float) -> None: ...


class SystemClock(Clock):
    """The machine's own time."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(asyncio.sleep)  # type: ignore[assignment]


def backoff(first: float, longest: float, *, jitter: float = 0.0) -> Iterator[float]:
    """Pauses between attempts, in seconds: each is twice the one before, up to the longest.

    `jitter` is the share of a pause that is left to chance, so that not all clients come at once.
    """
    pause = first
    while True:
        yield pause * random.uniform(1.0 - jitter, 1.0) if jitter else pause
        pause = min(pause * 2, longest)


async def wait_at_most(clock: Clock, seconds: float, event: asyncio.Event) -> None:
    """Until the event is set, or this many seconds have passed."""
    waits = asyncio.ensure_future(event.wait()), asyncio.ensure_future(clock.sleep(seconds))
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
