"""The dashboard: how soon its pages have their data with a million stored jobs, and what it costs
the engine that people keep it open.

`python benchmarks/dashboard.py --help`; what is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import Benchmark, Experiment, Figures, Run, call, tell
from report import Goals, table
from report import page as paged

_MOST_MS, _MOST_SHARE = 300.0, 0.05


@dataclass(frozen=True)
class Plan:
    """The sizes of a run."""

    stored: int = 1_000_000
    look_seconds: float = 1.0
    """How long each request is repeated."""
    viewers: int = 50
    watch_seconds: float = 30.0


QUICK = Plan(stored=100_000, look_seconds=0.3, watch_seconds=10.0)
TINY = Plan(stored=1000, look_seconds=0.05, viewers=3, watch_seconds=0.5)
"""Says nothing about speed: for the test that it runs."""


def experiments(run: Run) -> Iterator[Experiment]:
    plan: Plan = run.sized(Plan(), QUICK, TINY)
    run.more["plan"] = asdict(plan)

    def on_store(function: str, **options: Any) -> Figures:
        return call(f"web.viewing:{function}", _store(run.folder, plan.stored), **options)

    looks = {"seconds": plan.look_seconds}
    yield Experiment("pages", {"dashboard": lambda _: on_store("first_looks", **looks)}, once=True)
    watch = {"viewers": plan.viewers, "seconds": plan.watch_seconds}
    yield Experiment("viewers", {"dashboard": lambda _: on_store("watched", **watch)}, once=True)


def _store(folder: Path, stored: int) -> Path:
    """A store with so many finished jobs, filled when it is first needed."""
    if not (data := folder / "data").exists():
        tell(f"store with {stored:,} finished jobs")
        call("ours.speed:fill", data, jobs=stored, varied=True)
    return data


def page(everything: dict[str, Any]) -> str:
    results, plan, goals, parts = everything["results"], everything["plan"], Goals(), []
    if found := results.get("pages", {}).get("dashboard"):
        names = [figure.removesuffix(" p50_ms") for figure in found if figure.endswith(" p50_ms")]
        worst = max(names, key=lambda name: float(found[f"{name} p99_ms"]))
        aim = f"{plan['stored']:,} stored jobs: the data of a page in 300 ms of server time"
        goals.at_most(aim, found[f"{worst} p99_ms"], _MOST_MS, f"at most {{:.0f}} ms ({worst})")
        rows = [[n, f"{found[f'{n} p50_ms']:.1f}", f"{found[f'{n} p99_ms']:.1f}"] for n in names]
        head = f"first look with {plan['stored']:,} jobs: all requests of a page"
        parts.append(table([head, "p50, ms", "p99, ms"], rows))
    if found := results.get("viewers", {}).get("dashboard"):
        aim = f"{plan['viewers']} viewers of an idle engine: 5% of a core"
        form = f"{{:.1%}} (without them {found['alone']:.1%})"
        goals.at_most(aim, found["watched"], _MOST_SHARE, form)
    return paged(everything, goals, *parts)


BENCHMARK = Benchmark(
    "dashboard.py", "What the dashboard asks of an engine.", ("pages", "viewers"), experiments, page
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
