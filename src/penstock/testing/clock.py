"""Time that tests own."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import selectors
from collections.abc import Callable


class VirtualClock:
    """A clock that stands still until somebody moves it.

    `advance` lets time pass and wakes sleepers in order; `jump` sets the wall clock to
    another time, as an administrator or a time server would, and nobody ages by it.
    """

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._start = now
        self._offset = 0.0
        self._elapsed = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = itertools.count()

    def now(self) -> float:
        return self._start + self._offset + self._elapsed

    def monotonic(self) -> float:
        return self._elapsed

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        sleeper: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._elapsed + seconds, next(self._count), sleeper))
        await sleeper

    def jump(self, seconds: float) -> None:
        """The wall clock is set forward or back; durations are not touched."""
        self._offset += seconds

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._elapsed += seconds
        while self._sleepers and self._sleepers[0][0] <= self._elapsed:
            _, _, sleeper = heapq.heappop(self._sleepers)
            if not sleeper.done():
                sleeper.set_result(None)

    def next_wake(self) -> float | None:
        """Seconds until the first sleeper is due; None if nobody sleeps."""
        while self._sleepers and self._sleepers[0][2].done():
            heapq.heappop(self._sleepers)
        return max(0.0, self._sleepers[0][0] - self._elapsed) if self._sleepers else None


class LoopClock:
    """A clock that tells its event loop's time, which a VirtualLoop makes up."""

    def __init__(self, loop: asyncio.AbstractEventLoop, now: float = 1_700_000_000.0) -> None:
        self._loop, self._start = loop, now

    def now(self) -> float:
        return self._start + self._loop.time()

    def monotonic(self) -> float:
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(max(0.0, seconds))

    def jump(self, seconds: float) -> None:
        """The wall clock is set forward or back; durations are not touched."""
        self._start += seconds


_MOST_STEPS = 100_000
"""Steps of a loop at one moment, beyond which it can't be honest work."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when everything waits.

    Where another loop would block until its next timer, this one is there at once. What
    runs in it, timers and timeouts included, takes no time and happens in the same order
    every time; it must not use threads, sockets or other processes.
    """

    def __init__(self) -> None:
        self._virtual = 0.0
        self._busy = 0
        super().__init__(_Leap(self._leap))

    def time(self) -> float:
        return self._virtual

    def _leap(self, seconds: float | None) -> None:
        if seconds is None:
            raise RuntimeError("everything waits, and nothing will ever happen")
        self._virtual += seconds
        self._busy = 0 if seconds else self._busy + 1
        if self._busy > _MOST_STEPS:
            raise RuntimeError("something is busy for ever, and no time passes")


class _Leap(selectors.SelectSelector):
    """Waits for nothing."""

    def __init__(self, leap: Callable[[float | None], None]) -> None:
        super().__init__()
        self._leap = leap

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._leap(timeout)
        return []
