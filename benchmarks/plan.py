"""What is measured, of whom, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from side import DRAMATIQ, HUEY, HUEY_FSYNC, PENSTOCK, PGQUEUER

PEERS = (HUEY_FSYNC, HUEY, PGQUEUER, DRAMATIQ)

GROUPS = (
    "drain",
    "sustained",
    "submit",
    "children",
    "latency",
    "http",
    "growth",
    "memory",
    "placement",
    "idle",
    "kill",
)
"""What `--only` can choose from, besides the names of single experiments."""

RATE = 100
"""Jobs a second while latency is measured."""
IN_FLIGHT = 64
BULK = 1000
"""Jobs in one call."""
SUSTAINED_IN_FLIGHT = 1000
HTTP_CONNECTIONS = 64
_IDEMPOTENT = "job.bench.idempotent"


@dataclass(frozen=True)
class Plan:
    """The sizes of a run."""

    jobs: int = 60_000
    """Penstock's backlog."""
    peer_jobs: int = 10_000
    """The peers': shallower, because they are slower; a deep one would slow them more."""
    embedded_jobs: int = 100_000
    """The backlog that runs while a loop submits in the same process."""
    seconds: float = 5.0
    """How long something that goes on at a steady pace is watched."""
    submit_seconds: float = 2.5
    http_seconds: float = 3.0
    idle_seconds: float = 20.0
    children: int = 100_000
    """Jobs that are mapped over and gathered."""
    stored: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    growth_jobs: int = 20_000
    waiting: int = 100_000
    placed_jobs: int = 50_000
    kill_window: float = 40.0
    repeats: int = 3


QUICK = Plan(
    jobs=20_000,
    peer_jobs=2_000,
    embedded_jobs=20_000,
    seconds=2.0,
    submit_seconds=1.0,
    http_seconds=1.0,
    idle_seconds=4.0,
    children=10_000,
    stored=(1_000, 10_000, 100_000),
    growth_jobs=5_000,
    waiting=10_000,
    placed_jobs=20_000,
    kill_window=8.0,
    repeats=1,
)

TINY = Plan(
    jobs=500,
    peer_jobs=200,
    embedded_jobs=3_000,
    seconds=0.5,
    submit_seconds=0.2,
    http_seconds=0.2,
    idle_seconds=0.5,
    children=1_500,
    stored=(500, 1_000),
    growth_jobs=500,
    waiting=500,
    placed_jobs=1_000,
    kill_window=8.0,
    repeats=1,
)
"""Says nothing about speed: for the test that it runs."""


@dataclass(frozen=True)
class Experiment:
    """One thing to measure; its figures stand under its name."""

    name: str
    group: str
    measure: str
    ours: dict[str, Any]
    theirs: dict[str, Any] | None = None
    """The options for the peers; None where there is nothing to compare."""
    peers: tuple[str, ...] = PEERS
    their_measure: str = ""
    """What measures the peers, if it is called otherwise."""
    repeated: bool = True

    @property
    def sides(self) -> tuple[str, ...]:
        return (PENSTOCK,) if self.theirs is None else (PENSTOCK, *self.peers)

    def measure_of(self, side: str) -> str:
        return self.measure if side == PENSTOCK else self.their_measure or self.measure

    def options(self, side: str) -> dict[str, Any]:
        return self.ours if side == PENSTOCK else self.theirs or {}


def experiments(plan: Plan) -> list[Experiment]:
    """Everything but what needs a filled store (see `growth.py`)."""
    return [
        *_drains(plan),
        *_sustained(plan),
        *_submissions(plan),
        Experiment("children", "children", "children", {"jobs": plan.children}),
        *_latencies(plan),
        *_http(plan),
        Experiment(
            "placement",
            "placement",
            "placement",
            {"workers": 100, "tenants": 1000, "jobs": plan.placed_jobs},
        ),
        Experiment("idle", "idle", "idle", {"seconds": plan.idle_seconds}, repeated=False),
        _kill(plan),
    ]


def _drains(plan: Plan) -> list[Experiment]:
    jobs = plan.jobs
    made = [
        Experiment(
            f"drain-{workers}",
            "drain",
            "drain",
            {"jobs": jobs, "workers": workers},
            {"jobs": plan.peer_jobs, "workers": workers},
        )
        for workers in (1, 2)
    ]
    made.append(Experiment("drain-in-process", "drain", "drain_in_process", {"jobs": jobs}))
    for name, topic in (("threads", "job.bench.thread"), ("idempotent", _IDEMPOTENT)):
        options = {"jobs": jobs, "workers": 1, "topic": topic}
        made.append(Experiment(f"drain-{name}", "drain", "drain", options))
    return made


def _sustained(plan: Plan) -> list[Experiment]:
    common = {"seconds": plan.seconds, "in_flight": SUSTAINED_IN_FLIGHT}
    kinds: dict[str, dict[str, Any]] = {
        "sustained": {},
        "sustained-bulk": {"bulk": 100},
        "sustained-idempotent": {"topic": _IDEMPOTENT},
    }
    return [Experiment(name, "sustained", "sustain", common | kind) for name, kind in kinds.items()]


def _submissions(plan: Plan) -> list[Experiment]:
    seconds = plan.submit_seconds
    backlogs = {"backlog": plan.embedded_jobs, "short_jobs": max(600, int(8000 * seconds))}
    return [
        Experiment(
            "submit-apart",
            "submit",
            "submit_apart",
            {"seconds": seconds},
            {"seconds": seconds, "bulk": BULK},
            their_measure="submit",
        ),
        Experiment("submit-embedded", "submit", "submit_embedded", {"seconds": seconds} | backlogs),
        Experiment(
            "submit-async",
            "submit",
            "submit",
            {"seconds": seconds, "in_flight": IN_FLIGHT, "bulk": BULK},
        ),
    ]


def _latencies(plan: Plan) -> list[Experiment]:
    steady = {"seconds": plan.seconds, "rate": RATE}
    again = {**steady, "topic": _IDEMPOTENT}
    return [
        Experiment("latency", "latency", "latency", steady, steady),
        Experiment("latency-idempotent", "latency", "latency", again),
    ]


def _http(plan: Plan) -> list[Experiment]:
    """One small job a request, and an endpoint that does next to nothing on the same server."""
    common = {"seconds": plan.http_seconds, "connections": HTTP_CONNECTIONS}
    servers = {"http-plain": "plain", "http-bare": "bare", "http-submit": "penstock"}
    return [
        Experiment(name, "http", "http_requests", common | {"server": server})
        for name, server in servers.items()
    ]


def _kill(plan: Plan) -> Experiment:
    kill = {"jobs": 300, "after": 77, "window": plan.kill_window}
    peers = (HUEY_FSYNC, PGQUEUER, DRAMATIQ)  # fsync makes no difference to a killed worker
    return Experiment("kill", "kill", "kill", {**kill, "slots": 8}, kill, peers, repeated=False)
