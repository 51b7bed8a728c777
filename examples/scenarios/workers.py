"""Worker processes: one is killed in the middle of its job."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from scenarios.scenario import Scenario, Stage, Story, expect, running

EXAMPLES = Path(__file__).resolve().parent.parent


async def replaced(stage: Stage) -> Story:
    job = await stage.ps.asubmit("job.elsewhere.convert", {"pages": 16}, idempotent=True)
    async with worker(stage, "first", "converter") as first:
        await running(job)
        async with worker(stage, "second", "converter"):
            first.kill()
            record = await job.await_end(20)
    expect(record.attempt == 2, f"it ended in attempt {record.attempt}")
    expect(record.worker_id == "second", f"{record.worker_id} ended it")
    return Story(job, "its worker was killed by SIGKILL; another ran it again")


async def not_repeated(stage: Stage) -> Story:
    job = await stage.ps.asubmit("job.elsewhere.charge", {"cents": 999})
    async with worker(stage, "till", "till") as only:
        await running(job)
        only.kill()
        record = await job.await_end(20)
    expect(record.attempt == 1, f"it ended in attempt {record.attempt}")
    return Story(job, "killed by SIGKILL; not idempotent, so not run twice")


@asynccontextmanager
async def worker(stage: Stage, name: str, app: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A worker process that serves one of the applications in `scenarios.jobs`."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "penstock.cli", "worker", "--app", f"scenarios.jobs:{app}"),
        *("--data", str(stage.data), "--pool", "elsewhere", "--id", name),
        cwd=EXAMPLES,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


SCENARIOS = [
    Scenario("worker killed, replaced", "job.elsewhere.convert", "SUCCEEDED", replaced),
    Scenario("worker killed", "job.elsewhere.charge", "TIMEOUT", not_repeated),
]
