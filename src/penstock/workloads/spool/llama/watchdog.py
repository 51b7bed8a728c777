"""Ends what gives no sign of life while it should be at work."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Watchdog:
    """Awake while it is entered, by however many at once; a sign to one is a sign to all."""

    def __init__(self, patience: float, bite: Callable[[], None]) -> None:
        self.patience = patience
        """Seconds; 0 means for ever."""
        self.has_bitten = False
        self._bite = bite
        self._loop = asyncio.get_running_loop()
        self._awake = 0
        self._last = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def sign(self) -> None:
        self._last = self._loop.time()

    def __enter__(self) -> None:
        self._awake += 1
        if self._awake == 1:
            self.sign()
        if self._timer is None and self.patience:
            self._timer = self._loop.call_later(self.patience, self._look)

    def __exit__(self, *_: object) -> None:
        self._awake -= 1

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        if not self._awake:
            return
        left = self._last + self.patience - self._loop.time()
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self.has_bitten = True
            self._bite()
