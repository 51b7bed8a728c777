"""What is measured over HTTP, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass

CONNECTIONS = 64


@dataclass(frozen=True)
class Plan:
    """The sizes of a run."""

    seconds: float = 3.0
    """How long each kind of submission is watched."""
    sizes: tuple[int, ...] = (100, 1000)
    """Jobs in a batch."""
    lines: int = 2000
    """Jobs in a stream."""
    stored: tuple[int, ...] = (1_000, 100_000, 1_000_000)
    read_seconds: float = 1.5
    """How long each request is repeated on each store."""
    readers: tuple[int, ...] = (1, 100, 1000)
    rates: tuple[float, ...] = (200.0, 100.0, 20.0)
    """Events a second with so many readers: what the readers' own process can keep up with."""
    event_seconds: float = 4.0
    repeats: int = 2


QUICK = Plan(
    seconds=1.0,
    stored=(1_000, 10_000, 100_000),
    read_seconds=0.3,
    event_seconds=2.0,
    repeats=1,
)

TINY = Plan(
    seconds=0.2,
    sizes=(10, 20),
    lines=30,
    stored=(1000, 2000),
    read_seconds=0.05,
    readers=(1, 3),
    rates=(20.0, 20.0),
    event_seconds=0.5,
    repeats=1,
)
"""Says nothing about speed: for the test that it runs."""
