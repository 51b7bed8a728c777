"""Staged pipelines side by side with DBOS and Prefect, on one machine in one run.

`python benchmarks/pipeline.py --help`; what is measured and how: benchmarks/README.md.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import resource
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

from harness import Benchmark, Experiment, Figures, Measure, Run, measured, versions
from processes import percentile
from report import Goal, Results, by_figure, judged, look_up
from report import page as paged

PENSTOCK, ALONE, DBOS_WAL, DBOS, PREFECT = "penstock", "alone", "dbos-wal", "dbos", "prefect"
SIDES = {
    PENSTOCK: "Penstock",
    ALONE: "Penstock, alone",
    DBOS_WAL: "DBOS, WAL + flush",
    DBOS: "DBOS as installed",
    PREFECT: "Prefect, ephemeral",
}
SLOWER = {DBOS_WAL: 4, DBOS: 8, PREFECT: 100}
"""By how much less a side is given to do."""
SIZES: dict[str, tuple[Any, Any, Any]] = {
    # Of a whole, a quick and a tiny run; a tiny one only shows that it runs.
    "jobs": (2000, 400, 20),
    "items": (2000, 2000, 100),
    "growth": ((100, 1000, 10_000, 100_000), (100, 1000, 10_000), (100, 1000)),
    "beside": (100_000, 20_000, 2000),
}
STAGES = 6
WARM_JOBS, WARM_ITEMS = 3, 10
"""Runs that are not counted before those that are, and items of such a run."""
RATE = 50
"""Jobs a second whose dispatch is timed."""


def experiments(run: Run) -> Iterator[Experiment]:
    plan = run.plan(SIZES)
    run.facts["peers"] = ", ".join(versions("dbos", "prefect"))
    for what, at_once, count in (
        ("jobs", 1, plan.jobs // 2),
        ("jobs", 32, plan.jobs),
        ("items", 5, plan.items),
        ("items", 100, plan.items),
    ):
        sides = {
            side: of(side, what, at_once, max(3, count // SLOWER.get(side, 1))) for side in SIDES
        }
        yield Experiment(f"{what}-{at_once}", sides, what, once=(PREFECT,))
    for size in plan.growth:
        yield Experiment(f"growth-{size}", {PENSTOCK: of(PENSTOCK, "items", 50, size)}, "growth")
    yield Experiment("beside", {PENSTOCK: measured("pipeline:beside", items=plan.beside)})


def of(side: str, what: str, at_once: int, count: int) -> Measure:
    return measured(f"pipeline:{what}", side, at_once=at_once, count=count, timeout=900)


def missing(side: str) -> str | None:
    package = PREFECT if side == PREFECT else DBOS
    return (
        None
        if importlib.util.find_spec(package)
        else f"{package} is not installed: 'make bench' installs it"
    )


# -- sides: a run of six stages, and one of so many items, that do nothing --------------

Runs = tuple[Callable[[], Awaitable[Any]], Callable[[int], Awaitable[Any]]]


@asynccontextmanager
async def runs_of(side: str, folder: Path, at_once: int) -> AsyncIterator[Runs]:
    if side in (PENSTOCK, ALONE):
        async with (with_engine if side == PENSTOCK else with_manager)(folder, at_once) as run:
            yield lambda: run("six"), lambda n: run("items", n=n)
    elif side == PREFECT:
        yield with_prefect(folder, at_once)
    else:
        framework = start_dbos(folder, wal=side == DBOS_WAL)
        runs = as_functions(framework.step(), framework.workflow(), at_once)
        framework.launch()
        try:
            yield runs
        finally:
            framework.destroy()


def pipelines(at_once: int) -> list[Any]:
    import penstock

    six = penstock.Pipeline("six", single_flight=False)
    for n in range(STAGES):

        async def nothing() -> int:
            return 1

        six.step(name=f"s{n}")(nothing)
    items = penstock.Pipeline("items", single_flight=False)

    def listed(config: dict[str, Any], ctx: Any) -> Any:
        return iter(range(config["n"]))

    @items.map(over=listed, concurrency=at_once)
    async def each(n: int) -> int:
        return n

    return [six, items]


@asynccontextmanager
async def with_engine(folder: Path, at_once: int) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    import penstock

    app = penstock.App()
    for pipeline in pipelines(at_once):
        app.add(pipeline)
    async with app.run(folder / "data", concurrency=256) as ps:

        async def run(name: str, **config: Any) -> None:
            record = await ps.api.pipelines.start(name, config)
            job = await ps.api.wait(record.id)
            assert job.state is penstock.JobState.SUCCEEDED, job

        yield run


@asynccontextmanager
async def with_manager(folder: Path, at_once: int) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    import penstock

    by_name = {pipeline.name: pipeline for pipeline in pipelines(at_once)}
    async with penstock.pipeline_jobs(folder / "runs.db", *by_name.values()) as manager:

        async def run(name: str, **config: Any) -> None:
            record = await manager.start_job(by_name[name], config)
            ended = await manager.wait(record.id)
            assert ended.status == "COMPLETED", ended

        yield run


def as_functions(step: Any, workflow: Any, at_once: int) -> Runs:
    """The same as functions, for frameworks that decorate steps and workflows."""

    @step
    async def nothing(n: int) -> int:
        return n

    @workflow
    async def six() -> None:
        for n in range(STAGES):
            await nothing(n)

    @workflow
    async def items(n: int) -> None:
        for first in range(0, n, at_once):
            await asyncio.gather(*(nothing(first + k) for k in range(min(at_once, n - first))))

    return six, items


def start_dbos(folder: Path, *, wal: bool) -> Any:
    """On SQLite: as it is installed, or with WAL and a flush at each commit."""
    import sqlite3

    if sqlite3.sqlite_version_info < (3, 42):  # its schema wants a newer one than some have
        import pysqlite3

        sys.modules["sqlite3"] = pysqlite3
    import sqlalchemy
    from dbos import DBOS as Framework

    if wal:

        @sqlalchemy.event.listens_for(sqlalchemy.engine.Engine, "connect")
        def set_wal(connection: Any, _: Any) -> None:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")

    Framework(
        config={
            "name": "bench",
            "system_database_url": f"sqlite:///{folder}/dbos.db",
            "log_level": "ERROR",
            "enable_otlp": False,
            "run_admin_server": False,
        }
    )
    return Framework


def with_prefect(folder: Path, at_once: int) -> Runs:
    """With its ephemeral server."""
    os.environ |= {
        "PREFECT_HOME": str(folder),
        "PREFECT_LOGGING_LEVEL": "ERROR",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
    }
    from prefect import flow, task

    return as_functions(task, flow, at_once)


# -- measuring --------------------------------------------------------------------------


def processor() -> float:
    """Seconds of this process and of children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


