"""Penstock on PostgreSQL side by side with engines whose queue is PostgreSQL.

`python benchmarks/scale_out.py --help`; what is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import Benchmark, Experiment, Figures, Measure, Run, call, versions
from peers import pgqueuer, procrastinate
from peers.postgres import Postgres
from peers.sides import PENSTOCK, PGQUEUER, PROCRASTINATE, SIDES, missing, servers
from report import Goals, origin, shown, table

RATE = 100
"""Jobs a second while latency is measured."""
PEERS = (PGQUEUER, PROCRASTINATE)
GROUPS = ("through", "drain", "submit", "latency", "takeover")


@dataclass(frozen=True)
class Plan:
    """The sizes of a run."""

    jobs: int = 20_000
    slow_jobs: int = 3_000
    """Procrastinate's: it is slower, and a deep backlog would slow it more."""
    seconds: float = 5.0


QUICK = Plan(jobs=10_000, slow_jobs=1_500, seconds=3.0)
TINY = Plan(jobs=300, slow_jobs=100, seconds=0.5)


def on_postgres(function: str, **options: Any) -> Measure:
    """Penstock, with its jobs in a server of its own that is set up as the peers' are."""

    def measure(folder: Path) -> Figures:
        home = folder / "engine"
        home.mkdir()
        with closing(Postgres(folder)) as server:
            store = {
                "PENSTOCK_STORE": server.url,
                "PENSTOCK_STORAGE__BLOBS": str(home / "blobs"),
            }
            figures: Figures = call(function, home / "data", environment=store, **options)
            return figures

    return measure


def of_peer(side: str, measure: str, **options: Any) -> Measure:
    return lambda folder: call("peers.measures:of_peer", side, folder, measure, **options)


def experiments(run: Run) -> Iterator[Experiment]:
    plan: Plan = run.sized(Plan(), QUICK, TINY)
    run.more["plan"] = asdict(plan)
    peers = []
    for side in PEERS:
        if why := missing(side):
            run.left_out(SIDES[side], why)
        else:
            peers.append(side)
    found = [*versions("pgqueuer", "procrastinate")]
    found += [f"PostgreSQL {servers().get('PostgreSQL', 'is missing')}"]
    run.facts["peers"] = ", ".join(found)
    jobs = {PGQUEUER: plan.jobs, PROCRASTINATE: plan.slow_jobs}
    for workers in (1, 2):
        for name, ours in (("through", "ours.cluster:through"), ("drain", "ours.speed:drain")):
            sides = {PENSTOCK: on_postgres(ours, jobs=plan.jobs, workers=workers)}
            for peer in peers:
                sides[peer] = of_peer(peer, name, jobs=jobs[peer], workers=workers)
            yield Experiment(f"{name}-{workers}", sides, name)
    sides = {PENSTOCK: on_postgres("ours.blocking:submit_apart", seconds=plan.seconds / 2)}
    for peer in peers:
        sides[peer] = of_peer(peer, "submit", seconds=plan.seconds / 2, bulk=1000)
    yield Experiment("submit", sides)
    steady = {"seconds": plan.seconds, "rate": RATE}
    sides = {PENSTOCK: on_postgres("ours.speed:latency", **steady)}
    sides |= {peer: of_peer(peer, "latency", **steady) for peer in peers}
    yield Experiment("latency", sides)
    yield Experiment("takeover", {PENSTOCK: on_postgres("ours.cluster:takeover")})


ROWS = {
    "submit to done, 1,000 a call, 1 worker process, jobs/s": ("through-1", "rate"),
    "submit to done, 1,000 a call, 2 worker processes, jobs/s": ("through-2", "rate"),
    "drained by 1 worker process, jobs/s": ("drain-1", "rate"),
    "drained by 2 worker processes, jobs/s": ("drain-2", "rate"),
    "processor a job without the server's, 1 worker process, µs": ("drain-1", "cpu_us"),
    "submitted one after another, synchronous, jobs/s": ("submit", "one"),
    f"latency p50 at {RATE} jobs/s, ms": ("latency", "p50_ms"),
    f"latency p99 at {RATE} jobs/s, ms": ("latency", "p99_ms"),
    "killed owner: the next job done after, s": ("takeover", "takeover_s"),
}


def short(side: str) -> str:
    return SIDES[side].partition(",")[0]


def page(everything: dict[str, Any]) -> str:
    results = everything["results"]

    def figure(experiment: str, name: str, side: str = PENSTOCK) -> float | None:
        found: float | None = results.get(experiment, {}).get(side, {}).get(name)
        return found

    goals = Goals()
    for name, work in (("through", "submit to done"), ("drain", "drained")):
        for workers in (1, 2):
            for peer, least in ((PGQUEUER, 1.5), (PROCRASTINATE, 3.0)):
                ours, theirs = (figure(f"{name}-{workers}", "rate", s) for s in (PENSTOCK, peer))
                if ours and theirs:
                    aim = f"{work}, worker processes: {workers}; {least:g} times {short(peer)}"
                    goals.at_least(aim, ours / theirs, least)
    p50 = {side: figure("latency", "p50_ms", side) for side in (PENSTOCK, *PEERS)}
    if (ours := p50[PENSTOCK]) and (best := min(filter(None, (p50[s] for s in PEERS)), default=0)):
        goals.at_most("p50 at most the best peer's", ours / best, 1)
    if seconds := figure("takeover", "takeover_s"):
        goals.at_most("a killed owner is replaced in less than 5 s", seconds, 5, "{:.1f} s")
    sides = [s for s in (PENSTOCK, *PEERS) if any(s in found for found in results.values())]
    rows = []
    for label, (experiment, name) in ROWS.items():
        if experiment in results:
            form = "{:.2f}" if name.endswith(("_ms", "_s")) else "{:,.0f}"
            rows.append([label, *(shown(figure(experiment, name, side), form) for side in sides)])
    parts = [
        *origin(everything),
        *(f"Note: {note}." for note in everything["notes"]),
        goals.table(),
        table(["", *map(short, sides)], rows),
        f"""\
All with PostgreSQL, fsync and synchronous_commit on. PgQueuer's workers dequeue {pgqueuer.BATCH}
jobs at a time; Procrastinate's run {procrastinate.CONCURRENCY} at once. A job of Penstock counts
when its end is durable, a peer's when it was executed; Penstock's latency is until a waiter hears
of the end. The peers' processor time has the server's first process in it, Penstock's the engine.\
""",
    ]
    return "\n\n".join(part for part in parts if part)


BENCHMARK = Benchmark(
    "scale_out.py",
    "Penstock on PostgreSQL side by side with PgQueuer and Procrastinate.",
    GROUPS,
    experiments,
    page,
    names=[f"{name}-{workers}" for name in ("through", "drain") for workers in (1, 2)],
    titles=SIDES,
    peers=PEERS,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
