"""The dashboard: how soon its pages have their data with a million stored jobs, and what it costs
the engine that people keep it open.

`python benchmarks/dashboard.py --help`; what is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from harness import Benchmark, Experiment, Figures, Measure, Run, Server, call, serving
from http_api import filled
from http_servers import PENSTOCK, aimed_at, get
from ours.system import RARE, TENANTS, topic_of
from report import Goal, Results, judged, look_up, shown, table
from report import page as paged

SIZES: dict[str, tuple[Any, Any, Any]] = {
    # Of a whole, a quick and a tiny run; a tiny one only shows that it runs.
    "stored": (1_000_000, 100_000, 1000),
    "look_seconds": (1.0, 0.3, 0.05),
    "viewers": (50, 50, 3),
    "watch_seconds": (30.0, 10.0, 0.5),
}
FRAME = ["/v1/me", "/v1/status"]
"""Of every page."""
OVERVIEW = [
    *("/v1/status", "/v1/counts", "/v1/timeline?minutes=60", "/v1/pools", "/v1/workers"),
    "/v1/dead?limit=1&total=true",
]
VIEW = {"stream": "/v1/stream?kind=counts&kind=worker&kind=pool", "paths": OVERVIEW, "every": 30.0}
"""The stream of an overview, and what it reads again although nothing happened."""
FILTERS: dict[str, dict[str, str]] = {
    "jobs": {},
    "jobs by state, few and old": {"state": "FAILED"},
    "jobs by topic": {"topic": topic_of(TENANTS[1])},
    "jobs by part of a topic, few and old": {"topic": f"*{RARE}*"},
    "jobs by tenant, few and old": {"tenant": RARE},
    "dead letters": {"dead": "true"},
}


def experiments(run: Run) -> Iterator[Experiment]:
    plan = run.plan(SIZES)

    def on_store(measure: Callable[..., Figures], **options: Any) -> dict[str, Measure]:
        store = run.folder / "store"
        return {PENSTOCK: lambda _: measure(filled(store, plan.stored), **options)}

    looks = on_store(first_looks, seconds=plan.look_seconds)
    yield Experiment("pages", looks, once=True)
    views = on_store(watched, viewers=plan.viewers, seconds=plan.watch_seconds)
    yield Experiment("viewers", views, once=True)


def first_looks(folder: Path, *, seconds: float) -> Figures:
    """Milliseconds of all requests of a page, one after another: median and worst (p99)."""
    with serving("http_servers:penstock", folder) as server:
        pages = {name: [*FRAME, *paths] for name, paths in pages_of(server).items()}
        wanted = sorted({path for paths in pages.values() for path in paths})
        loads = [aimed_at(server, paths=[p], seconds=seconds, warm_up=0.1) for p in wanted]
        found = dict(zip(wanted, call("load:drive_all", loads), strict=True))
    return {
        f"{name} {figure}": sum(found[path][figure] for path in paths)
        for name, paths in pages.items()
        for figure in ("p50_ms", "p99_ms")
    }


def pages_of(server: Server) -> dict[str, list[str]]:
    job = get(server, "/v1/jobs?limit=1")["jobs"][0]["job_id"]
    asked = {"limit": "50", "why": "true", "total": "true"}
    lists = {
        name: ["/v1/counts", "/v1/topics/schemas", f"/v1/jobs?{urlencode({**asked, **filters})}"]
        for name, filters in FILTERS.items()
    }
    parts = ("?why=true", "/history", "/children/counts", "/policy", "/result")
    tries = f"/v1/jobs?first_try={job}&limit=20"
    return {"overview": OVERVIEW, **lists, "a job": [*(f"/v1/jobs/{job}{p}" for p in parts), tries]}


def watched(folder: Path, *, viewers: int, seconds: float) -> Figures:
    """The share of a core that an idle engine takes with so many overviews open, and with none."""
    with serving("http_servers:penstock", folder) as server:
        alone, with_all = (
            call("load:view", **aimed_at(server, viewers=n, seconds=seconds, **VIEW))
            for n in (0, viewers)
        )
    return {"alone_percent": alone, "watched_percent": with_all}


# -- the page -------------------------------------------------------------------------


def page(everything: dict[str, Any]) -> str:
    results, plan = everything["results"], everything["plan"]
    rows = [
        [name, *(shown(look_up(results, f"pages {name} {end}"), "{:.1f}") for end in ENDS)]
        for name in names(results)
    ]
    head = f"first look with {plan['stored']:,} jobs: all requests of a page"
    looks = table([head, "p50, ms", "p99, ms"], rows) if rows else ""
    return paged(everything, judged(goals(results, plan), results, {}), looks)


ENDS = ("p50_ms", "p99_ms")


def names(results: Results) -> list[str]:
    found = results.get("pages", {}).get(PENSTOCK, {})
    return [figure.removesuffix(" p50_ms") for figure in found if figure.endswith(" p50_ms")]


def goals(results: Results, plan: dict[str, Any]) -> Iterator[Goal]:
    pages = {name: look_up(results, f"pages {name} p99_ms") or 0 for name in names(results)}
    if pages:
        worst = max(pages, key=lambda name: pages[name])
        work = f"{plan['stored']:,} stored jobs: the data of the slowest page ({worst})"
        yield Goal(work, f"pages {worst} p99_ms", most=300, form="{:.0f} ms")
    work = f"{plan['viewers']} viewers of an idle engine, of a core"
    yield Goal(work, "viewers watched_percent", most=5, form="{:.1f}%")
    yield Goal("the same without viewers", "viewers alone_percent", form="{:.1f}%")


BENCHMARK = Benchmark(
    "dashboard.py", "What the dashboard asks of an engine.", ("pages", "viewers"), experiments, page
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
