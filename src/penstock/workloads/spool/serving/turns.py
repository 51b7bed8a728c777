"""Whose turn it is: a fixed number for each job, so that a queue of any length is one heap."""

from __future__ import annotations

from penstock.core.job import HEAD_START, Priority
from penstock.workloads.spool.ids import Order, order_of

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
