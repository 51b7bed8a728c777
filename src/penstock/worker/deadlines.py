"""One timer for everything that runs here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from penstock.ports.clock import Clock
from penstock.worker.attempt import Attempt

_LONGEST = 1.0
"""Seconds between looks at most: the event loop's clock need not be the one that counts."""


class Deadlines:
    """Calls `late` with each running attempt whose time is up.

    There are never more attempts than slots, so looking at all of them is cheaper than
    keeping an order that nearly every job leaves again before its time.
    """

    def __init__(
        self,
        clock: Clock,
        running: Callable[[], Iterable[Attempt]],
        late: Callable[[Attempt], None],
    ) -> None:
        self._clock, self._running, self._late = clock, running, late
        self._timer: asyncio.TimerHandle | None = None
        self._timer_for = 0.0

    def watch(self, attempt: Attempt) -> None:
        """See to it that the timer is set no later than for this one."""
        if self._timer is None or attempt.ends_at < self._timer_for:
            self._set(attempt.ends_at)

    def _set(self, ends_at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_for = ends_at
        wait = max(0.0, ends_at - self._clock.monotonic())
        self._timer = asyncio.get_running_loop().call_later(min(wait, _LONGEST), self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._clock.monotonic()
        waiting = []
        for attempt in list(self._running()):
            if attempt.ends_at <= now:
                self._late(attempt)
            else:
                waiting.append(attempt.ends_at)
        if waiting:
            self._set(min(waiting))

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
