"""So many in so many seconds: exactly, however the moments fall. Pure."""

from __future__ import annotations

from collections import deque

from penstock.core.verdict import Rate

_PIECES = 1000
"""Into how many pieces a long window is cut at most, so that it stays small."""


class Window:
    """What went in the last `per` seconds, by a clock that only goes forward.

    In no stretch of `per` seconds go more than `count`, unlike with a bucket that refills
    while it is emptied. What goes within a thousandth of the window counts as one moment,
    its last, which errs on the slow side.
    """

    __slots__ = ("_gone", "_went")

    def __init__(self) -> None:
        self._went: deque[tuple[float, float, int]] = deque()
        """(first, last, how many)"""
        self._gone = 0

    def spend(self, rate: Rate, at: float) -> None:
        if self._went:
            first, last, count = self._went[-1]
            at = max(at, last)
            if at - first < rate.per / _PIECES:
                self._went[-1] = (first, at, count + 1)
                self._gone += 1
                return
        self._went.append((at, at, 1))
        self._gone += 1

    def room(self, rate: Rate, at: float) -> int:
        """How many may go now."""
        self._forget(rate, at)
        return rate.count - self._gone

    def opens(self, rate: Rate, at: float) -> float:
        """When the next one may go."""
        if self.room(rate, at) > 0:
            return at
        too_many = self._gone - rate.count + 1
        for _, last, count in self._went:
            too_many -= count
            if too_many <= 0:
                return last + rate.per
        return at

    def is_empty(self, rate: Rate, at: float) -> bool:
        self._forget(rate, at)
        return not self._went

    def _forget(self, rate: Rate, at: float) -> None:
        went = self._went
        while went and went[0][1] + rate.per <= at:
            self._gone -= went.popleft()[2]
