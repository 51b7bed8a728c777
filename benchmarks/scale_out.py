"""Penstock on PostgreSQL side by side with engines on PostgreSQL and on NATS.

`python benchmarks/scale_out.py --help`; what is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness import Benchmark, Experiment, Figures, Measure, Run, call, measured, versions
from ours.system import IDEMPOTENT, SERVER
from peers import pgqueuer, procrastinate, taskiq
from peers.postgres import Postgres
from peers.sides import OBAN, PENSTOCK, PGQUEUER, PROCRASTINATE, SIDES, TASKIQ, missing, servers
from report import Goals, origin, shown, table

RATE = 100
"""Jobs a second while latency is measured."""
SLOTS = 100
"""Jobs that a worker process of Penstock has at once, as PgQueuer's has (its best)."""
CONFIRMED = "confirmed"
"""Penstock with its default promise: a job is begun once only, so its start is committed first."""
TITLES = {**SIDES, CONFIRMED: "Penstock (starts confirmed)"}
PEERS = (PGQUEUER, PROCRASTINATE, OBAN, TASKIQ)
_OBAN_LIMIT = 100
"""Jobs that Oban's worker process has at once: as in `peers.oban`, which needs Oban."""
GROUPS = ("through", "drain", "submit", "latency", "reader", "stored", "shards", "takeover")


@dataclass(frozen=True)
class Plan:
    """The sizes of a run."""

    jobs: int = 20_000
    slow_jobs: int = 3_000
    """Procrastinate's: it is slower, and a deep backlog would slow it more."""
    seconds: float = 5.0
    stored: tuple[int, ...] = (3, 5, 6, 7)
    """Jobs that ended before, as powers of ten."""


QUICK = Plan(jobs=10_000, slow_jobs=1_000, seconds=3.0, stored=(3, 5, 6))
TINY = Plan(jobs=300, slow_jobs=100, seconds=0.5, stored=(3,))


def on_postgres(function: str, *, reader: bool = False, **options: Any) -> Measure:
    """Penstock, with its jobs in a server of its own that is set up as the peers' are; with
    `reader`, while another session keeps a snapshot open."""

    def measure(folder: Path) -> Figures:
        home = folder / "engine"
        home.mkdir()
        with closing(Postgres(folder)) as server:
            store = {
                "PENSTOCK_STORE": server.url,
                "PENSTOCK_STORAGE__BLOBS": str(home / "blobs"),
                SERVER: str(server.pid),
            }
            with server.long_reader() if reader else nullcontext():
                figures: Figures = call(function, home / "data", environment=store, **options)
            return figures

    return measure


