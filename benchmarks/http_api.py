"""Penstock's HTTP API, side by side with what is possible at best, on one machine in one run.

`python benchmarks/http_api.py --help`; what is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import Benchmark, Experiment, Figures, Measure, Run, call, tell
from web import tables
from web.served import BARE, PENSTOCK, PLAIN


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


QUICK = Plan(seconds=1.0, stored=(1_000, 10_000, 100_000), read_seconds=0.3, event_seconds=2.0)
TINY = Plan(
    seconds=0.2,
    sizes=(10, 20),
    lines=30,
    stored=(1000, 2000),
    read_seconds=0.05,
    readers=(1, 3),
    rates=(20.0, 20.0),
    event_seconds=0.5,
)
"""Says nothing about speed: for the test that it runs."""


def experiments(run: Run) -> Iterator[Experiment]:
    plan: Plan = run.sized(Plan(), QUICK, TINY)
    run.more["plan"] = asdict(plan)

    def of(function: str, **options: Any) -> Measure:
        return lambda folder: call(f"web.{function}", folder / "data", **options)

    steady = {"seconds": plan.seconds, "connections": 64}
    servers: dict[str, dict[str, Any]] = {
        tables.PLAIN: {"server": PLAIN},
        tables.BARE: {"server": BARE},
        tables.SUBMIT: {"server": PENSTOCK},
        tables.DRAINED: {"server": PENSTOCK, "workers": 1},
    }
    yield Experiment(
        "requests",
        {
            name: of("submitting:http_requests", **steady, **server)
            for name, server in servers.items()
        },
    )
    many = {"sizes": plan.sizes, "seconds": plan.seconds / 2}
    yield Experiment(
        "bulk",
        {
            tables.BULK: of("submitting:http_bulk", lines=plan.lines, **many),
            tables.ENGINE: of("submitting:engine_bulk", **many),
        },
    )
    yield Experiment("reading", {tables.READING: lambda _: reading(plan, run.folder)})
    common = {"readers": plan.readers, "rates": plan.rates, "seconds": plan.event_seconds}
    yield Experiment(
        "events",
        {
            tables.LOOP: of("fanout:http_fanout", server=BARE, **common),
            tables.EVENTS: of("fanout:http_fanout", server=PENSTOCK, **common),
        },
        once=True,  # one long look says more than two
    )


def reading(plan: Plan, stores: Path) -> Figures:
    """Of stores of several sizes, which are filled for the first turn."""
    for stored in plan.stored:
        if not (folder := stores / str(stored)).exists():
            tell(f"store with {stored:,} finished jobs")
            folder.mkdir()
            call("ours.speed:fill", folder / "data", jobs=stored, varied=True)
    options = {"stores": plan.stored, "seconds": plan.read_seconds}
    return call("web.reading:http_reading", stores / "data", **options)


BENCHMARK = Benchmark(
    "http_api.py",
    "Penstock's HTTP API beside what is possible.",
    ("requests", "bulk", "reading", "events"),
    experiments,
    tables.page,
    repeats=2,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
