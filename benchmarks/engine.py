"""Penstock's engine side by side with its peers, on one machine in one run.

`python benchmarks/engine.py --help`; what is measured and how: benchmarks/README.md.
"""

# The dash is meant: what is made here is read by people.
# ruff: noqa: RUF001

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from goals import Figure, Results, goals, look_up
from harness import Benchmark, Experiment, Figures, Measure, Run, call, versions
from peers import huey, pgqueuer
from peers.sides import HUEY, HUEY_FSYNC, PEERS, PENSTOCK, PGQUEUER, SIDES, missing, servers
from report import origin, shown, table, times

RATE = 100
"""Jobs a second while latency is measured."""
BULK = 1000
"""Jobs in one call."""
IDEMPOTENT = "job.bench.idempotent"
GROUPS = (
    *("drain", "sustained", "submit", "children", "latency", "http"),
    *("growth", "memory", "placement", "idle", "kill"),
)


@dataclass(frozen=True)
class Plan:
    """The sizes of a run."""

    jobs: int = 60_000
    """Penstock's backlog."""
    peer_jobs: int = 10_000
    """The peers': shallower, because they are slower; a deep one would slow them more."""
    embedded_jobs: int = 100_000
    """The backlog that runs while a loop submits in the same process."""
    seconds: float = 5.0
    """How long something that goes on at a steady pace is watched."""
    submit_seconds: float = 2.5
    http_seconds: float = 3.0
    idle_seconds: float = 20.0
    children: int = 100_000
    """Jobs that are mapped over and gathered."""
    stored: tuple[int, ...] = (1_000, 10_000, 100_000, 1_000_000)
    growth_jobs: int = 20_000
    waiting: int = 100_000
    placed_jobs: int = 50_000
    kill_window: float = 40.0


QUICK = Plan(
    jobs=20_000,
    peer_jobs=2_000,
    embedded_jobs=20_000,
    seconds=2.0,
    submit_seconds=1.0,
    http_seconds=1.0,
    idle_seconds=4.0,
    children=10_000,
    stored=(1_000, 10_000, 100_000),
    growth_jobs=5_000,
    waiting=10_000,
    placed_jobs=20_000,
    kill_window=8.0,
)
TINY = Plan(
    jobs=500,
    peer_jobs=200,
    embedded_jobs=3_000,
    seconds=0.5,
    submit_seconds=0.2,
    http_seconds=0.2,
    idle_seconds=0.5,
    children=1_500,
    stored=(500, 1_000),
    growth_jobs=500,
    waiting=500,
    placed_jobs=1_000,
    kill_window=8.0,
)
"""Says nothing about speed: for the test that it runs."""


# -- experiments --------------------------------------------------------------------


def experiments(run: Run) -> Iterator[Experiment]:
    plan: Plan = run.sized(Plan(), QUICK, TINY)
    if jobs := run.options.jobs:
        plan = replace(plan, jobs=jobs, peer_jobs=min(plan.peer_jobs, jobs))
    run.more["plan"] = asdict(plan)
    peers = []
    for side in () if run.options.no_peers else PEERS:
        if why := missing(side):
            run.left_out(SIDES[side], why)
        else:
            peers.append(side)
    if not run.options.no_peers:
        found = [*versions("huey", "pgqueuer", "dramatiq")]
        found += [f"{name} {version}" for name, version in servers().items()]
        run.facts["peers"] = ", ".join(found)
    yield from compared(plan, peers)
    yield from alone(plan)
    yield from filled(plan, run)


def ours(function: str, **options: Any) -> dict[str, Measure]:
    return {PENSTOCK: lambda folder: call(function, folder / "data", **options)}


