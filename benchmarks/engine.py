"""Penstock's engine side by side with its peers, on one machine in one run.

`python benchmarks/engine.py --help`; what is measured and how: benchmarks/README.md.
"""

# The dash and the multiplication sign are meant: what is made here is read by people.
# ruff: noqa: RUF001

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness import Benchmark, Experiment, Figures, Measure, Run, call, measured, versions
from http_api import of, requests
from peers import huey, pgqueuer
from peers.sides import HUEY, HUEY_FSYNC, PEERS, PENSTOCK, PGQUEUER, SIDES, missing, servers
from report import Goal, Results, by_figure, by_side, judged, look_up
from report import page as paged

RATE = 100
"""Jobs a second while latency is measured."""
BULK = 1000
"""Jobs in one call."""
IDEMPOTENT = "job.bench.idempotent"
GROUPS = (
    *("drain", "sustained", "submit", "children", "latency", "http"),
    *("growth", "memory", "placement", "idle", "kill"),
)
SIZES: dict[str, tuple[Any, Any, Any]] = {
    # Of a whole, a quick and a tiny run; a tiny one only shows that it runs.
    "jobs": (60_000, 20_000, 500),
    # The peers' backlog is shallower, because they are slower; a deep one would slow them more.
    "peer_jobs": (10_000, 2_000, 200),
    # What runs while a loop submits in the same process.
    "embedded_jobs": (100_000, 20_000, 3_000),
    "seconds": (5.0, 2.0, 0.5),
    "submit_seconds": (2.5, 1.0, 0.2),
    "http_seconds": (3.0, 1.0, 0.2),
    "idle_seconds": (20.0, 4.0, 0.5),
    "children": (100_000, 10_000, 1_500),
    "stored": ((1_000, 10_000, 100_000, 1_000_000), (1_000, 10_000, 100_000), (500, 1_000)),
    "growth_jobs": (20_000, 5_000, 500),
    "waiting": (100_000, 10_000, 500),
    "placed_jobs": (50_000, 20_000, 1_000),
    "kill_window": (40.0, 8.0, 8.0),
}


# -- experiments --------------------------------------------------------------------


def experiments(run: Run) -> Iterator[Experiment]:
    plan = run.plan(SIZES)
    if jobs := run.options.jobs:
        plan.jobs, plan.peer_jobs = jobs, min(plan.peer_jobs, jobs)
        run.more["plan"] |= {"jobs": jobs, "peer_jobs": plan.peer_jobs}
    if not run.options.no_peers:
        found = [*versions("huey", "pgqueuer", "dramatiq")]
        found += [f"{name} {version}" for name, version in servers().items()]
        run.facts["peers"] = ", ".join(found)
    yield from compared(plan)
    yield from alone(plan)
    yield from filled(plan, run)


def ours(function: str, **options: Any) -> dict[str, Measure]:
    return {PENSTOCK: lambda folder: call(function, folder / "data", **options)}


def theirs(measure: str, peers: Iterable[str] = PEERS, **options: Any) -> dict[str, Measure]:
    return {side: measured("peers.measures:of_peer", side, measure, **options) for side in peers}


def compared(plan: SimpleNamespace) -> Iterator[Experiment]:
    """What the peers do as well."""
    for workers in (1, 2):
        mine = ours("ours.speed:drain", jobs=plan.jobs, workers=workers)
        sides = mine | theirs("drain", jobs=plan.peer_jobs, workers=workers)
        yield Experiment(f"drain-{workers}", sides, "drain")
    seconds = plan.submit_seconds
    mine = ours("ours.speed:submit_apart", seconds=seconds)
    yield Experiment("submit-apart", mine | theirs("submit", seconds=seconds, bulk=BULK), "submit")
    steady = {"seconds": plan.seconds, "rate": RATE}
    yield Experiment("latency", ours("ours.speed:latency", **steady) | theirs("latency", **steady))
    kill = {"jobs": 300, "after": 77, "window": plan.kill_window}
    synced = [side for side in PEERS if side != HUEY]  # a worker dies, the disk does not
    mine = ours("ours.speed:kill", **kill, slots=8)
    yield Experiment("kill", mine | theirs("kill", synced, **kill), once=True)


