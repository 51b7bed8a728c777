"""Penstock's HTTP API, side by side with what is possible at best, on one machine in one run.

`python benchmarks/http_api.py --help`; what is measured and how: benchmarks/README.md.
"""

# The multiplication sign is meant: what is made here is read by people.
# ruff: noqa: RUF001

from __future__ import annotations

import asyncio
import json
import sqlite3
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from harness import (
    Benchmark,
    Experiment,
    Figures,
    Measure,
    Run,
    Server,
    call,
    measured,
    serving,
    tell,
)
from http_servers import BARE, PENSTOCK, PLAIN, aimed_at, get
from marks import Marks
from ours.system import NOOP, RARE, TENANTS, running, settings_for, start_workers, topic_of
from processes import kill
from processes import running as started
from report import Goal, Results, by_figure, judged, look_up, table
from report import page as paged

from penstock.core.job import JobRequest
from penstock.core.pointer import encode_data

DRAINED, ENGINE = "drained", "engine"
TITLES = {
    PLAIN: "trivial endpoint, uvicorn as it comes",
    BARE: "trivial endpoint, the server as Penstock sets it",
    PENSTOCK: "submit, durable",
    DRAINED: "submit, durable, a worker process draining",
    ENGINE: "in process",
}
SIZES: dict[str, tuple[Any, Any, Any]] = {
    # Of a whole, a quick and a tiny run; a tiny one only shows that it runs.
    "seconds": (3.0, 1.0, 0.2),
    "batches": ((100, 1000), (100, 1000), (20,)),
    "lines": (2000, 2000, 30),
    "stored": ((1_000, 100_000, 1_000_000), (1_000, 10_000, 100_000), (1000, 2000)),
    "read_seconds": (1.5, 0.3, 0.05),
    # Readers, and events a second that the readers' own process can keep up with.
    "readers": (((1, 200), (100, 100), (1000, 20)),) * 2 + (((3, 20),),),
    "event_seconds": (4.0, 2.0, 0.5),
}
JOB = {"topic": NOOP, "input": {"sent": 0}}
BULK_CONNECTIONS = 4
"""So that the server has the next call at hand while it commits one."""
STREAM = "stream"
PATHS: dict[str, dict[str, Any]] = {
    BARE: {"events": "/events", "deeds": "/events", "events_each": 1},
    PENSTOCK: {"events": "/v1/stream?kind=job", "deeds": "/v1/jobs", "events_each": 2},
}
"""Where to read, where to POST, and what follows: a job is accepted, then scheduled."""
LISTINGS: dict[str, dict[str, str]] = {
    "all": {},
    "state, most jobs": {"state": "SUCCEEDED"},
    "state, few and old": {"state": "FAILED"},
    "tenant, a quarter": {"tenant": TENANTS[1]},
    "tenant, few and old": {"tenant": RARE},
    "topic, a quarter": {"topic": topic_of(TENANTS[1])},
    "topic, few and old": {"topic": topic_of(RARE)},
}
"""Filters, by name."""
DEEP = ("all", "state, most jobs", "tenant, a quarter", "topic, a quarter")
"""Those that also have a page from further down, by the cursor of the page before it."""


def experiments(run: Run) -> Iterator[Experiment]:
    plan = run.plan(SIZES)
    steady = {"seconds": plan.seconds, "connections": 64}
    sides = {side: of(requests, server=side, **steady) for side in (PLAIN, BARE, PENSTOCK)}
    sides[DRAINED] = of(requests, server=PENSTOCK, workers=1, **steady)
    yield Experiment("requests", sides)
    for size in plan.batches:
        batch = {"size": size, "seconds": plan.seconds / 2}
        engine = measured("http_api:bulk_in_process", **batch)
        sides = {PENSTOCK: of(bulk, **batch), ENGINE: engine}
        yield Experiment(f"bulk-{size}", sides, "bulk")
    lines = {"size": plan.lines, "seconds": plan.seconds / 2}
    # A stream goes to the engine in hundreds; it has no call of its own to compare with.
    yield Experiment(f"bulk-{STREAM}", {PENSTOCK: of(bulk, streamed=True, **lines)}, "bulk")

    def reading(_: Path) -> Figures:
        stores = [filled(run.folder / str(stored), stored) for stored in plan.stored]
        return read(stores, seconds=plan.read_seconds)

    yield Experiment("reading", {PENSTOCK: reading})
    for readers, rate in plan.readers:
        audience = {"readers": readers, "rate": rate, "seconds": plan.event_seconds}
        sides = {side: of(fan_out, server=side, **audience) for side in (BARE, PENSTOCK)}
        # One long look says more than two.
        yield Experiment(f"events-{readers}", sides, "events", once=True)


