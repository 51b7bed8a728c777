"""An attempt ends at its time limit, whatever else its worker has to do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import penstock
from penstock.testing.aio import run_async

app = penstock.App()


@app.job("job.test.stall")
async def stall() -> None:
    await asyncio.Event().wait()


@pytest.mark.seed("001", "6.5")
@run_async
async def test_a_job_that_is_alone_on_its_worker_ends_at_its_timeout(tmp_path: Path) -> None:
    async with app.run(tmp_path):
        job = await stall.options(timeout=0.2).asubmit()
        ended = await job.await_end(3)
    assert ended.state is penstock.JobState.TIMEOUT
    assert ended.result is not None
    assert ended.result.execution_ms == pytest.approx(200, abs=400)


@run_async
async def test_a_short_limit_is_kept_beside_longer_ones(tmp_path: Path) -> None:
    async with app.run(tmp_path):
        long = await stall.options(timeout=60).asubmit()
        short = await stall.options(timeout=0.2).asubmit()
        ended = await short.await_end(3)
        await long.acancel()
    assert ended.state is penstock.JobState.TIMEOUT
    assert ended.result is not None
    assert ended.result.execution_ms == pytest.approx(200, abs=400)