def alone(plan: SimpleNamespace) -> Iterator[Experiment]:
    """What there is nothing to compare with, or only the figure of another experiment."""
    jobs, seconds = plan.jobs, plan.submit_seconds
    full = {"seconds": plan.seconds, "in_flight": 1000}
    steady = {"seconds": plan.seconds, "rate": RATE}
    backlogs = {"backlog": plan.embedded_jobs, "short_jobs": max(600, int(8000 * seconds))}
    for name, function, options in (
        ("drain-in-process", "drain_in_process", {"jobs": jobs}),
        ("drain-threads", "drain", {"jobs": jobs, "workers": 1, "topic": "job.bench.thread"}),
        ("drain-idempotent", "drain", {"jobs": jobs, "workers": 1, "topic": IDEMPOTENT}),
        ("sustained", "sustain", full),
        ("sustained-bulk", "sustain", {**full, "bulk": 100}),
        ("sustained-idempotent", "sustain", {**full, "topic": IDEMPOTENT}),
        ("submit-embedded", "submit_embedded", {"seconds": seconds, **backlogs}),
        ("submit-async", "submit", {"seconds": seconds, "in_flight": 64, "bulk": BULK}),
        ("children", "children", {"jobs": plan.children}),
        ("latency-idempotent", "latency", {**steady, "topic": IDEMPOTENT}),
        ("placement", "placement", {"workers": 100, "tenants": 1000, "jobs": plan.placed_jobs}),
    ):
        yield Experiment(name, ours(f"ours.speed:{function}", **options), name.partition("-")[0])
    # One small job a request, and an endpoint that does next to nothing on the same server.
    for name, server in (("plain", "plain"), ("bare", "bare"), ("submit", "penstock")):
        load = of(requests, server=server, seconds=plan.http_seconds, connections=64)
        yield Experiment(f"http-{name}", {PENSTOCK: load}, "http")
    yield Experiment("idle", ours("ours.speed:idle", seconds=plan.idle_seconds), once=True)


def filled(plan: SimpleNamespace, run: Run) -> Iterator[Experiment]:
    """A store that is filled tenfold at a time, and what a job costs at each size."""
    base = run.folder / "data"

    def cost(folder: Path, stored: int) -> Figures:
        """Measured on a copy, so that the store keeps its size."""
        call("ours.speed:fill", base, jobs=stored)
        shutil.copytree(base, folder / "data")
        os.sync()  # the copy's own writing should not weigh on what is measured
        options = {"jobs": plan.growth_jobs, "seconds": plan.seconds / 2, "rate": RATE}
        return {"stored": stored, **call("ours.speed:cost", folder / "data", **options)}

    def memory(_: Path) -> Figures:
        call("ours.speed:fill", base, jobs=plan.stored[-1])
        figures: Figures = call("ours.speed:memory", base, waiting=plan.waiting)
        return figures | call("ours.speed:memory_again", base)

    for stored in plan.stored:
        sides: dict[str, Measure] = {PENSTOCK: lambda folder, n=stored: cost(folder, n)}
        yield Experiment(f"growth-{stored}", sides, "growth")
    yield Experiment("memory", {PENSTOCK: memory}, once=True)


# -- goals --------------------------------------------------------------------------


