"""Penstock's pipelines: under its engine, and alone with their job manager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from clocked import STAGES, WARM_ITEMS, main, many, once

import penstock
from penstock.cli.service import run_service


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


def measure(what: str, folder: Path, options: dict[str, Any]) -> dict[str, float]:
    place = {"engine": engine, "alone": alone}[options["place"]]

    async def jobs(run: Any) -> dict[str, float]:
        return await many(run, options["jobs"], options["at_once"])

    async def items(run: Any) -> dict[str, float]:
        await run(n=WARM_ITEMS)
        return await once(lambda: run(n=options["items"]), options["items"])

    pipeline = six() if what == "jobs" else Items(options["at_once"]).pipeline
    work = place(pipeline, folder, jobs if what == "jobs" else items)
    return run_service(work)


if __name__ == "__main__":
    main(measure)
