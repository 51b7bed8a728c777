"""The benchmark's command: choose, measure, report."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine import disk
from measure import machine
from options import add_options, publish, tell
from run import Figures, MeasurementFailed, measure, medians, quietness, scratch
from side import PENSTOCK as OURS
from web import tables
from web.plan import CONNECTIONS, GROUPS, QUICK, TINY, Plan
from web.served import BARE, PENSTOCK, PLAIN

Results = dict[str, Figures]
"""Figures by experiment."""


def main() -> int:
    options = parse(sys.argv[1:])
    plan = planned(options)
    start = time.monotonic()
    everything: dict[str, Any] = {
        "command": command(options),
        "date": time.strftime("%Y-%m-%d"),
        "machine": machine() | disk(options.folder),
        "plan": {name: getattr(plan, name) for name in plan.__dataclass_fields__},
        "results": {},
    }
    try:
        for group in options.only:
            everything["results"] |= MEASURED[group](plan, options.folder)
    except MeasurementFailed as error:
        print(error, file=sys.stderr)
        return 1
    everything["machine"] |= quietness()
    tell(f"took {time.monotonic() - start:.0f} s")
    figures = tables.page(everything)
    publish(everything, figures, options)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Penstock's HTTP API beside what is possible.")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="small sizes: a minute")
    sizes.add_argument("--tiny", action="store_true", help="only to see that it runs")
    add_options(parser, GROUPS)
    return parser.parse_args(arguments)


def planned(options: argparse.Namespace) -> Plan:
    plan = QUICK if options.quick else TINY if options.tiny else Plan()
    return replace(plan, repeats=options.repeats) if options.repeats else plan


def command(options: argparse.Namespace) -> str:
    """What to type to get the same; without the paths of this machine."""
    words = ["python", "benchmarks/http.py"]
    words += ["--quick"] if options.quick else ["--tiny"] if options.tiny else []
    words += [] if options.only == GROUPS else ["--only", ",".join(options.only)]
    words += ["--repeats", str(options.repeats)] if options.repeats else []
    return " ".join(words)


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