def goals(results: Results) -> Iterator[Goal]:
    drain, two, submit = "drain-1 rate", "drain-2 rate", "submit-apart one"
    running, work = "submit-apart running_one", "drained, 1 worker process"
    yield Goal(work, drain, f"{drain} @{HUEY_FSYNC}", least=14)
    yield Goal(work, drain, f"{drain} @{HUEY}", least=3)
    yield Goal(work, drain, f"{drain} @{PGQUEUER}")
    work = "drained, 2 worker processes"
    yield Goal(work, two, drain, least=1, aim="> with one", peer="with one")
    yield Goal(work, two, f"{two} @{PGQUEUER}")
    yield Goal("processor a job, engine", "drain-1 engine_us", most=18, form="{:.3g} µs")
    yield Goal("processor a job, worker", "drain-1 worker_us", most=12, form="{:.3g} µs")
    for how, name, least in (("one by one", "", 6), ("in hundreds", "-bulk", 8)):
        work, peer = f"sustained, submitted {how}", f"{SIDES[HUEY_FSYNC]}, drain"
        yield Goal(work, f"sustained{name} rate", f"{drain} @{HUEY_FSYNC}", least, peer=peer)
    yield Goal("drained in process", "drain-in-process rate", least=30_000)
    work = "submitted synchronously, engine apart"
    yield Goal(work, submit, f"{submit} @{HUEY_FSYNC}", least=1)
    yield Goal(work, submit, f"{submit} @{PGQUEUER}")
    huey_running = f"{running} @{HUEY_FSYNC}"
    yield Goal("– while a worker process runs them", running, huey_running, least=1)
    for name, jobs, those in (
        ("own", "its own jobs", "its own jobs"),
        ("short", "10 ms jobs", "those 10 ms jobs"),
        ("noop", "a no-op backlog", "that backlog"),
    ):
        embedded = f"submit-embedded {name}"
        one = embedded if name == "own" else f"{embedded}_one"
        yield Goal(f"– embedded, {jobs} running", one, f"{submit} @{HUEY_FSYNC}", least=1)
        work = f"– the rate of {those} meanwhile"
        yield Goal(work, f"{embedded}_beside", f"{embedded}_alone", least=0.75, peer="alone")
    bulk, work = "submit-async bulk", "submitted, 1,000 a call"
    yield Goal("submitted, 64 in flight", "submit-async many", least=25_000)
    yield Goal(work, bulk, least=60_000)
    yield Goal(work, bulk, f"submit-apart bulk @{PGQUEUER}")
    for work, name, plain in (
        ("mapped over 100,000 items", "map", "submit"),
        ("gathered 100,000 jobs", "gather", "drain"),
    ):
        yield Goal(work, f"children {name}", f"children {plain}", least=0.8, peer=plain)
    work, p50 = "p50 latency at 100 jobs/s", "latency p50_ms"
    ms, aim = "{:.2f} ms", "≤ 3 flushes + 0.7 ms"
    yield Goal(work, p50, "latency limit_ms", most=1, form=ms, aim=aim, peer="limit")
    latencies = {side: found["p50_ms"] for side, found in results.get("latency", {}).items()}
    if others := {side: ms for side, ms in latencies.items() if side != PENSTOCK}:
        best = min(others, key=lambda side: others[side])
        yield Goal(work, p50, f"{p50} @{best}", most=1, form=ms, aim="the least")
    trivial = {name: look_up(results, f"{name} rate") for name in ("http-plain", "http-bare")}
    faster = max(trivial, key=lambda name: trivial[name] or 0)
    work, peer = "HTTP, one job a request", "trivial endpoint"
    yield Goal(work, "http-submit rate", f"{faster} rate", least=0.4, peer=peer)
    yield from flat(results)
    work, us = "flat: placed among 1,000 workers, 10,000 tenants", "{:.1f} µs"
    few, many = "placement few_us", "placement many_us"
    yield Goal(work, many, few, most=2, form=us, peer="a tenth of them")
    yield Goal("idle engine and worker, of a core", "idle cpu_percent", most=1, form="{:.2f}%")
    for work, name in (("lost", "missing"), ("applied twice", "applied_twice")):
        yield Goal(f"killed worker: jobs {work}", f"kill {name}", most=0, form="{:.0f}")
    yield Goal("killed worker: all done", "kill all_done_s", most=15, form="{:.1f} s")


def flat(results: Results) -> Iterator[Goal]:
    """The worst of the larger stores beside the smallest."""
    rungs = (name for name in results if name.startswith("growth-"))
    costs = {name: us for name in rungs if (us := look_up(results, f"{name} total_us"))}
    if len(costs) > 1:
        first, *larger = costs
        worst = max(larger, key=lambda name: costs[name])
        stored = {name: f"{int(name.removeprefix('growth-')):,} jobs" for name in costs}
        yield Goal(
            f"flat: processor a job with {stored[worst]} stored",
            f"{worst} total_us",
            f"{first} total_us",
            most=1.2,
            form="{:.1f} µs",
            peer=stored[first],
        )


# -- the page -----------------------------------------------------------------------