def of(measure: Callable[..., Figures], **options: Any) -> Measure:
    return lambda folder: measure(folder / "data", **options)


def filled(folder: Path, stored: int) -> Path:
    """A store with so many finished jobs, filled when it is first needed."""
    if not folder.exists():
        tell(f"store with {stored:,} finished jobs")
        folder.mkdir()
        call("ours.speed:fill", folder / "data", jobs=stored, varied=True)
    return folder / "data"


# -- submitting -----------------------------------------------------------------------


def requests(
    folder: Path, *, server: str, seconds: float, connections: int, workers: int = 0
) -> Figures:
    """POST one small job a request, over many connections."""
    load = {"method": "POST", "paths": ["/v1/jobs"], "body": json.dumps(JOB), "status": 201}
    load |= {"connections": connections, "seconds": seconds}
    marks = Marks.fresh()
    with (
        closing(marks),
        serving(f"http_servers:{server}", folder) as served,
        started(start_workers(folder, workers, marks.environment)),
    ):
        figures: Figures = call("load:drive", **aimed_at(served, **load))
        kill(served.process)
    if server == PENSTOCK:
        check_stored(folder, figures["answered"])
    return figures


def bulk(folder: Path, *, size: int, seconds: float, streamed: bool = False) -> Figures:
    """Jobs accepted a second, so many a call: as a batch, or as a stream of lines."""
    load: dict[str, Any] = {
        "paths": ["/v1/jobs/batch"],
        "body": json.dumps({"jobs": [JOB] * size}),
        "status": 201,
    }
    if streamed:
        load = {
            "paths": ["/v1/jobs/stream"],
            "body": (json.dumps(JOB) + "\n") * size,
            "kind": "application/x-ndjson",
            "items": size,
        }
    load |= {"method": "POST", "connections": BULK_CONNECTIONS, "seconds": seconds}
    with serving("http_servers:penstock", folder) as served:
        found = call("load:drive", **aimed_at(served, **load))
        kill(served.process)
    check_stored(folder, size * found["answered"])
    return {"rate": found["rate"] * size, "cpu_us": found["cpu_us"] / size}


async def bulk_in_process(folder: Path, *, size: int, seconds: float) -> Figures:
    """The same by calls of the engine's own API, as many in flight: its limit."""
    request = JobRequest(job_id="", topic=NOOP, context_ptr=encode_data(b'{"sent":0}'))
    async with running(folder / "data") as system:

        async def submit(until: float) -> int:
            count = 0
            while time.perf_counter() < until:
                await system.submit_requests([request] * size)
                count += size
            return count

        async def submit_all(seconds: float) -> int:
            end = time.perf_counter() + seconds
            return sum(await asyncio.gather(*(submit(end) for _ in range(BULK_CONNECTIONS))))

        await submit_all(min(0.3, seconds / 3))
        begin, cpu = time.perf_counter(), time.process_time()
        count = await submit_all(seconds)
        took, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return {"rate": count / took, "cpu_us": cpu / count * 1e6}


def check_stored(folder: Path, accepted: float) -> None:
    """The server was killed: every job that it had accepted must be there all the same."""
    with sqlite3.connect(settings_for(folder).database) as file:
        (stored,) = file.execute("SELECT count(*) FROM job").fetchone()
    assert stored >= accepted, f"{accepted:.0f} jobs were accepted, the store has {stored}"