def compared(plan: Plan, peers: Sequence[str]) -> Iterator[Experiment]:
    """What the peers do as well."""

    def theirs(measure: str, peers: Iterable[str] = peers, **options: Any) -> dict[str, Measure]:
        return {
            side: lambda folder, side=side: call(
                "peers.measures:of_peer", side, folder, measure, **options
            )
            for side in peers
        }

    for workers in (1, 2):
        mine = ours("ours.speed:drain", jobs=plan.jobs, workers=workers)
        sides = mine | theirs("drain", jobs=plan.peer_jobs, workers=workers)
        yield Experiment(f"drain-{workers}", sides, "drain")
    seconds = plan.submit_seconds
    mine = ours("ours.blocking:submit_apart", seconds=seconds)
    yield Experiment("submit-apart", mine | theirs("submit", seconds=seconds, bulk=BULK), "submit")
    steady = {"seconds": plan.seconds, "rate": RATE}
    yield Experiment("latency", ours("ours.speed:latency", **steady) | theirs("latency", **steady))
    kill = {"jobs": 300, "after": 77, "window": plan.kill_window}
    synced = [side for side in peers if side != HUEY]  # a worker dies, the disk does not
    mine = ours("ours.steadiness:kill", **kill, slots=8)
    yield Experiment("kill", mine | theirs("kill", synced, **kill), once=True)


def alone(plan: Plan) -> Iterator[Experiment]:
    """What there is nothing to compare with, or only the figure of another experiment."""
    jobs = plan.jobs
    mine = ours("ours.speed:drain_in_process", jobs=jobs)
    yield Experiment("drain-in-process", mine, "drain")
    for name, topic in (("threads", "job.bench.thread"), ("idempotent", IDEMPOTENT)):
        mine = ours("ours.speed:drain", jobs=jobs, workers=1, topic=topic)
        yield Experiment(f"drain-{name}", mine, "drain")
    steady: dict[str, Any] = {"seconds": plan.seconds, "in_flight": 1000}
    for name, how in (("", {}), ("-bulk", {"bulk": 100}), ("-idempotent", {"topic": IDEMPOTENT})):
        mine = ours("ours.speed:sustain", **steady | how)
        yield Experiment(f"sustained{name}", mine, "sustained")
    seconds = plan.submit_seconds
    backlogs = {"backlog": plan.embedded_jobs, "short_jobs": max(600, int(8000 * seconds))}
    mine = ours("ours.blocking:submit_embedded", seconds=seconds, **backlogs)
    yield Experiment("submit-embedded", mine, "submit")
    mine = ours("ours.speed:submit", seconds=seconds, in_flight=64, bulk=BULK)
    yield Experiment("submit-async", mine, "submit")
    yield Experiment("children", ours("ours.speed:children", jobs=plan.children))
    mine = ours("ours.speed:latency", seconds=plan.seconds, rate=RATE, topic=IDEMPOTENT)
    yield Experiment("latency-idempotent", mine, "latency")
    # One small job a request, and an endpoint that does next to nothing on the same server.
    for name, server in (("plain", "plain"), ("bare", "bare"), ("submit", "penstock")):
        load = {"server": server, "seconds": plan.http_seconds, "connections": 64}
        yield Experiment(f"http-{name}", ours("web.submitting:http_requests", **load), "http")
    few = {"workers": 100, "tenants": 1000, "jobs": plan.placed_jobs}
    yield Experiment("placement", ours("ours.placing:placement", **few))
    yield Experiment("idle", ours("ours.steadiness:idle", seconds=plan.idle_seconds), once=True)


def filled(plan: Plan, run: Run) -> Iterator[Experiment]:
    """A store that is filled tenfold at a time, and what a job costs at each size."""
    base = run.folder / "data"

    def cost(folder: Path, stored: int) -> Figures:
        """Measured on a copy, so that the store keeps its size."""
        call("ours.size:fill", base, jobs=stored)
        shutil.copytree(base, folder / "data")
        os.sync()  # the copy's own writing should not weigh on what is measured
        options = {"jobs": plan.growth_jobs, "seconds": plan.seconds / 2, "rate": RATE}
        return {"stored": stored, **call("ours.size:cost", folder / "data", **options)}

    def memory(_: Path) -> Figures:
        stored = plan.stored[-1]
        call("ours.size:fill", base, jobs=stored)
        figures = call("ours.size:memory", base, waiting=plan.waiting)
        figures |= call("ours.size:memory_again", base)
        return {"stored": stored, "waiting": plan.waiting, **figures}

    for stored in plan.stored:
        sides: dict[str, Measure] = {PENSTOCK: lambda folder, n=stored: cost(folder, n)}
        yield Experiment(f"growth-{stored}", sides, "growth")
    yield Experiment("memory", {PENSTOCK: memory}, once=True)


