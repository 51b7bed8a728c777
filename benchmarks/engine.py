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

import growth
import report
from goals import goals_table
from measure import flush_times, machine
from options import add_options, publish, tell
from options import command as repeatable
from plan import GROUPS, PEERS, QUICK, TINY, Experiment, Plan, experiments
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
        "failed": [],
        "growth": [],
        "memory": {},
    }
    chosen = [e for e in experiments(plan) if {e.group, e.name} & set(options.only)]
    peers = present(options, everything["notes"]) if any(e.theirs for e in chosen) else []
    everything["results"] = measure_all(chosen, plan, peers, options.folder, everything)
    if {"growth", "memory"} & set(options.only):
        try:
            everything["growth"], everything["memory"] = growth.measure_growth(
                plan,
                options.folder,
                tell,
                growth="growth" in options.only,
                memory="memory" in options.only,
            )
        except MeasurementFailed as error:
            failed("growth", error, everything)
    everything["machine"] |= quietness()
    tell(f"took {time.monotonic() - start:.0f} s")
    if everything["failed"]:
        options.write = None  # a page shows only runs in which everything was right
    publish(everything, page(everything), options)
    return 1 if everything["failed"] else 0


def failed(name: str, error: MeasurementFailed, everything: dict[str, Any]) -> None:
    """Note that Penstock failed, which fails the whole run; the rest is measured all the same."""
    everything["failed"].append(name)
    last = str(error).splitlines()[-1]
    everything["notes"].append(f"**Penstock failed at {name}**: {last}")
    tell(str(error))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Penstock's engine side by side with its peers.")
    sizes = parser.add_mutually_exclusive_group()
    sizes.add_argument("--quick", action="store_true", help="small sizes: two or three minutes")
    sizes.add_argument("--tiny", action="store_true", help="only to see that it runs")
    names = [e.name for e in experiments(TINY) if e.name not in GROUPS]
    add_options(parser, (*GROUPS, *names), default=GROUPS)
    parser.add_argument("--jobs", type=int, metavar="N", help="the backlog that is drained")
    parser.add_argument("--no-peers", action="store_true", help="Penstock alone")
    return parser.parse_args(arguments)


def planned(options: argparse.Namespace) -> Plan:
    plan = QUICK if options.quick else TINY if options.tiny else Plan()
    if options.repeats:
        plan = replace(plan, repeats=options.repeats)
    if options.jobs:
        plan = replace(plan, jobs=options.jobs, peer_jobs=min(plan.peer_jobs, options.jobs))
    return plan


def command(options: argparse.Namespace) -> str:
    """What to type to get the same; without the paths of this machine."""
    words = [repeatable("engine.py", GROUPS, options)]
    words += ["--jobs", str(options.jobs)] if options.jobs else []
    words += ["--no-peers"] if options.no_peers else []
    return " ".join(words)


def page(everything: dict[str, Any]) -> str:
    """All of it, as Markdown."""
    results = everything["results"]
    sides = [s for s in SIDES if s == PENSTOCK or any(s in found for found in results.values())]
    parts = [
        *report.origin(everything),
        *(f"Note: {note}." for note in everything["notes"]),
        goals_table(everything),
        report.side_by_side(results, sides),
        *report.unlike(results, sides),
    ]
    if everything["growth"]:
        parts.append(report.growth(everything["growth"]))
    if everything["memory"]:
        parts.append(report.memory(everything["memory"]))
    return "\n\n".join(part for part in parts if part)


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
    chosen: list[Experiment],
    plan: Plan,
    peers: list[str],
    root: Path | None,
    everything: dict[str, Any],
) -> report.Results:
    """Medians of all figures. Sides take turns, so that a bad moment is everybody's."""
    results: report.Results = {}
    for experiment in chosen:
        runs: dict[str, list[Figures]] = {}
        for turn in range(plan.repeats if experiment.repeated else 1):
            for side in experiment.sides:
                if side != PENSTOCK and side not in peers:
                    continue
                who = f": {SIDES[side]}" if experiment.theirs else ""
                tell(experiment.name + who + (f" ({turn + 1})" if turn else ""))
                with scratch(root) as folder:
                    try:
                        options = experiment.options(side)
                        figures = measure(side, experiment.measure_of(side), folder, options)
                    except MeasurementFailed as error:
                        if side == PENSTOCK:
                            failed(experiment.name, error, everything)
                        else:
                            notes = everything["notes"]
                            notes.append(f"{SIDES[side]} failed at {experiment.name}")
                            tell(str(error))
                        continue
                runs.setdefault(side, []).append(figures)
        results[experiment.name] = {side: medians(figures) for side, figures in runs.items()}
    return results


if __name__ == "__main__":
    sys.exit(main())
