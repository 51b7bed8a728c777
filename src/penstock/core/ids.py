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


def _encode(value: int, pairs: int) -> str:
    return "".join([_PAIRS[value >> shift & 1023] for shift in range(10 * (pairs - 1), -1, -10)])


class IdSource:
    """Makes unique, sortable ids; never goes back, even if the clock does."""

    def __init__(self, entropy: Callable[[], int] = lambda: secrets.randbits(79)) -> None:
        self._entropy = entropy
        self._millis = -1
        self._stem = ""
        self._count = 0

    def next(self, now: float) -> str:
        millis = int(now * 1000)
        if millis > self._millis:
            self._millis = millis
            self._stem = _encode(millis, 5)
            self._count = self._entropy()
        else:
            self._count = (self._count + 1) & _MASK
        return self._stem + _encode(self._count, 8)