# -- the page -----------------------------------------------------------------------

ROWS = """
drained by 1 worker process, jobs/s | drain-1 rate
drained by 2 worker processes, jobs/s | drain-2 rate
drained in process, jobs/s | drain-in-process rate
drained by 1 worker process, plain `def` in threads, jobs/s | drain-threads rate
drained by 1 worker process, idempotent jobs, jobs/s | drain-idempotent rate
processor a job, 1 worker process, µs | drain-1 cpu_us
– of it the engine, µs | drain-1 engine_us
– of it the worker, µs | drain-1 worker_us
– idempotent jobs, µs | drain-idempotent cpu_us
sustained, submit to durable end, jobs/s | sustained rate
– processor a job, all processes, µs | sustained cpu_us
sustained, submitted in hundreds, jobs/s | sustained-bulk rate
sustained, idempotent jobs, jobs/s | sustained-idempotent rate
submitted one after another, synchronous, engine apart, jobs/s | submit-apart one
– while a worker process runs them | submit-apart running_one
– embedded, its own jobs running | submit-embedded own
– embedded, 10 ms jobs running | submit-embedded short_one
– embedded, a no-op backlog running | submit-embedded noop_one
10 ms jobs run in process, no loop submitting, jobs/s | submit-embedded short_alone
– while the loop submits | submit-embedded short_beside
no-op jobs run in process, no loop submitting, jobs/s | submit-embedded noop_alone
– while the loop submits | submit-embedded noop_beside
submitted one after another, asynchronous, embedded, jobs/s | submit-async one
submitted one by one, 64 in flight, jobs/s | submit-async many
submitted, 1,000 a call, jobs/s | submit-async bulk
mapped over, 100,000 items, jobs/s | children map
– submitted in the same run, 1,000 a call | children submit
gathered, 100,000 jobs run by 1 worker process, jobs/s | children gather
– drained in the same run | children drain
latency p50 at 100 jobs/s, ms | latency p50_ms
latency p99 at 100 jobs/s, ms | latency p99_ms
– p50 in disk flushes | latency p50_flushes
– p99 in disk flushes | latency p99_flushes
– p50 of idempotent jobs, ms | latency-idempotent p50_ms
– p99 of idempotent jobs, ms | latency-idempotent p99_ms
HTTP, one job a request, requests/s | http-submit rate
– p50, ms | http-submit p50_ms
– the server's processor a request, µs | http-submit cpu_us
trivial endpoint, the server as Penstock sets it, requests/s | http-bare rate
trivial endpoint, uvicorn with its defaults, requests/s | http-plain rate
killed worker: jobs missing | kill missing
killed worker: jobs executed twice | kill run_twice
killed worker: results applied twice | kill applied_twice
killed worker: all done after, s | kill all_done_s
idle engine and worker, % of a core | idle cpu_percent
"""
"""A label, the experiment and its figure."""
FORMS = {"_ms": "{:.2f}", "_percent": "{:.2f}", "_flushes": "{:.1f}", "_done_s": "{:.1f}"}
"""Of figures that end so; others have no decimals."""
_ONE = ("submit-apart", "one")
THEIRS = {("submit-async", "bulk"): ("submit-apart", "bulk")} | {
    ("submit-embedded", name): _ONE for name in ("own", "short_one", "noop_one")
}
"""The peers' figure, where it has another name."""


