"""Penstock's engine side by side with its peers, on one machine in one run.

`python benchmarks/engine.py --help`; what is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import report
import stored
from asked import add_options, publish
from measure import flush_times, machine
from plan import GROUPS, PEERS, QUICK, Experiment, Plan, experiments
from run import Figures, MeasurementFailed, measure, medians, missing, quietness, scratch, versions
from side import PENSTOCK, SIDES


def main() -> int:
    options = parse(sys.argv[1:])
    plan = planned(options)
    start = time.monotonic()
    everything: dict[str, Any] = {
        "command": command(options),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {**machine(), **disk(options.folder)} | ({} if options.no_peers else versions()),
        "plan": {name: getattr(plan, name) for name in plan.__dataclass_fields__},
        "notes": [],
        "growth": [],
        "memory": {},
    }
    chosen = [e for e in experiments(plan) if e.group in options.only]
    peers = present(options, everything["notes"]) if any(e.theirs for e in chosen) else []
    try:
        everything["results"] = measure_all(chosen, plan, peers, options.folder, everything)
        if {"growth", "memory"} & set(options.only):
            everything["growth"], everything["memory"] = stored.climb(
                plan,
                options.folder,
                tell,
                growth="growth" in options.only,
                memory="memory" in options.only,
            )
    except MeasurementFailed as error:
        print(error, file=sys.stderr)
        return 1
    everything["machine"] |= quietness()
    tell(f"took {time.monotonic() - start:.0f} s")
    figures = report.page(everything)
    publish(everything, figures, options)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Penstock's engine side by side with its peers.")
    parser.add_argument("--quick", action="store_true", help="small sizes: a minute or two")
    add_options(parser, GROUPS)
    parser.add_argument("--jobs", type=int, metavar="N", help="the backlog that is drained")
    parser.add_argument("--no-peers", action="store_true", help="Penstock alone")
    return parser.parse_args(arguments)


def planned(options: argparse.Namespace) -> Plan:
    plan = QUICK if options.quick else Plan()
    if options.repeats:
        plan = replace(plan, repeats=options.repeats)
    if options.jobs:
        plan = replace(plan, jobs=options.jobs, peer_jobs=min(plan.peer_jobs, options.jobs))
    return plan


def command(options: argparse.Namespace) -> str:
    """What to type to get the same; without the paths of this machine."""
    words = ["python", "benchmarks/engine.py"]
    words += ["--quick"] if options.quick else []
    words += [] if options.only == GROUPS else ["--only", ",".join(options.only)]
    words += ["--repeats", str(options.repeats)] if options.repeats else []
    words += ["--jobs", str(options.jobs)] if options.jobs else []
    words += ["--no-peers"] if options.no_peers else []
    return " ".join(words)


def disk(folder: Path | None) -> dict[str, str]:
    flush = median(flush_times(folder or Path(tempfile.gettempdir()))) * 1e3
    return {"disk": f"4 KiB appended and flushed in {flush:.2f} ms (median)"}


def present(options: argparse.Namespace, notes: list[str]) -> list[str]:
    """The peers that can be measured here; why the others can't is noted."""
    found = []
    for side in () if options.no_peers else PEERS:
        if (why := missing(side)) is None:
            found.append(side)
        else:
            notes.append(f"{SIDES[side]} was left out: {why}")
    return found


def measure_all(
    chosen: list[Experiment], plan: Plan, peers: list[str], root: Path | None, told: dict[str, Any]
) -> report.Results:
    """Medians of all figures. Sides take turns, so that a bad moment is everybody's."""
    results: report.Results = {}
    for experiment in chosen:
        runs: dict[str, list[Figures]] = {}
        for turn in range(plan.repeats if experiment.repeated else 1):
            for side in experiment.sides:
                if side != PENSTOCK and side not in peers:
                    continue
                tell(f"{experiment.name}: {SIDES[side]}" + (f" ({turn + 1})" if turn else ""))
                with scratch(root) as folder:
                    try:
                        options = experiment.options(side)
                        figures = measure(side, experiment.measure, folder, options)
                    except MeasurementFailed as error:
                        if side == PENSTOCK:
                            raise
                        told["notes"].append(f"{SIDES[side]} failed at {experiment.name}")
                        tell(str(error))
                        continue
                runs.setdefault(side, []).append(figures)
        results[experiment.name] = {side: medians(figures) for side, figures in runs.items()}
    return results


def tell(text: str) -> None:
    print(f"· {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