def experiments(run: Run) -> Iterator[Experiment]:
    plan: Plan = run.sized(Plan(), QUICK, TINY)
    run.more["plan"] = asdict(plan)
    python: str | None = run.options.oban
    peers = []
    for side in PEERS:
        why = missing(side) if side != OBAN or python else "--oban PYTHON names one that has it"
        if why:
            run.left_out(SIDES[side], why)
        else:
            peers.append(side)
    found = [*versions("pgqueuer", "procrastinate", "taskiq")]
    if python:
        found += [f"oban {call('peers.sides:version', 'oban', python=python)}"]
    found += [f"PostgreSQL {servers().get('PostgreSQL', 'is missing')}"]
    run.facts["peers"] = ", ".join(found)
    jobs = dict.fromkeys(PEERS, plan.jobs) | {PROCRASTINATE: plan.slow_jobs}

    def of_peer(side: str, measure: str, **options: Any) -> Measure:
        if side == OBAN:
            options["python"] = python
        return measured("peers.measures:of_peer", side, measure, **options)

    for workers in (1, 2):
        for name, ours in (("through", "ours.cluster:through"), ("drain", "ours.speed:drain")):
            sized = {"jobs": plan.jobs, "workers": workers, "slots": SLOTS}
            sides = {
                PENSTOCK: on_postgres(ours, topic=IDEMPOTENT, **sized),
                CONFIRMED: on_postgres(ours, **sized),
            }
            for peer in peers:
                sides[peer] = of_peer(peer, name, jobs=jobs[peer], workers=workers)
            yield Experiment(f"{name}-{workers}", sides, name)
    sides = {PENSTOCK: on_postgres("ours.speed:submit_apart", seconds=plan.seconds / 2)}
    for peer in peers:
        sides[peer] = of_peer(peer, "submit", seconds=plan.seconds / 2, bulk=1000)
    yield Experiment("submit", sides)
    steady = {"seconds": plan.seconds, "rate": RATE}
    sides = {
        PENSTOCK: on_postgres("ours.speed:latency", topic=IDEMPOTENT, **steady),
        CONFIRMED: on_postgres("ours.speed:latency", **steady),
    }
    sides |= {peer: of_peer(peer, "latency", **steady) for peer in peers}
    yield Experiment("latency", sides)
    drained = {"jobs": plan.jobs, "workers": 1}
    ours = partial(on_postgres, "ours.speed:drain", topic=IDEMPOTENT, slots=SLOTS)
    sides = {PENSTOCK: ours(reader=True, **drained)}
    if PGQUEUER in peers:
        sides[PGQUEUER] = of_peer(PGQUEUER, "drain_beside_reader", **drained)
    yield Experiment("reader", sides)
    for exponent in plan.stored:
        filled = {"stored": 10**exponent, "jobs": plan.jobs, "slots": SLOTS}
        yield Experiment(
            f"stored-{exponent}", {PENSTOCK: on_postgres("ours.cluster:stored", **filled)}, "stored"
        )
    for shards in (1, 2, 4):
        divided = {"shards": shards, "jobs": plan.jobs, "slots": SLOTS}
        measure = on_postgres("ours.cluster:shards", **divided)
        yield Experiment(f"shards-{shards}", {PENSTOCK: measure}, "shards")
    yield Experiment("takeover", {PENSTOCK: on_postgres("ours.cluster:takeover")})


ROWS = {
    "submit to done, 1,000 a call, 1 worker process, jobs/s": ("through-1", "rate"),
    "submit to done, 1,000 a call, 2 worker processes, jobs/s": ("through-2", "rate"),
    "drained by 1 worker process, jobs/s": ("drain-1", "rate"),
    "drained by 2 worker processes, jobs/s": ("drain-2", "rate"),
    "the same with 1, beside a session that keeps a snapshot open, jobs/s": ("reader", "rate"),
    "processor a job, 1 worker process: workers and our engine, µs": ("drain-1", "cpu_us"),
    "processor a job, 1 worker process: the server, µs": ("drain-1", "server_us"),
    "submitted one after another, synchronous, jobs/s": ("submit", "one"),
    f"from submit to execution, p50 at {RATE} jobs/s, ms": ("latency", "executed_p50_ms"),
    f"from submit to execution, p99 at {RATE} jobs/s, ms": ("latency", "executed_p99_ms"),
    f"from submit to a durable end that a waiter hears of, p50 at {RATE} jobs/s, ms": (
        "latency",
        "p50_ms",
    ),
    **{
        f"submit to done, an engine and a worker process for each shard, shards: {n}, jobs/s": (
            f"shards-{n}",
            "rate",
        )
        for n in (1, 2, 4)
    },
    "killed owner: the next job done after, s": ("takeover", "takeover_s"),
}
_EXECUTED = {"executed_p50_ms": "p50_ms", "executed_p99_ms": "p99_ms", "p50_ms": ""}
"""What peers call these figures of Penstock: they have no durable end to wait for."""


def short(side: str) -> str:
    return TITLES[side].partition(",")[0]