def page(everything: dict[str, Any]) -> str:
    """All of it, as Markdown."""
    results = everything["results"]
    sides = [s for s in SIDES if s == PENSTOCK or any(s in found for found in results.values())]
    parts = [
        *origin(everything),
        *(f"Note: {note}." for note in everything["notes"]),
        goals(results).table(),
        side_by_side(results, sides),
        *unlike(results, sides),
        growth([by[PENSTOCK] for name, by in results.items() if name.startswith("growth")]),
    ]
    if found := results.get("memory"):
        parts.append(memory(found[PENSTOCK]))
    return "\n\n".join(part for part in parts if part)


def side_by_side(results: Results, sides: Sequence[str]) -> str:
    rows = []
    for line in ROWS.strip().splitlines():
        label, _, figure = line.rpartition(" | ")
        experiment, name = figure.split()
        if experiment in results:
            cells = (_cell(results, (experiment, name), side) for side in sides)
            rows.append([label, *cells])
    return table(["", *(SIDES[side] for side in sides)], rows) if rows else ""


def _cell(results: Results, figure: Figure, side: str) -> str:
    value = look_up(results, figure if side == PENSTOCK else THEIRS.get(figure, figure), side)
    forms = (form for end, form in FORMS.items() if figure[1].endswith(end))
    text = shown(value, next(forms, "{:,.0f}"))
    ours = look_up(results, figure)
    if side == PENSTOCK or figure[0] == "kill" or not ours or not value:
        return text
    less_is_better = figure[1].endswith(("_us", "_ms"))
    return f"{text} ({times(value / ours if less_is_better else ours / value)})"


def unlike(results: Results, sides: Sequence[str]) -> Iterable[str]:
    """What differs between the sides, and not because one is better."""
    if len(sides) < 2:
        return
    if {HUEY, HUEY_FSYNC} & {*sides}:
        yield (
            f"Huey's consumer polls every {huey.POLL * 1000:.0f} ms (its default; it waits longer"
            " the longer it has been idle): its latency is mostly that. It has no bulk call."
        )
    if PGQUEUER in sides:
        yield (
            f"PgQueuer: workers dequeue {pgqueuer.BATCH} jobs at a time, through asyncpg; the"
            " server has fsync and synchronous_commit on. Its processor time has the server's."
        )
    if "kill" in results:
        yield (
            "Killed worker: measured once. Penstock's job is marked idempotent, so that it may run"
            " again; a peer's job is not tried again, or later than the measurement lasts."
        )


def growth(costs: Sequence[Figures]) -> str:
    columns = {
        "stored jobs": ("stored", "{:,.0f}"),
        "start, s": ("start_s", "{:.2f}"),
        "submitted in bulk/s": ("submit_rate", "{:,.0f}"),
        "drained/s": ("rate", "{:,.0f}"),
        "processor a job, µs": ("total_us", "{:.1f}"),
        "p50, ms": ("p50_ms", "{:.2f}"),
        "engine's memory, MiB": ("rss_mb", "{:.0f}"),
        "processor, relative": ("relative", "{:.2f}"),
    }
    rows = []
    for cost in costs:
        ours, base = cost.get("total_us"), costs[0].get("total_us")
        found = {**cost, "relative": ours / base if ours and base else None}
        rows.append([shown(found.get(name), form) for name, form in columns.values()])
    return table([*columns], rows) if rows else ""


def memory(figures: Figures) -> str:
    rows = [
        [f"{figures['stored']:,.0f} finished", shown(figures["before_mb"], "{:.0f}")],
        [f"and {figures['waiting']:,.0f} waiting", shown(figures["filled_mb"], "{:.0f}")],
        ["the same, after a restart", shown(figures["restarted_mb"], "{:.0f}")],
    ]
    return table(["jobs in the store", "engine's memory, MiB"], rows)


BENCHMARK = Benchmark(
    "engine.py",
    "Penstock's engine side by side with its peers.",
    GROUPS,
    experiments,
    page,
    names=[e.name for e in (*compared(TINY, ()), *alone(TINY)) if e.name not in GROUPS],
    titles=SIDES,
    peers=PEERS,
    arguments={
        "--jobs": {"type": int, "metavar": "N", "help": "the backlog that is drained"},
        "--no-peers": {"action": "store_true", "help": "Penstock alone"},
    },
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