# -- reading --------------------------------------------------------------------------


def read(stores: list[Path], *, seconds: float) -> Figures:
    """p50 and p99 of each request on each store. Stores take turns at each request."""
    with ExitStack() as stack:
        servers = {
            folder.parent.name: stack.enter_context(serving("http_servers:penstock", folder))
            for folder in stores
        }
        wanted = {stored: paths(server) for stored, server in servers.items()}
        tasks = [(name, stored) for name in wanted[stores[0].parent.name] for stored in servers]
        loads = [
            aimed_at(servers[stored], paths=wanted[stored][name], seconds=seconds, warm_up=0.1)
            for name, stored in tasks
        ]
        found = call("load:drive_all", loads)
    return {
        f"{name} {stored} {figure}": took[figure]
        for (name, stored), took in zip(tasks, found, strict=True)
        for figure in ("p50_ms", "p99_ms")
    }


def paths(server: Server) -> dict[str, list[str]]:
    """What to ask for, by what it shows: one of 500 different jobs, and pages of jobs."""
    newest = get(server, "/v1/jobs?limit=1")["jobs"][0]["seq"]
    places = range(newest + 1, 1, -max(1, newest // 500))
    some = [get(server, f"/v1/jobs?limit=1&before={place}")["jobs"] for place in places]
    found = {"get one": [f"/v1/jobs/{jobs[0]['job_id']}" for jobs in some if jobs]}
    for name, filters in LISTINGS.items():
        found[name] = [listing(filters)]
    for name in DEEP:
        before = get(server, listing(LISTINGS[name]) + f"&before={newest * 3 // 4}")
        found[f"{name}, deep"] = [listing({**LISTINGS[name], "cursor": before["next"]})]
    return found


def listing(filters: dict[str, str]) -> str:
    return "/v1/jobs?" + urlencode({**filters, "limit": 50})


# -- events ---------------------------------------------------------------------------


def fan_out(folder: Path, *, server: str, readers: int, rate: float, seconds: float) -> Figures:
    """Processor time of the server an event and reader, beyond what no reader costs."""
    watch = {"body": json.dumps(JOB), "seconds": seconds, **PATHS[server]}
    watch["rate"] = rate / watch["events_each"]
    with serving(f"http_servers:{server}", folder) as served:
        alone, watched = (
            call("load:watch", **aimed_at(served, readers=count, **watch)) for count in (0, readers)
        )
    # It is a difference, and lost in noise where there is only one reader.
    cost = (watched["event_us"] - alone["event_us"]) / readers
    times = {name: watched[name] for name in ("p50_ms", "p99_ms")}
    return {"cpu_us": cost if cost > 0 else None, **times}


# -- the page -------------------------------------------------------------------------


def page(everything: dict[str, Any]) -> str:
    results, plan = everything["results"], everything["plan"]
    parts = [
        by_figure(
            results,
            {title: f"requests @{side}" for side, title in TITLES.items()},
            {
                "requests/s": ("rate", "{:,.0f}"),
                "of the limit": (f"rate/rate @{limit(results)}", "{:.0%}"),
                "p50, ms": ("p50_ms", "{:.2f}"),
                "p99, ms": ("p99_ms", "{:.2f}"),
                "server's processor, µs": ("cpu_us", "{:.0f}"),
            },
            "64 connections, one job a request",
        ),
        by_figure(
            results,
            {f"batch {size}": f"bulk-{size}" for size in plan["batches"]}
            | {STREAM: f"bulk-{STREAM}"},
            {
                "HTTP, jobs/s": ("rate", "{:,.0f}"),
                "in process, jobs/s": (f"rate @{ENGINE}", "{:,.0f}"),
                "share": (f"rate/rate @{ENGINE}", "{:.0%}"),
                "HTTP, µs a job": ("cpu_us", "{:.0f}"),
                "in process, µs a job": (f"cpu_us @{ENGINE}", "{:.0f}"),
            },
            "accepted in bulk, 4 calls at a time",
        ),
        pages_read(results, plan["stored"]),
        by_figure(
            results,
            {
                f"{n:,} {'reader' if n == 1 else 'readers'}, {rate} events/s": f"events-{n}"
                for n, rate in plan["readers"]
            },
            {
                "Penstock": ("cpu_us", "{:.1f}"),
                "bare loop": (f"cpu_us @{BARE}", "{:.1f}"),
                "ratio": (f"cpu_us/cpu_us @{BARE}", "{:.1f}×"),
                "Penstock's delay": ("p50_ms", "{:.2f}"),
                "p99": ("p99_ms", "{:.2f}"),
                "bare loop's delay": (f"p50_ms @{BARE}", "{:.2f}"),
                "its p99": (f"p99_ms @{BARE}", "{:.2f}"),
            },
            "processor an event and reader, µs; delay p50 and p99, ms",
        ),
    ]
    return paged(everything, judged(goals(results, plan), results, TITLES), *parts)


def limit(results: Results) -> str:
    """The faster of the trivial endpoints."""
    return max((PLAIN, BARE), key=lambda side: look_up(results, f"requests rate @{side}") or 0)


def pages_read(results: Results, stores: list[int]) -> str:
    first, last = stores[0], stores[-1]
    rows = []
    for name in read_names(results, first):
        both = {
            stored: [look_up(results, f"reading {name} {stored} {figure}") or 0 for figure in ENDS]
            for stored in stores
        }
        cells = [" / ".join(f"{ms:.2f}" for ms in both[stored]) for stored in stores]
        grown = [late / soon for soon, late in zip(both[first], both[last], strict=True)]
        rows.append([name, *cells, " / ".join(f"{ratio:.2f}" for ratio in grown)])
    head = ["p50 / p99 in ms, with so many jobs stored", *(f"{n:,}" for n in stores)]
    return table([*head, "last to first"], rows) if rows else ""


ENDS = ("p50_ms", "p99_ms")


def read_names(results: Results, stored: int) -> list[str]:
    end = f" {stored} p50_ms"
    found = results.get("reading", {}).get(PENSTOCK, {})
    return [name.removesuffix(end) for name in found if name.endswith(end)]


def goals(results: Results, plan: dict[str, Any]) -> Iterator[Goal]:
    trivial = f"requests rate @{limit(results)}"
    work, peer = "one job a request, durable", "trivial endpoint"
    yield Goal(work, "requests rate", trivial, least=0.4, peer=peer)
    bulks = [f"bulk-{each} rate" for each in (*plan["batches"], STREAM)]
    best = max(bulks, key=lambda name: look_up(results, name) or 0)
    in_process = [look_up(results, f"{name} @{ENGINE}") or 0 for name in bulks]
    aim = "≥ 20,000/s, or the engine's own limit"
    yield Goal("accepted in bulk", best, least=min(20_000, max(in_process)), aim=aim)
    first, last = plan["stored"][0], plan["stored"][-1]
    pages = [n for n in read_names(results, first) if n.partition(", deep")[0] in LISTINGS]
    ends = {name: [f"reading {name} {stored} p99_ms" for stored in (last, first)] for name in pages}
    if ends:

        def growth(name: str) -> float:
            late, soon = (look_up(results, figure) or 0 for figure in ends[name])
            return late / soon if soon else 0

        worst = max(pages, key=growth)
        work, ms = f"flat: p99 of a page of 50 of {last:,} jobs ({worst})", "{:.2f} ms"
        yield Goal(work, *ends[worst], most=1.5, form=ms, peer=f"of {first:,}")
    most = plan["readers"][-1][0]
    work, event = f"an event, for each of {most:,} readers", f"events-{most} cpu_us"
    yield Goal(work, event, f"{event} @{BARE}", most=2, form="{:.1f} µs", peer="bare loop")


BENCHMARK = Benchmark(
    "http_api.py",
    "Penstock's HTTP API beside what is possible.",
    ("requests", "bulk", "reading", "events"),
    experiments,
    page,
    repeats=2,
    titles=TITLES,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
