"""Rows and blobs of pipeline runs live as long as the run's job."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw

import penstock
from penstock.testing.aio import run_async

LARGE = 20_000
app = penstock.App()
copies = penstock.Pipeline("copies")


@copies.map(over=lambda config, ctx: ["x" * LARGE, "small"], name="listed")
async def listed(text: str, ctx: Any) -> str:
    return text.upper()


@copies.step(name="joined")
async def joined(results: Any, ctx: Any) -> int:
    return sum([len(one) async for one in results])


app.add(copies)


@run_async
async def test_steps_and_blobs_of_a_run_are_pruned_with_its_job(tmp_path: Path) -> None:
    async with app.run(tmp_path / "data") as ps:
        run = await ps.api.pipelines.start("copies")
        await ps.api.wait(run.id, timeout=30)
        blobs = [path for path in (tmp_path / "data" / "blobs").rglob("*") if path.stat().st_size]
        blobs = [path for path in blobs if path.is_file()]
        assert len(blobs) == 2, "one of a listed input, one of an output"
        for path in blobs:
            os.utime(path, (0, 0))  # the pruner leaves young ones alone
        assert (await ps.api.prune(3600.0)).blobs == 0
        large = (await ps.api.pipelines.items(run.id, "listed"))[0]
        assert len(await ps.api.get_blob(large.input)) == LARGE + 2
        assert len(await ps.api.get_blob(large.output)) == LARGE + 2
        cleaned = await ps.api.prune(0.0)
        assert (cleaned.jobs, cleaned.blobs) == (1, 2)
        assert not any(path.exists() for path in blobs)
        assert (await ps.api.verify()).mismatches == ()
    with closing(apsw.Connection(str(tmp_path / "data" / "penstock.db"))) as jobs:
        assert jobs.execute("SELECT count(*) FROM step").get == 0
