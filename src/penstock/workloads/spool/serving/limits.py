"""How long a job may take."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

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


def deadline_of(options: SpoolOptions, now: float) -> Limit | None:
    """For all that is done with it."""
    if options.deadline is None:
        return None
    return Limit(options.deadline - now, DEADLINE, "its deadline passed before it had ended")


def timeout_of(options: SpoolOptions) -> Limit | None:
    """For the time in which it is computed."""
    if options.timeout is None:
        return None
    return Limit(options.timeout, TIMEOUT, f"it ran for longer than {options.timeout:g} s")


@asynccontextmanager
async def within(limit: Limit | None) -> AsyncIterator[None]:
    """Raises TimeIsUp when it is over, before anything is begun if it is already."""
    if limit is None:
        yield
        return
    over = TimeIsUp(limit.code, limit.message)
    if limit.seconds <= 0:
        raise over
    try:
        async with asyncio.timeout(limit.seconds) as scope:
            yield
    except TimeoutError:
        if not scope.expired():
            raise
        raise over from None
