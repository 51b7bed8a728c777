"""Time that tests own."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import selectors
import time
from collections.abc import Callable, Collection
from typing import Any

from penstock.ports.clock import Clock


class VirtualClock(Clock):
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


class LoopClock(Clock):
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


_MARGIN = 0.05
"""Seconds after the end of a step in which what is under way may still come to its end: parts of an
engine gather what they send for some milliseconds."""


class SteppedLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes as usual, and at once where `step` lets it.

    A step goes from timer to timer, and between two of them lets everything come to rest. Threads,
    sockets and processes work as in any loop. They need real time, so a step waits for them:
    `outside` gives the seconds for which it should, 0 where nothing is under way there.

    A step does not stop for timers of the tasks named in `polling`, which look again and again
    whether there is something to do: they look wherever the step stops. If one of them has to
    look at a certain time, `due` gives it.
    """

    def __init__(
        self,
        polling: Collection[str] = (),
        outside: Callable[[], float] = lambda: 0.0,
        due: Callable[[], float] = lambda: float("inf"),
    ) -> None:
        self._polling, self._outside, self._next_look = polling, outside, due
        self._ahead = 0.0
        """Seconds by which steps have brought it before the machine's clock."""
        self._held_at: float | None = None
        """The time, while a step is under way."""
        self._target = 0.0
        self._until: Callable[[], bool] = lambda: False
        self._stepped: asyncio.Future[None] | None = None
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._count = itertools.count()
        self.calls = 0
        """Calls that `run_in_executor` has not finished."""
        super().__init__(_StepSelector(self))

    def time(self) -> float:
        return time.monotonic() + self._ahead if self._held_at is None else self._held_at

    def step(
        self, seconds: float, until: Callable[[], bool] = lambda: False
    ) -> asyncio.Future[None]:
        """Let time pass, or as much of it as it takes until all rests and `until` is true."""
        if self._held_at is not None:
            raise RuntimeError("the clock is being stepped already")
        self._held_at = self.time()
        self._target, self._until = self._held_at + seconds, until
        self._stepped = self.create_future()
        return self._stepped

    @property
    def is_stepping(self) -> bool:
        return self._held_at is not None

    @property
    def has_io(self) -> bool:
        """Whether a socket or a pipe is watched, besides the one that wakes the loop."""
        return len(self._selector.get_map()) > 1  # type: ignore[attr-defined]

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        timer = super().call_at(when, callback, *args, context=context)
        task = asyncio.current_task(self)
        if task is None or task.get_name() not in self._polling:
            self._next_timer(after=self.time())
            heapq.heappush(self._timers, (when, next(self._count), timer))
        return timer

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., Any], *args: Any
    ) -> asyncio.Future[Any]:
        future = super().run_in_executor(executor, func, *args)
        self.calls += 1
        future.add_done_callback(self._called)
        return future

    def _called(self, _: asyncio.Future[Any]) -> None:
        self.calls -= 1

    def _next_timer(self, after: float) -> float:
        """When the first timer after this time is due for which a step stops."""
        timers = self._timers
        while timers and (timers[0][0] <= after or timers[0][2].cancelled()):
            heapq.heappop(timers)
        return timers[0][0] if timers else float("inf")

    def wait_outside(self) -> float:
        """Real seconds to wait before the clock goes on."""
        return self._outside()

    def leap(self) -> None:
        """All rests: go on to what is due next, or end the step."""
        assert self._held_at is not None
        now, target = self._held_at, self._target
        if not self._until():
            due = min(self._next_timer(after=now), self._next_look())
            if due <= target or (now >= target and due <= target + _MARGIN):
                self._held_at = due
                return
            if now < target:
                self._held_at = target
                return
        self._ahead, self._held_at = now - time.monotonic(), None
        if self._stepped is not None and not self._stepped.done():
            self._stepped.set_result(None)


class _StepSelector(selectors.DefaultSelector):
    """Tells the loop, during a step, when it would begin to wait."""

    def __init__(self, loop: SteppedLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self._loop.is_stepping or timeout == 0:
            return super().select(timeout)
        if events := super().select(0):
            return events
        if (wait := self._loop.wait_outside()) > 0:
            return super().select(wait)
        self._loop.leap()
        return []
