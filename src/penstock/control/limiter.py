"""How many jobs with one key may run at once, how fast they may go, and how many may wait."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.core.job import JobRequest
from penstock.ports.limits import Limit, LimitView


class Limiter:
    """Limits that were set, and those that safety rules set; a skeleton as yet."""

    def __init__(self) -> None:
        self._limits: tuple[Limit, ...] = ()

    def use(self, limits: Iterable[Limit]) -> None:
        """Hold to these from now on."""
        self._limits = tuple(limits)

    def check_waiting(self, requests: Sequence[JobRequest]) -> None:
        """Raise TooMany if so many more may not wait."""

    def views(self, now: float) -> list[LimitView]:
        return [LimitView(limit, ()) for limit in self._limits]
