"""Job ids that sort by time.

A generated id is a ULID in lower case: 48 bits of milliseconds, 80 bits that start at
random in each millisecond and count up within it. Ids made one after another sort one
after another, so a store's index grows at its right edge only, at any size.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"
_PAIRS = [a + b for a in _DIGITS for b in _DIGITS]
_MASK = (1 << 80) - 1
_LOW = (1 << 20) - 1


def _encode(value: int, pairs: int) -> str:
    return "".join([_PAIRS[value >> shift & 1023] for shift in range(10 * (pairs - 1), -1, -10)])


class IdSource:
    """Makes unique, sortable ids; never goes back, even if the clock does."""

    def __init__(self, entropy: Callable[[], int] = lambda: secrets.randbits(79)) -> None:
        self._entropy = entropy
        self._millis = -1
        self._stem = ""
        """What ids have in common while only the last 20 bits of the count change."""
        self._count = 0

    def next(self, now: float) -> str:
        millis = int(now * 1000)
        if millis > self._millis:
            self._millis = millis
            self._count = self._entropy()
            self._begin()
        else:
            self._count = (self._count + 1) & _MASK
            if not self._count & _LOW:
                self._begin()
        low = self._count & _LOW
        return self._stem + _PAIRS[low >> 10] + _PAIRS[low & 1023]

    def _begin(self) -> None:
        self._stem = _encode(self._millis, 5) + _encode(self._count >> 20, 6)
