"""Penstock's HTTP API, side by side with what is possible at best, on one machine in one run.

`python benchmarks/http_api.py --help`; what is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness import Benchmark, Figures, Run, medians, tell
from run import MeasurementFailed, measure, scratch
from side import PENSTOCK as OURS
from web import tables
from web.served import BARE, PENSTOCK, PLAIN

Results = dict[str, Figures]
"""Figures by experiment."""
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


def measure_all(run: Run) -> Results | None:
    plan = replace(run.sized(Plan(), QUICK, TINY), repeats=run.repeats)
    run.more["plan"] = asdict(plan)
    results: Results = {}
    try:
        for group in run.options.only:
            results |= MEASURED[group](plan, run.options.folder)
    except MeasurementFailed as error:
        print(error, file=sys.stderr)
        return None
    return results


# -- measuring: sides take turns, so that a bad moment is everybody's -----------------------


def take_turns(
    plan: Plan, root: Path | None, wanted: dict[str, tuple[str, dict[str, Any]]]
) -> Results:
    """Medians of each; by its name, what measures it and with which options."""
    runs: dict[str, list[Figures]] = {}
    for turn in range(plan.repeats):
        for name, (what, options) in wanted.items():
            tell(name + (f" ({turn + 1})" if turn else ""))
            with scratch(root) as folder:
                runs.setdefault(name, []).append(measure(OURS, what, folder, options))
    return {name: medians(figures) for name, figures in runs.items()}


def requests(plan: Plan, root: Path | None) -> Results:
    steady = {"seconds": plan.seconds, "connections": CONNECTIONS}
    servers: dict[str, dict[str, Any]] = {
        tables.PLAIN: {"server": PLAIN},
        tables.BARE: {"server": BARE},
        tables.SUBMIT: {"server": PENSTOCK},
        tables.DRAINED: {"server": PENSTOCK, "workers": 1},
    }
    wanted = {name: ("http_requests", steady | server) for name, server in servers.items()}
    return take_turns(plan, root, wanted)


def bulk(plan: Plan, root: Path | None) -> Results:
    common = {"sizes": plan.sizes, "seconds": plan.seconds / 2}
    wanted = {
        tables.BULK: ("http_bulk", common | {"lines": plan.lines}),
        tables.ENGINE: ("engine_bulk", common),
    }
    return take_turns(plan, root, wanted)


def reading(plan: Plan, root: Path | None) -> Results:
    options = {"stores": plan.stored, "seconds": plan.read_seconds}
    with scratch(root) as folder:
        for stored in plan.stored:
            tell(f"store with {stored:,} finished jobs")
            (folder / str(stored)).mkdir()
            measure(OURS, "fill", folder / str(stored), {"jobs": stored, "varied": True})
        runs = []
        for turn in range(plan.repeats):
            tell(tables.READING + (f" ({turn + 1})" if turn else ""))
            runs.append(measure(OURS, "http_reading", folder, options))
    return {tables.READING: medians(runs)}


def events(plan: Plan, root: Path | None) -> Results:
    common = {"readers": plan.readers, "rates": plan.rates, "seconds": plan.event_seconds}
    wanted = {
        tables.LOOP: ("http_fanout", common | {"server": BARE}),
        tables.EVENTS: ("http_fanout", common | {"server": PENSTOCK}),
    }
    return take_turns(replace(plan, repeats=1), root, wanted)  # one long look says more than two


MEASURED = {"requests": requests, "bulk": bulk, "reading": reading, "events": events}


BENCHMARK = Benchmark(
    "http_api.py",
    "Penstock's HTTP API beside what is possible.",
    tuple(MEASURED),
    tables.page,
    repeats=Plan.repeats,
)


if __name__ == "__main__":
    sys.exit(BENCHMARK.main(measure_all))
