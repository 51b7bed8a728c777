"""How fast a stage goes, and how long the rest will take."""

from __future__ import annotations

from collections import deque

from penstock.ports.clock import Clock

WINDOW = 10.0
"""Seconds over which the rate is taken."""
_GRAIN = 0.2
"""Seconds between two marks that are kept, so that a window has few of them."""


class Meter:
    """Counts what is done, by a clock that never jumps.

    The rate is that of the last ten seconds; of a stage slower than that, since its last
    item but one. One that stalls has a falling rate and a growing ETA.
    """

    def __init__(self, clock: Clock, done: int = 0) -> None:
        """`done` is what a run before this one has done: it says nothing of the speed now."""
        self._clock = clock
        self._done = done
        self._marks: deque[tuple[float, int]] = deque([(clock.monotonic(), done)])

    def mark(self, done: int) -> None:
        """So many are done by now, in all."""
        if done == self._done:
            return
        now = self._clock.monotonic()
        self._done = done
        if now - self._marks[-1][0] >= _GRAIN:
            self._marks.append((now, done))
            self._forget(now)

    def rate(self) -> float | None:
        """Items a second; None before there is anything to tell."""
        now = self._clock.monotonic()
        self._forget(now)
        since, done = self._marks[0]
        if now <= since or self._done <= done:
            return None
        return (self._done - done) / (now - since)

    def eta(self, total: int) -> float | None:
        """Seconds until all are done, at that rate; None if that can't be told."""
        rest = max(0, total - self._done)
        if not rest:
            return 0.0
        rate = self.rate()
        return rest / rate if rate else None

    def _forget(self, now: float) -> None:
        while len(self._marks) > 2 and self._marks[1][0] <= now - WINDOW:
            self._marks.popleft()
