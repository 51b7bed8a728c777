"""Time, handed in, so that tests own it."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Wall-clock seconds since the epoch, UTC: for records and for callers' times."""

    def monotonic(self) -> float:
        """Seconds that never jump: for leases and other durations."""

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's own time."""

    now = staticmethod(time.time)
    monotonic = staticmethod(time.monotonic)
    sleep = staticmethod(asyncio.sleep)
