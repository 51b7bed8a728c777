"""How long a job may take."""

from __future__ import annotations

from msgspec import Struct

from penstock.workloads.spool.options import SpoolOptions
from penstock.workloads.spool.serving.outcomes import DEADLINE, TIMEOUT


class TimeIsUp(Exception):
    """A job took too long, or came too late."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Limit(Struct, frozen=True):
    seconds: float
    """From now on."""
    code: str
    message: str

    @property
    def over(self) -> TimeIsUp:
        return TimeIsUp(self.code, self.message)

    def check(self) -> None:
        if self.seconds <= 0:
            raise self.over


def limit_of(options: SpoolOptions, now: float) -> Limit | None:
    """The nearer of its deadline and its timeout."""
    limits: list[Limit] = []
    if options.deadline is not None:
        message = "its deadline passed before it had ended"
        limits.append(Limit(options.deadline - now, DEADLINE, message))
    if options.timeout is not None:
        message = f"it ran for longer than {options.timeout:g} s"
        limits.append(Limit(options.timeout, TIMEOUT, message))
    return min(limits, key=lambda limit: limit.seconds, default=None)