def page(everything: dict[str, Any]) -> str:
    results = everything["results"]

    def figure(experiment: str, name: str, side: str = PENSTOCK) -> float | None:
        if side in PEERS:
            name = _EXECUTED.get(name, name)
        figures = results.get(experiment, {}).get(side, {})
        found: float | None = figures.get(name)
        if name == "cpu_us" and side in PEERS and found is not None:
            found -= figures["server_us"]  # which is in it
        return found

    goals = Goals()
    for name, work in (("through", "submit to done"), ("drain", "drained")):
        for workers in (1, 2):
            for peer in PEERS:
                least = 1.5 if peer == PGQUEUER else 3.0
                ours, theirs = (figure(f"{name}-{workers}", "rate", s) for s in (PENSTOCK, peer))
                if ours and theirs:
                    aim = f"{work}, worker processes: {workers}; {least:g} times {short(peer)}"
                    goals.at_least(aim, ours / theirs, least)
    times = {side: figure("latency", "executed_p50_ms", side) for side in (PENSTOCK, *PEERS)}
    best = min(filter(None, (times[side] for side in PEERS)), default=0)
    if (ours := times[PENSTOCK]) and best:
        goals.at_most("p50 to execution at most the best peer's", ours / best, 1)
    if (alone := figure("drain-1", "rate")) and (read := figure("reader", "rate")):
        goals.at_least("beside a long reader: 80% of the rate without", read / alone, 0.8)
    stored = {name: one for name, one in results.items() if name.startswith("stored-")}
    if len(stored) > 1:
        rates = [found[PENSTOCK]["rate"] for found in stored.values()]
        goals.at_least("flat: the most stored jobs, 80% of the fewest", rates[-1] / rates[0], 0.8)
    if seconds := figure("takeover", "takeover_s"):
        goals.at_most("a killed owner is replaced in less than 5 s", seconds, 5, "{:.1f} s")
    every = (PENSTOCK, CONFIRMED, *PEERS)
    sides = [s for s in every if any(s in found for found in results.values())]
    rows = []
    for label, (experiment, name) in ROWS.items():
        if experiment in results:
            form = "{:.2f}" if name.endswith(("_ms", "_s")) else "{:,.0f}"
            rows.append([label, *(shown(figure(experiment, name, side), form) for side in sides)])
    growing = [
        [
            f"{10 ** int(name.partition('-')[2]):,}",
            shown(found[PENSTOCK]["rate"], "{:,.0f}"),
            shown(found[PENSTOCK]["page_ms"], "{:.1f}"),
        ]
        for name, found in stored.items()
    ]
    parts = [
        *origin(everything),
        *(f"Note: {note}." for note in everything["notes"]),
        goals.table(),
        table(["", *map(short, sides)], rows),
        table(["jobs stored before", "drained, jobs/s", "newest 100, ms"], growing)
        if growing
        else "",
        f"""\
PostgreSQL with fsync and synchronous_commit on; NATS with `sync_interval: always`. The jobs of the
first column may run twice after a crash, as the peers' may (`idempotent=True`); those of the
second are begun once only, so that each start is committed, too. A worker process of Penstock has
{SLOTS} jobs at once, PgQueuer's dequeues {pgqueuer.BATCH} at a time, Procrastinate's runs
{procrastinate.CONCURRENCY} at once, Oban's {_OBAN_LIMIT}, taskiq's {taskiq.BATCH}. A job of
Penstock counts when its end is durable, a peer's when it was executed. Penstock has one process
more than the peers: its engine, which alone speaks to the server.\
""",
    ]
    return "\n\n".join(part for part in parts if part)


BENCHMARK = Benchmark(
    "scale_out.py",
    "Penstock on PostgreSQL side by side with PgQueuer, Procrastinate, Oban and taskiq.",
    GROUPS,
    experiments,
    page,
    names=[
        *(f"{name}-{workers}" for name in ("through", "drain") for workers in (1, 2)),
        *(f"stored-{exponent}" for exponent in Plan().stored),
    ],
    titles=TITLES,
    peers=PEERS,
    arguments={
        "--oban": {"metavar": "PYTHON", "help": "an interpreter (3.12 or newer) that has Oban"}
    },
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
