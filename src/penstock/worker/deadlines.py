"""One timer for everything that runs here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from penstock.ports.clock import Clock
from penstock.worker.attempt import Attempt

_LONGEST = 1.0
"""Seconds between looks at most: it is the wall clock that counts, and it may be set."""


class Deadlines:
    """Calls `late` with each running attempt whose deadline has passed.

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
        if self._timer is None or attempt.deadline < self._timer_for:
            self._set(attempt.deadline)

    def _set(self, deadline: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_for = deadline
        wait = max(0.0, deadline - self._clock.now())
        self._timer = asyncio.get_running_loop().call_later(min(wait, _LONGEST), self._look)

    def _look(self) -> None:
        self._timer = None
        now = self._clock.now()
        waiting = []
        for attempt in list(self._running()):
            if attempt.deadline <= now:
                self._late(attempt)
            else:
                waiting.append(attempt.deadline)
        if waiting:
            self._set(min(waiting))

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
