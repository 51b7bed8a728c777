"""Staged pipelines side by side with DBOS and Prefect, on one machine in one run.

`python benchmarks/pipeline.py --help`; what is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import report
from harness import Benchmark, Experiment, Measure, Run, call, versions


class Side(NamedTuple):
    name: str
    script: str
    options: dict[str, Any]
    needs: str = ""
    slower: int = 1
    """By how much less it is given to do."""


ENGINE = Side("Penstock", "ours", {"place": "engine"})
ALONE = Side("Penstock, alone", "ours", {"place": "alone"})
DBOS_WAL = Side("DBOS, WAL + flush", "dbos_side", {"wal": True}, "dbos", 4)
DBOS = Side("DBOS as installed", "dbos_side", {"wal": False}, "dbos", 8)
PREFECT = Side("Prefect, ephemeral", "prefect_side", {}, "prefect", 100)
SIDES = (ENGINE, ALONE, DBOS_WAL, DBOS, PREFECT)


def experiments(run: Run) -> Iterator[Experiment]:
    sides = [side for side in SIDES if not side.needs or importlib.util.find_spec(side.needs)]
    if run.options.tiny:
        sides = [ENGINE, ALONE]
    for side in SIDES:
        if side not in sides:
            run.left_out(side.name, "pip install 'penstock[bench]'")
    run.facts["peers"] = ", ".join(versions("dbos", "prefect"))
    jobs = run.sized(2000, 400, 20)
    items = run.sized(2000, 2000, 100)
    for what, at_once, count in (
        ("jobs", 1, jobs // 2),
        ("jobs", 32, jobs),
        ("items", 5, items),
        ("items", 100, items),
    ):
        by_side = {
            side.name: measure(side, what, at_once, max(3, count // side.slower)) for side in sides
        }
        yield Experiment(f"{what} {at_once}", by_side, what, once=(PREFECT.name,))
    for size in (100, 1000, 10_000, 100_000)[: run.sized(4, 3, 2)]:
        alone = {ENGINE.name: measure(ENGINE, "items", 50, size)}
        yield Experiment(f"growth {size}", alone, "growth")
    size = run.sized(100_000, 20_000, 2000)
    yield Experiment(f"beside {size}", {ENGINE.name: measure(ENGINE, "beside", 50, size)}, "beside")


def measure(side: Side, what: str, at_once: int, count: int) -> Measure:
    options = {**side.options, "at_once": at_once, "count": count}
    return lambda folder: call(
        f"staged.{side.script}:measure", what, folder, timeout=900, **options
    )


# -- the page -----------------------------------------------------------------------


def page(everything: dict[str, Any]) -> str:
    results = everything["results"]
    parts = []
    for key, head, columns in TABLES:
        rows = {name: by for name, by in results.items() if name.startswith(key)}
        if rows:
            parts += [head, drawn(rows, columns)]
    growth = {n: by[ENGINE.name] for n, by in results.items() if n.startswith("growth")}
    if growth:
        rows = [
            [
                name.split()[1],
                f"{f['item_us']:,.0f}",
                f"{f['cpu_item_us']:,.0f}",
                f"{f['peak_mib']:,.0f}",
            ]
            for name, f in growth.items()
        ]
        parts += [
            "One map stage under the engine, 50 items at once:",
            report.table(["items", "µs an item", "processor µs an item", "peak MiB"], rows),
        ]
    return report.page(everything, goals(results), *parts)


TABLES = (
    (
        "jobs",
        "Six stages that do nothing; so many jobs at once:",
        (
            ("jobs/s", "jobs_s", "{:,.1f}"),
            ("p50 ms", "p50_ms", "{:,.2f}"),
            ("processor ms a stage", "cpu_stage_ms", "{:,.3f}"),
        ),
    ),
    (
        "items",
        "2,000 items that do nothing (fewer for slower peers), each durable; so many at once:",
        (("items/s", "items_s", "{:,.0f}"), ("processor µs an item", "cpu_item_us", "{:,.0f}")),
    ),
)


def drawn(results: dict[str, Any], columns: Any) -> str:
    first = columns[0][1]
    rows = []
    for key, by_side in results.items():
        ours = by_side[ENGINE.name][first]
        for name, figures in by_side.items():
            cells = [form.format(figures[figure]) for _, figure, form in columns]
            rows.append([key.split()[1], name, *cells, f"{ours / figures[first]:,.1f}x"])
    return report.table(["at once", "", *(head for head, _, _ in columns), "Penstock is"], rows)


def goals(results: dict[str, Any]) -> report.Goals:
    goals = report.Goals()
    for key, wanted in (("jobs 1", 5), ("jobs 32", 20)):
        by = results.get(key, {})
        if ENGINE.name in by and DBOS_WAL.name in by:
            times = by[ENGINE.name]["jobs_s"] / by[DBOS_WAL.name]["jobs_s"]
            said = f"jobs/s, {key.split()[1]} at once: {wanted} times {DBOS_WAL.name}"
            goals.at_least(said, times, wanted, "{:.1f}x")
    for key, most in (("jobs 1", 0.5), ("jobs 32", 0.25)):
        if key in results:
            cost = results[key][ENGINE.name]["cpu_stage_ms"]
            said = f"processor time a stage, {key.split()[1]} at once: at most {most} ms"
            goals.at_most(said, cost, most, "{:.3f} ms")
    if "jobs 1" in results:
        commits = results["jobs 1"][ENGINE.name]["commits_job"]
        goals.at_most("commits a run, one at a time: at most 8", commits, 8, "{:.2f}")
    for key in (name for name in results if name.startswith("items")):
        speed = results[key][ENGINE.name]["items_s"]
        said = f"durable items/s, {key.split()[1]} at once: 25,000"
        goals.at_least(said, speed, 25_000, "{:,.0f}/s")
    growth = {int(k.split()[1]): by[ENGINE.name] for k, by in results.items() if "growth" in k}
    if growth:
        few, most_items = min(growth), max(growth)
        # A run's fixed cost weighs on a hundred items; from a thousand on it is nothing.
        ratio = growth[most_items]["item_us"] / growth[few]["item_us"]
        said = f"cost of an item flat from {few:,} to {most_items:,} (at most 1.5 times)"
        goals.at_most(said, ratio, 1.5)
        more = growth[most_items]["peak_mib"] - growth[few]["peak_mib"]
        said = f"memory flat from {few:,} to {most_items:,} items (at most 30 MiB more)"
        goals.at_most(said, more, 30, "{:,.0f} MiB more")
    for key in (name for name in results if name.startswith("beside")):
        figures = results[key][ENGINE.name]
        beside, alone = figures["beside_p99_ms"], figures["alone_p99_ms"]
        said = f"p99 from submission to start beside {int(key.split()[1]):,} items: at most 3 times"
        shown = f"{beside:.1f} ms, {beside / alone:.1f}x of {alone:.1f} ms"
        goals.add(said, shown, beside <= 3 * alone)
    return goals


BENCHMARK = Benchmark(
    "pipeline.py",
    "Staged pipelines side by side with peers.",
    ("jobs", "items", "growth", "beside"),
    experiments,
    page,
    peers=[side.name for side in SIDES if side.needs],
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