async def jobs(folder: Path, side: str, *, at_once: int, count: int) -> Figures:
    """So many runs of six stages, so many at once."""
    commits = counted_commits() if side in (PENSTOCK, ALONE) else [0]
    async with runs_of(side, folder, at_once) as (run, _):
        for _ in range(WARM_JOBS):
            await run()
        times: list[float] = []
        left = iter(range(count))

        async def worker() -> None:
            for _ in left:
                began = time.perf_counter()
                await run()
                times.append(time.perf_counter() - began)

        before, began, used = commits[0], time.perf_counter(), processor()
        await asyncio.gather(*(worker() for _ in range(at_once)))
        wall, used = time.perf_counter() - began, processor() - used
        return {
            "rate": count / wall,
            "p50_ms": median(times) * 1e3,
            "stage_ms": used / count / STAGES * 1e3,
            "commits": (commits[0] - before) / count,
        }


def counted_commits() -> list[int]:
    """How often the engine of this process writes."""
    from penstock.adapters.sqlite.store import SqliteBackend

    count, write = [0], SqliteBackend.write

    async def counted(backend: SqliteBackend, *args: Any) -> None:
        count[0] += 1
        await write(backend, *args)

    SqliteBackend.write = counted  # type: ignore[method-assign]
    return count


async def items(folder: Path, side: str, *, at_once: int, count: int) -> Figures:
    """One run of so many items, so many at once."""
    async with runs_of(side, folder, at_once) as (_, run):
        await run(WARM_ITEMS)
        began, used = time.perf_counter(), processor()
        await run(count)
        wall, used = time.perf_counter() - began, processor() - used
    return {
        "rate": count / wall,
        "item_us": wall / count * 1e6,
        "cpu_us": used / count * 1e6,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


async def beside(folder: Path, *, items: int) -> Figures:
    """How long jobs take from submission to start: alone, and beside a run with many items."""
    import penstock

    app = penstock.App()
    app.add(pipelines(50)[1])

    @app.job("job.bench.start")
    async def start() -> float:
        return time.time()

    async with app.run(folder / "data", concurrency=64) as ps:

        async def timed() -> float:
            asked = time.time()
            handle = await start.asubmit()
            return float(await handle.aresult()) - asked

        async def latencies(is_over: Callable[[int], bool]) -> list[float]:
            jobs: list[asyncio.Task[float]] = []
            while not is_over(len(jobs)):
                jobs.append(asyncio.ensure_future(timed()))
                await asyncio.sleep(1 / RATE)
            return await asyncio.gather(*jobs)

        await latencies(lambda count: count >= 100)
        alone = await latencies(lambda count: count >= 500)
        record = await ps.api.pipelines.start("items", {"n": items})
        running = asyncio.ensure_future(ps.api.wait(record.id))
        busy = await latencies(lambda count: count > 0 and running.done())
        await running
    return {
        f"{name}_p99_ms": percentile(times, 0.99) * 1e3
        for name, times in (("alone", alone), ("beside", busy))
    }


# -- the page ---------------------------------------------------------------------------

COUNTS = {"jobs": (1, 32), "items": (5, 100)}
ROWS = {
    what: {
        f"{n} at once: {title}": f"{what}-{n} @{side}"
        for n in counts
        for side, title in SIDES.items()
    }
    for what, counts in COUNTS.items()
}
JOBS = {
    "jobs/s": ("rate", "{:,.1f}"),
    "p50, ms": ("p50_ms", "{:,.2f}"),
    "processor ms a stage": ("stage_ms", "{:,.3f}"),
    "of Penstock's": (f"rate/rate @{PENSTOCK}", "{:.3f}"),
}
ITEMS = {
    "items/s": ("rate", "{:,.0f}"),
    "processor µs an item": ("cpu_us", "{:,.0f}"),
    "of Penstock's": (f"rate/rate @{PENSTOCK}", "{:.4f}"),
}
GROWTH = {
    "µs an item": ("item_us", "{:,.0f}"),
    "processor µs an item": ("cpu_us", "{:,.0f}"),
    "peak MiB": ("peak_mib", "{:,.0f}"),
}


def page(everything: dict[str, Any]) -> str:
    results, plan = everything["results"], everything["plan"]
    grown = {f"{size:,}": f"growth-{size}" for size in plan["growth"]}
    return paged(
        everything,
        judged(goals(results, plan), results, SIDES),
        by_figure(results, ROWS["jobs"], JOBS, "six stages that do nothing"),
        by_figure(results, ROWS["items"], ITEMS, "items that do nothing, each durable"),
        by_figure(results, grown, GROWTH, "items of one map stage, 50 at once"),
    )


def goals(results: Results, plan: dict[str, Any]) -> Iterator[Goal]:
    for at_once, least, most in ((1, 5, 0.5), (32, 20, 0.25)):
        rate, many = f"jobs-{at_once} rate", f"{at_once} at once"
        yield Goal(f"runs, {many}", rate, f"{rate} @{DBOS_WAL}", least=least)
        ms = f"jobs-{at_once} stage_ms"
        yield Goal(f"processor a stage, {many}", ms, most=most, form="{:.3f} ms")
    yield Goal("commits a run, 1 at once", "jobs-1 commits", most=8, form="{:.2f}")
    for at_once in COUNTS["items"]:
        work = f"durable items, {at_once} at once"
        yield Goal(work, f"items-{at_once} rate", least=25_000)
    # A run's fixed cost weighs on a hundred items; from a thousand on it is nothing.
    few, many = plan["growth"][0], plan["growth"][-1]
    work, us = f"flat: time of an item of {many:,}", [f"growth-{n} item_us" for n in (many, few)]
    yield Goal(work, *us, most=1.5, form="{:.0f} µs", peer=f"of {few:,}")
    if base := look_up(results, f"growth-{few} peak_mib"):
        work, aim = f"flat: memory with {many:,} items", f"≤ 30 MiB more than {base:.0f} with {few}"
        yield Goal(work, f"growth-{many} peak_mib", most=base + 30, form="{:,.0f} MiB", aim=aim)
    work = f"p99 from submission to start beside {plan['beside']:,} items"
    yield Goal(
        work, "beside beside_p99_ms", "beside alone_p99_ms", most=3, form="{:.1f} ms", peer="alone"
    )


BENCHMARK = Benchmark(
    "pipeline.py",
    "Staged pipelines side by side with peers.",
    ("jobs", "items", "growth", "beside"),
    experiments,
    page,
    titles=SIDES,
    peers=(DBOS_WAL, DBOS, PREFECT),
    missing=missing,
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
