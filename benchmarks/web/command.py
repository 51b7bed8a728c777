"""The benchmark's command: choose, measure, report."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness import Benchmark, Figures, Run, medians, tell
from run import MeasurementFailed, measure, scratch
from side import PENSTOCK as OURS
from web import tables
from web.plan import CONNECTIONS, QUICK, TINY, Plan
from web.served import BARE, PENSTOCK, PLAIN

Results = dict[str, Figures]
"""Figures by experiment."""


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
    "http.py",
    "Penstock's HTTP API beside what is possible.",
    tuple(MEASURED),
    tables.page,
    repeats=Plan.repeats,
)


def main() -> int:
    return BENCHMARK.main(measure_all)
