"""Penstock's pipelines: under its engine, and alone with their job manager."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import quantiles
from typing import Any

from staged.clocked import STAGES, WARM_ITEMS, WARM_JOBS, many, once

import penstock
from penstock.adapters.sqlite.store import SqliteBackend
from penstock.app.service import run_service


def six() -> penstock.Pipeline:
    """Six stages that do nothing."""
    pipeline = penstock.Pipeline("six", single_flight=False)
    for n in range(STAGES):

        async def nothing() -> int:
            return 1

        pipeline.step(name=f"s{n}")(nothing)
    return pipeline


class Items:
    """A map stage of so many items that do nothing."""

    def __init__(self, at_once: int) -> None:
        self.pipeline = pipeline = penstock.Pipeline("items", single_flight=False)

        def listed(config: dict[str, Any], ctx: Any) -> Any:
            return iter(range(config["n"]))

        @pipeline.map(over=listed, concurrency=at_once)
        async def each(n: int) -> int:
            return n


async def engine(pipeline: penstock.Pipeline, folder: Path, body: Any) -> dict[str, float]:
    app = penstock.App()
    app.add(pipeline)
    async with app.run(folder / "data", concurrency=256) as ps:

        async def run(**config: Any) -> None:
            record = await ps.api.pipelines.start(pipeline.name, config)
            job = await ps.api.wait(record.id)
            assert job.state is penstock.JobState.SUCCEEDED, job

        return await body(run)


async def alone(pipeline: penstock.Pipeline, folder: Path, body: Any) -> dict[str, float]:
    async with penstock.pipeline_jobs(folder / "runs.db", pipeline) as manager:

        async def run(**config: Any) -> None:
            record = await manager.start_job(pipeline, config)
            ended = await manager.wait(record.id)
            assert ended.status == "COMPLETED", ended

        return await body(run)


class Commits:
    """Counts what the engine of this process writes."""

    def __init__(self) -> None:
        self.count = 0
        write = SqliteBackend.write

        async def counted(backend: SqliteBackend, *args: Any) -> None:
            self.count += 1
            await write(backend, *args)

        SqliteBackend.write = counted  # type: ignore[method-assign]


RATE = 50
"""Jobs a second whose dispatch is timed."""


async def beside(folder: Path, items: int) -> dict[str, float]:
    """How long jobs take from submission to start: alone, and beside a run with many items."""
    app = penstock.App()
    app.add(Items(50).pipeline)

    @app.job("job.bench.start")
    async def start() -> float:
        return time.time()

    async with app.run(folder / "data", concurrency=64) as ps:

        async def timed() -> float:
            asked = time.time()
            handle = await start.asubmit()
            return float(await handle.aresult()) - asked

        async def latencies(until: Any) -> list[float]:
            jobs: list[asyncio.Task[float]] = []
            while not until(len(jobs)):
                jobs.append(asyncio.ensure_future(timed()))
                await asyncio.sleep(1 / RATE)
            return sorted(await asyncio.gather(*jobs))

        await latencies(lambda count: count >= 100)
        alone = await latencies(lambda count: count >= 500)
        record = await ps.api.pipelines.start("items", {"n": items})
        running = asyncio.ensure_future(ps.api.wait(record.id))
        busy = await latencies(lambda count: running.done())
        await running
    return {
        "alone_p50_ms": quantiles(alone, n=100)[49] * 1e3,
        "alone_p99_ms": quantiles(alone, n=100)[98] * 1e3,
        "beside_p50_ms": quantiles(busy, n=100)[49] * 1e3,
        "beside_p99_ms": quantiles(busy, n=100)[98] * 1e3,
        "timed": len(busy),
    }


def measure(what: str, folder: Path, *, place: str, at_once: int, count: int) -> dict[str, float]:
    if what == "beside":
        return run_service(beside(folder, count))
    commits = Commits()

    async def jobs(run: Any) -> dict[str, float]:
        before = commits.count
        figures = await many(run, count, at_once)
        figures["commits_job"] = (commits.count - before) / (count + WARM_JOBS)
        return figures

    async def items(run: Any) -> dict[str, float]:
        await run(n=WARM_ITEMS)
        return await once(lambda: run(n=count), count)

    pipeline = six() if what == "jobs" else Items(at_once).pipeline
    run_in = {"engine": engine, "alone": alone}[place]
    return run_service(run_in(pipeline, folder, jobs if what == "jobs" else items))