ROWS: dict[str, str | tuple[str, str]] = {
    "drained by 1 worker process, jobs/s": "drain-1 rate",
    "drained by 2 worker processes, jobs/s": "drain-2 rate",
    "drained in process, jobs/s": "drain-in-process rate",
    "drained by 1 worker process, plain `def` in threads, jobs/s": "drain-threads rate",
    "drained by 1 worker process, idempotent jobs, jobs/s": "drain-idempotent rate",
    "processor a job, 1 worker process, µs": "drain-1 cpu_us",
    "– of it the engine, µs": "drain-1 engine_us",
    "– of it the worker, µs": "drain-1 worker_us",
    "– idempotent jobs, µs": "drain-idempotent cpu_us",
    "sustained, submit to durable end, jobs/s": "sustained rate",
    "– processor a job, all processes, µs": "sustained cpu_us",
    "sustained, submitted in hundreds, jobs/s": "sustained-bulk rate",
    "sustained, idempotent jobs, jobs/s": "sustained-idempotent rate",
    "submitted one after another, synchronous, engine apart, jobs/s": "submit-apart one",
    "– while a worker process runs them": "submit-apart running_one",
    "– embedded, its own jobs running": ("submit-embedded own", "submit-apart one"),
    "– embedded, 10 ms jobs running": ("submit-embedded short_one", "submit-apart one"),
    "– embedded, a no-op backlog running": ("submit-embedded noop_one", "submit-apart one"),
    "10 ms jobs run in process, no loop submitting, jobs/s": "submit-embedded short_alone",
    "– while the loop submits 10 ms jobs": "submit-embedded short_beside",
    "no-op jobs run in process, no loop submitting, jobs/s": "submit-embedded noop_alone",
    "– while the loop submits no-op jobs": "submit-embedded noop_beside",
    "submitted one after another, asynchronous, embedded, jobs/s": "submit-async one",
    "submitted one by one, 64 in flight, jobs/s": "submit-async many",
    "submitted, 1,000 a call, jobs/s": ("submit-async bulk", "submit-apart bulk"),
    "mapped over, 100,000 items, jobs/s": "children map",
    "– submitted in the same run, 1,000 a call": "children submit",
    "gathered, 100,000 jobs run by 1 worker process, jobs/s": "children gather",
    "– drained in the same run": "children drain",
    "latency p50 at 100 jobs/s, ms": "latency p50_ms",
    "latency p99 at 100 jobs/s, ms": "latency p99_ms",
    "– p50 in disk flushes": "latency p50_flushes",
    "– p99 in disk flushes": "latency p99_flushes",
    "– p50 of idempotent jobs, ms": "latency-idempotent p50_ms",
    "– p99 of idempotent jobs, ms": "latency-idempotent p99_ms",
    "HTTP, one job a request, requests/s": "http-submit rate",
    "– p50, ms": "http-submit p50_ms",
    "– the server's processor a request, µs": "http-submit cpu_us",
    "trivial endpoint, the server as Penstock sets it, requests/s": "http-bare rate",
    "trivial endpoint, uvicorn with its defaults, requests/s": "http-plain rate",
    "idle engine and worker, % of a core": "idle cpu_percent",
}
KILLED = {
    "missing": ("missing", "{:.0f}"),
    "executed twice": ("run_twice", "{:.0f}"),
    "applied twice": ("applied_twice", "{:.0f}"),
    "all done after, s": ("all_done_s", "{:.1f}"),
}
GROWTH = {
    "start, s": ("start_s", "{:.2f}"),
    "submitted in bulk/s": ("submit_rate", "{:,.0f}"),
    "drained/s": ("rate", "{:,.0f}"),
    "processor a job, µs": ("total_us", "{:.1f}"),
    "p50, ms": ("p50_ms", "{:.2f}"),
    "engine's memory, MiB": ("rss_mb", "{:.0f}"),
}
MEMORY = {
    "with finished jobs, MiB": ("before_mb", "{:.0f}"),
    "and waiting ones, MiB": ("filled_mb", "{:.0f}"),
    "after a restart, MiB": ("restarted_mb", "{:.0f}"),
}


def page(everything: dict[str, Any]) -> str:
    results, plan = everything["results"], everything["plan"]
    killed = {title: f"kill @{side}" for side, title in SIDES.items()}
    grown = {f"{n:,}": f"growth-{n}" for n in plan["stored"]}
    stored = f"{plan['stored'][-1]:,} finished, {plan['waiting']:,} waiting"
    return paged(
        everything,
        judged(goals(results), results, SIDES),
        by_side(results, ROWS, SIDES),
        by_figure(results, killed, KILLED, "killed worker: jobs"),
        *unlike(results),
        by_figure(results, grown, GROWTH, "stored jobs"),
        by_figure(results, {stored: "memory"}, MEMORY, "engine's memory"),
    )


def unlike(results: Results) -> Iterable[str]:
    """What differs between the sides, and not because one is better."""
    sides = {side for found in results.values() for side in found}
    if {HUEY, HUEY_FSYNC} & sides:
        yield (
            f"Huey's consumer polls every {huey.POLL * 1000:.0f} ms (its default; it waits longer"
            " the longer it has been idle): its latency is mostly that. It has no bulk call."
        )
    if PGQUEUER in sides:
        yield (
            f"PgQueuer: workers dequeue {pgqueuer.BATCH} jobs at a time, through asyncpg; the"
            " server has fsync and synchronous_commit on. Its processor time has the server's."
        )
    if "kill" in results and len(sides) > 1:
        yield (
            "Killed worker: measured once. Penstock's job is marked idempotent, so that it may run"
            " again; a peer's job is not tried again, or later than the measurement lasts."
        )


def names() -> list[str]:
    """Of single experiments, for `--only`."""
    plan = SimpleNamespace(**{name: tiny for name, (*_, tiny) in SIZES.items()})
    return [e.name for e in (*compared(plan), *alone(plan)) if e.name not in GROUPS]


BENCHMARK = Benchmark(
    "engine.py",
    "Penstock's engine side by side with its peers.",
    GROUPS,
    experiments,
    page,
    names=names(),
    titles=SIDES,
    peers=PEERS,
    missing=missing,
    arguments={"--jobs": {"type": int, "metavar": "N", "help": "the backlog that is drained"}},
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
