"""Signs of life: how far away a peer is, and whether it is still there."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

_SMOOTH = 0.2
_LAST = 16


class Timer(Protocol):
    def cancel(self) -> None: ...


class Later(Protocol):
    def __call__(self, delay: float, callback: Callable[..., Any], *args: Any) -> Timer: ...


class Pulse:
    """Asks every `ping` seconds, and calls `silent` once when nothing came for `silence`.

    A process that was itself stopped does not blame others for it: what they sent meanwhile is
    read first.
    """

    def __init__(
        self,
        ping: float,
        silence: float,
        ask: Callable[[int], None],
        silent: Callable[[float], None],
        *,
        later: Later,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rtt = 0.0
        """Seconds there and back, smoothed; 0 until the first answer."""
        self.rtt_min = 0.0
        """The least of the last sixteen: the way itself, without the waiting at its ends."""
        self.heard = clock()
        """When anything last came in. Set by the owner."""
        self._later, self._clock = later, clock
        self._ping, self._silence = ping, silence
        self._ask, self._silent = ask, silent
        self._asked: dict[int, float] = {}
        self._number = 0
        self._last: deque[float] = deque(maxlen=_LAST)
        self._timers: list[Timer] = []
        self._away = float("-inf")
        """When this process last found that it had been stopped itself."""

    def start(self) -> None:
        self._timers = [self._tick_soon(), self._watch_in(self._silence)]
        self._ask_now()

    def stop(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers = []

    def answered(self, number: int) -> None:
        """A number that was not asked, or was answered before, says nothing."""
        asked = self._asked.pop(number, None)
        if asked is None:
            return
        rtt = self._clock() - asked
        self._last.append(rtt)
        self.rtt_min = min(self._last)
        self.rtt = rtt if len(self._last) == 1 else self.rtt + _SMOOTH * (rtt - self.rtt)

    def _ask_now(self) -> None:
        self._number += 1
        self._asked[self._number] = self._clock()
        self._asked.pop(self._number - _LAST, None)
        self._ask(self._number)

    def _tick_soon(self) -> Timer:
        return self._later(self._ping, self._tick, self._clock() + self._ping)

    def _tick(self, due: float) -> None:
        self._note_away(due)
        self._timers[0] = self._tick_soon()
        self._ask_now()

    def _note_away(self, due: float) -> None:
        now = self._clock()
        if now - due > self._ping:
            self._away = now

    def _watch_in(self, seconds: float) -> Timer:
        return self._later(seconds, self._watch, self._clock() + seconds)

    def _watch(self, due: float) -> None:
        self._note_away(due)
        now = self._clock()
        if now - self._away < self._ping:
            # The loop itself was away. Bytes may be waiting that nobody has read yet.
            self._timers[1] = self._watch_in(self._ping)
        elif now - self.heard >= self._silence:
            self._silent(now - self.heard)
        else:
            self._timers[1] = self._watch_in(self.heard + self._silence - now)
