"""Ids of spooled jobs, `<unix seconds>_<pid>_<counter>` as `1736700000_12345_0`, and their order.

An id is a file name and comes from anybody, so nothing that breaks the rule is ever made part
of a path. Ids of another form are as good: the original's later one counts microseconds, with
leading zeros, and jobs of both are put in one order."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from itertools import count

from penstock.core.errors import InvalidRequest
from penstock.core.job import HEAD_START, Priority

JobId = str
Order = tuple[int, tuple[int, ...], str]

MAX_LENGTH = 128
_RULE = re.compile(r"[0-9]+(?:_[0-9]+)*", re.ASCII)
_MICROSECONDS = 10**11
"""From here on a number counts microseconds: as seconds it would be the year 5138."""
_PADDED = 20
"""Digits of a number that counts microseconds whatever it is."""
_SHOWN = 40
_OF_THIS_PROCESS = count()
"""One for all sources: an id whose job was cleaned away is not given again."""


def is_job_id(text: str) -> bool:
    """1 to 128 digits and single underscores, none at either end."""
    return 0 < len(text) <= MAX_LENGTH and _RULE.fullmatch(text) is not None


def check_job_id(text: str, field: str = "job id") -> JobId:
    if not is_job_id(text):
        raise InvalidRequest(
            field,
            f"{_shown(text)} can't be one",
            hint="1 to 128 digits and single underscores, as 1736700000_12345_0",
        )
    return text


def is_original(job_id: JobId) -> bool:
    """Whether the original's `wrk` made it: microseconds, with leading zeros."""
    return len(job_id.partition("_")[0]) == _PADDED


def order_of(job_id: JobId) -> Order:
    """A key that sorts ids by the time in them, then by the numbers after it.

    Ids of both forms compare; a second counts as its first microsecond. No two ids are equal.
    """
    first, *others = job_id.split("_")
    time = int(first)
    if len(first) != _PADDED and time < _MICROSECONDS:
        time *= 1_000_000
    return time, tuple(map(int, others)), job_id


def submitted_near(job_id: JobId) -> float:
    """The time in an id, in seconds since the epoch."""
    return order_of(job_id)[0] / 1_000_000


class SpoolIds:
    """Ids that no other id of this process equals, in any thread, and after a fork.

    That another machine or container has the same pid is for the one who makes the folder to
    notice: a taken id is skipped.
    """

    def __init__(
        self, pid: Callable[[], int] = os.getpid, counter: Iterator[int] | None = None
    ) -> None:
        self._pid = pid
        self._counter = counter or _OF_THIS_PROCESS

    def next(self, now: float) -> JobId:
        return f"{int(now)}_{self._pid()}_{next(self._counter)}"


def _shown(text: str) -> str:
    """Enough of it to recognise, with nothing in it that a terminal would act on."""
    return ascii(text if len(text) <= _SHOWN else text[:_SHOWN] + "…")


_DAY = 86_400
_MICRO = 1_000_000

Turn = tuple[int, Order]
"""The lowest goes first."""


def turn_of(job_id: str, priority: Priority, now: float) -> Turn:
    """By the time that its id tells, less the head start of its priority.

    All waiting jobs age alike, so an urgent job overtakes those that came less than its head
    start before it, and nobody starves. Within a priority the order is that of the ids. One
    that claims to come from the future is not put off for longer than until tomorrow.
    """
    order = order_of(job_id)
    tomorrow = (int(now) // _DAY + 2) * _DAY * _MICRO
    came = min(order[0], tomorrow)
    return came - int(HEAD_START[priority] * _MICRO), order
