"""How fast one key may ask."""

from __future__ import annotations

from collections.abc import Callable

from penstock.core.errors import TooMany


class Rates:
    """A bucket of tokens for each key; a request takes one."""

    def __init__(self, rate: float, burst: int, now: Callable[[], float]) -> None:
        self._rate, self._now = rate, now
        self._burst = float(burst or max(1.0, rate))
        self._buckets: dict[str, tuple[float, float]] = {}
        """By key: how many tokens there were, and when."""

    def take(self, key: str) -> None:
        """Raises TooMany, with the time at which there is a token again."""
        now = self._now()
        tokens, then = self._buckets.get(key, (self._burst, now))
        tokens = min(self._burst, tokens + (now - then) * self._rate)
        if tokens < 1.0:
            wait = (1.0 - tokens) / self._rate
            raise TooMany(
                f"more than {self._rate:g} requests a second with one key",
                retry_after=wait,
                hint=f"wait {wait:.2f} s; many jobs can be submitted in one call",
            )
        self._buckets[key] = (tokens - 1.0, now)
