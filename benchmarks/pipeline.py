"""Staged pipelines side by side with DBOS and Prefect, on one machine in one run.

`python benchmarks/pipeline.py --help`; what is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import report
from measure import busy_percent, flush_times, machine
from options import add_options, command, publish, tell, verdict
from processes import HERE
from run import scratch

GROUPS = ("jobs", "items", "growth", "beside")
_TOO_LONG = 900
_ONCE = 100
"""Who is that much slower is measured once."""


class Side(NamedTuple):
    name: str
    script: str
    options: dict[str, Any]
    needs: str = ""
    slower: int = 1
    """By how much less it is given to do."""


ENGINE = Side("Penstock", "ours.py", {"place": "engine"})
ALONE = Side("Penstock, alone", "ours.py", {"place": "alone"})
DBOS_WAL = Side("DBOS, WAL + flush", "dbos_side.py", {"wal": True}, "dbos", 4)
DBOS = Side("DBOS as installed", "dbos_side.py", {"wal": False}, "dbos", 8)
PREFECT = Side("Prefect, ephemeral", "prefect_side.py", {}, "prefect", 100)
SIDES = (ENGINE, ALONE, DBOS_WAL, DBOS, PREFECT)


def main() -> int:
    options = parse(sys.argv[1:])
    began = time.monotonic()
    busy = [busy_percent()]
    sides = [side for side in SIDES if not side.needs or importlib.util.find_spec(side.needs)]
    if options.tiny:
        sides = [ENGINE, ALONE]
    notes = [
        f"{side.name} was left out: pip install 'penstock[bench]'"
        for side in SIDES
        if side not in sides
    ]
    results: dict[str, Any] = {}
    for what, at_once, count in experiments(options):
        for turn in range(options.repeats or (1 if options.quick or options.tiny else 3)):
            for side in sides if what in ("jobs", "items") else (ENGINE,):
                if turn and side.slower >= _ONCE:
                    continue
                busy.append(busy_percent())
                alone = what in ("growth", "beside")
                amount = count if alone else max(3, count // side.slower)
                key = f"{what} {count if alone else at_once}"
                tell(f"{key}: {side.name}" + (f" ({turn + 1})" if turn else ""))
                figures = measure(side, what, at_once, amount, options.folder)
                if figures is None:
                    notes.append(f"{side.name} failed at {key}")
                    continue
                results.setdefault(key, {}).setdefault(side.name, []).append(figures)
    medians = {
        key: {name: middle(runs) for name, runs in by_side.items()}
        for key, by_side in results.items()
    }
    flush = median(flush_times(options.folder or Path(tempfile.gettempdir()))) * 1e3
    everything = {
        "command": command("pipeline.py", GROUPS, options),
        "date": time.strftime("%Y-%m-%d"),
        "machine": {
            **machine(),
            "disk": f"4 KiB appended and flushed in {flush:.2f} ms (median)",
            "peers": ", ".join(versions()),
            "others": f"kept the cores {median(busy):.0f}% busy (median), at most {max(busy):.0f}%",
        },
        "results": medians,
        "notes": sorted(set(notes)),
    }
    tell(f"took {time.monotonic() - began:.0f} s")
    publish(everything, page(everything), options)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Staged pipelines side by side with peers.")
    parser.add_argument("--quick", action="store_true", help="small sizes: a minute or two")
    parser.add_argument("--tiny", action="store_true", help="Penstock alone, to see that it works")
    add_options(parser, GROUPS)
    return parser.parse_args(arguments)


def experiments(options: argparse.Namespace) -> Iterator[tuple[str, int, int]]:
    """(what, how many at once, how many)."""
    jobs = 20 if options.tiny else 400 if options.quick else 2000
    if "jobs" in options.only:
        yield "jobs", 1, jobs // 2
        yield "jobs", 32, jobs
    if "items" in options.only:
        yield "items", 5, 100 if options.tiny else 2000
        yield "items", 100, 100 if options.tiny else 2000
    if "growth" in options.only:
        for items in sizes(options):
            yield "growth", 50, items
    if "beside" in options.only:
        yield "beside", 50, 2000 if options.tiny else 20_000 if options.quick else 100_000


def sizes(options: argparse.Namespace) -> tuple[int, ...]:
    if options.tiny:
        return 100, 1000
    return (100, 1000, 10_000) if options.quick else (100, 1000, 10_000, 100_000)


def measure(
    side: Side, what: str, at_once: int, amount: int, root: Path | None
) -> dict[str, float] | None:
    given = {**side.options, "at_once": at_once, "jobs": amount, "items": amount}
    with scratch(root) as folder:
        argv = [sys.executable, str(HERE / "staged" / side.script)]
        measured = "items" if what == "growth" else what
        argv += [measured, str(folder), json.dumps(given)]
        try:
            done = subprocess.run(
                argv, capture_output=True, text=True, timeout=_TOO_LONG, check=False
            )
        except subprocess.TimeoutExpired:
            tell(f"took more than {_TOO_LONG} s")
            return None
    if done.returncode:
        tell(done.stderr[-2000:])
        return None
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def middle(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: median(run[name] for run in runs) for name in runs[0]}


def versions() -> Iterator[str]:
    for name in ("dbos", "prefect"):
        if importlib.util.find_spec(name):
            yield f"{name} {importlib.metadata.version(name)}"


# -- the page -----------------------------------------------------------------------


def page(everything: dict[str, Any]) -> str:
    results = everything["results"]
    parts = [*report.origin(everything), targets(results)]
    for key, head, columns in TABLES:
        rows = {name: by for name, by in results.items() if name.startswith(key)}
        if rows:
            parts += [head, drawn(rows, columns)]
    growth = {name: by[ENGINE.name] for name, by in results.items() if name.startswith("growth")}
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
    parts += [f"- {note}" for note in everything["notes"]]
    return "\n\n".join(parts)


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


def targets(results: dict[str, Any]) -> str:
    rows = []
    for key, times_wanted in (("jobs 1", 5), ("jobs 32", 20)):
        by = results.get(key, {})
        if ENGINE.name in by and DBOS_WAL.name in by:
            times = by[ENGINE.name]["jobs_s"] / by[DBOS_WAL.name]["jobs_s"]
            said = f"jobs/s, {key.split()[1]} at once: {times_wanted} times {DBOS_WAL.name}"
            rows.append([said, f"{times:.1f}x", verdict(times >= times_wanted)])
    for key, most in (("jobs 1", 0.5), ("jobs 32", 0.25)):
        if key in results:
            cost = results[key][ENGINE.name]["cpu_stage_ms"]
            said = f"processor time a stage, {key.split()[1]} at once: at most {most} ms"
            rows.append([said, f"{cost:.3f} ms", verdict(cost <= most)])
    if "jobs 1" in results:
        commits = results["jobs 1"][ENGINE.name]["commits_job"]
        rows.append(
            ["commits a run, one at a time: at most 8", f"{commits:.2f}", verdict(commits <= 8)]
        )
    for key in (name for name in results if name.startswith("items")):
        speed = results[key][ENGINE.name]["items_s"]
        said = f"durable items/s, {key.split()[1]} at once: 25,000"
        rows.append([said, f"{speed:,.0f}/s", verdict(speed >= 25_000)])
    growth = {int(k.split()[1]): by[ENGINE.name] for k, by in results.items() if "growth" in k}
    if growth:
        few, most_items = min(growth), max(growth)
        # A run's fixed cost weighs on a hundred items; from a thousand on it is nothing.
        ratio = growth[most_items]["item_us"] / growth[few]["item_us"]
        said = f"cost of an item flat from {few:,} to {most_items:,} (at most 1.5 times)"
        rows.append([said, f"{ratio:.2f}x", verdict(ratio <= 1.5)])
        more = growth[most_items]["peak_mib"] - growth[few]["peak_mib"]
        said = f"memory flat from {few:,} to {most_items:,} items (at most 30 MiB more)"
        rows.append([said, f"{more:,.0f} MiB more", verdict(more <= 30)])
    for key in (name for name in results if name.startswith("beside")):
        figures = results[key][ENGINE.name]
        times = figures["beside_p99_ms"] / figures["alone_p99_ms"]
        said = f"p99 from submission to start beside {int(key.split()[1]):,} items: at most 3 times"
        shown = (
            f"{figures['beside_p99_ms']:.1f} ms, {times:.1f}x of {figures['alone_p99_ms']:.1f} ms"
        )
        rows.append([said, shown, verdict(times <= 3)])
    return report.table(["to reach", "figure", ""], rows) if rows else ""


if __name__ == "__main__":
    sys.exit(main())
