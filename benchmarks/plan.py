"""What is measured, of whom, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from side import DRAMATIQ, HUEY, HUEY_FSYNC, PENSTOCK

PEERS = (HUEY_FSYNC, HUEY, DRAMATIQ)

GROUPS = ("drain", "sustained", "submit", "latency", "growth", "memory", "idle", "kill")
"""What `--only` can choose from."""

RATE = 100
"""Jobs a second while latency is measured."""
IN_FLIGHT = 64
SUSTAINED_IN_FLIGHT = 1000
_IDEMPOTENT = "job.bench.idempotent"


@dataclass(frozen=True)
class Plan:
    """The sizes of a run."""

    jobs: int = 60_000
    """Penstock's backlog."""
    peer_jobs: int = 10_000
    """The peers': shallower, because they are slower; a deep one would slow them more."""
    seconds: float = 5.0
    """How long something that goes on at a steady pace is watched."""
    idle_seconds: float = 20.0
    stored: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    growth_jobs: int = 20_000
    waiting: int = 100_000
    kill_window: float = 45.0
    repeats: int = 3


QUICK = Plan(
    jobs=20_000,
    peer_jobs=2_000,
    seconds=2.0,
    idle_seconds=4.0,
    stored=(1_000, 10_000, 100_000),
    growth_jobs=5_000,
    waiting=10_000,
    kill_window=8.0,
    repeats=1,
)


@dataclass(frozen=True)
class Experiment:
    """One thing to measure; its figures stand under its name."""

    name: str
    group: str
    measure: str
    ours: dict[str, Any]
    theirs: dict[str, Any] | None = None
    """The options for the peers; None where there is nothing to compare."""
    repeated: bool = True
    sides: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        sides = (PENSTOCK,) if self.theirs is None else (PENSTOCK, *PEERS)
        object.__setattr__(self, "sides", sides)

    def options(self, side: str) -> dict[str, Any]:
        return self.ours if side == PENSTOCK else self.theirs or {}


def experiments(plan: Plan) -> list[Experiment]:
    """Everything but what needs a filled store (see `stored.py`)."""
    jobs, peer_jobs, seconds = plan.jobs, plan.peer_jobs, plan.seconds
    steady = {"seconds": seconds, "rate": RATE}
    kill = {"jobs": 300, "after": 77, "window": plan.kill_window}
    flight = SUSTAINED_IN_FLIGHT
    return [
        Experiment(
            "drain-1",
            "drain",
            "drain",
            {"jobs": jobs, "workers": 1},
            {"jobs": peer_jobs, "workers": 1},
        ),
        Experiment(
            "drain-2",
            "drain",
            "drain",
            {"jobs": jobs, "workers": 2},
            {"jobs": peer_jobs, "workers": 2},
        ),
        Experiment("drain-in-process", "drain", "drain_in_process", {"jobs": jobs}),
        Experiment(
            "drain-threads",
            "drain",
            "drain",
            {"jobs": jobs, "workers": 1, "topic": "job.bench.thread"},
        ),
        Experiment(
            "drain-idempotent",
            "drain",
            "drain",
            {"jobs": jobs, "workers": 1, "topic": _IDEMPOTENT},
        ),
        Experiment("sustained", "sustained", "sustain", {"seconds": seconds, "in_flight": flight}),
        Experiment(
            "sustained-bulk",
            "sustained",
            "sustain",
            {"seconds": seconds, "in_flight": flight, "bulk": 100},
        ),
        Experiment(
            "sustained-idempotent",
            "sustained",
            "sustain",
            {"seconds": seconds, "in_flight": flight, "topic": _IDEMPOTENT},
        ),
        Experiment(
            "submit",
            "submit",
            "submit",
            {"seconds": seconds / 2, "in_flight": IN_FLIGHT, "bulk": 1000},
            {"seconds": seconds / 2},
        ),
        Experiment("latency", "latency", "latency", steady, steady),
        Experiment("latency-idempotent", "latency", "latency", {**steady, "topic": _IDEMPOTENT}),
        Experiment("idle", "idle", "idle", {"seconds": plan.idle_seconds}, repeated=False),
        Experiment("kill", "kill", "kill", {**kill, "slots": 8}, kill, repeated=False),
    ]
