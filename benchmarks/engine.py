"""Penstock's engine side by side with its peers, on one machine in one run.

`python benchmarks/engine.py --help`; what is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import Any

import growth
import report
from goals import goals_table
from harness import Benchmark, Figures, Run, medians, tell
from plan import GROUPS, PEERS, QUICK, TINY, Experiment, Plan, experiments
from run import MeasurementFailed, measure, missing, scratch, versions
from side import PENSTOCK, SIDES


def measure_all(run: Run) -> report.Results:
    options, plan = run.options, planned(run)
    run.more |= {"plan": asdict(plan), "growth": [], "memory": {}}
    if not options.no_peers:
        run.facts |= versions()
    chosen = [e for e in experiments(plan) if {e.group, e.name} & set(options.only)]
    peers = present(run) if any(e.theirs for e in chosen) else []
    results = measure_chosen(chosen, plan, peers, run)
    if {"growth", "memory"} & set(options.only):
        try:
            run.more["growth"], run.more["memory"] = growth.measure_growth(
                plan,
                options.folder,
                tell,
                growth="growth" in options.only,
                memory="memory" in options.only,
            )
        except MeasurementFailed as error:
            failed("growth", error, run)
    return results


def failed(name: str, error: MeasurementFailed, run: Run) -> None:
    """Note that Penstock failed, which fails the whole run; the rest is measured all the same."""
    run.failed.append(name)
    run.notes.append(f"**Penstock failed at {name}**: {str(error).splitlines()[-1]}")
    tell(str(error))


def planned(run: Run) -> Plan:
    plan: Plan = replace(run.sized(Plan(), QUICK, TINY), repeats=run.repeats)
    jobs = run.options.jobs
    return replace(plan, jobs=jobs, peer_jobs=min(plan.peer_jobs, jobs)) if jobs else plan


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


def present(run: Run) -> list[str]:
    """The peers that can be measured here; why the others can't is noted."""
    found = []
    for side in () if run.options.no_peers else PEERS:
        if (why := missing(side)) is None:
            found.append(side)
        else:
            run.notes.append(f"{SIDES[side]} was left out: {why}")
    return found


def measure_chosen(
    chosen: list[Experiment], plan: Plan, peers: list[str], run: Run
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
                with scratch(run.options.folder) as folder:
                    try:
                        options = experiment.options(side)
                        figures = measure(side, experiment.measure_of(side), folder, options)
                    except MeasurementFailed as error:
                        if side == PENSTOCK:
                            failed(experiment.name, error, run)
                        else:
                            run.notes.append(f"{SIDES[side]} failed at {experiment.name}")
                            tell(str(error))
                        continue
                runs.setdefault(side, []).append(figures)
        results[experiment.name] = {side: medians(figures) for side, figures in runs.items()}
    return results


BENCHMARK = Benchmark(
    "engine.py",
    "Penstock's engine side by side with its peers.",
    GROUPS,
    page,
    repeats=Plan.repeats,
    more=[e.name for e in experiments(TINY) if e.name not in GROUPS],
    arguments={
        "--jobs": {"type": int, "metavar": "N", "help": "the backlog that is drained"},
        "--no-peers": {"action": "store_true", "help": "Penstock alone"},
    },
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main(measure_all))
