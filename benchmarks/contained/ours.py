"""Our worker on each engine: the same containers, with queue, records, limits and output."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

from processes import percentile

from penstock.api.container.facade import ContainerFacade
from penstock.app.container_worker import container_worker
from penstock.config import Settings
from penstock.testing.images import IMAGE
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.engine import ContainerEngine


@asynccontextmanager
async def worker(
    engine: ContainerEngine, folder: Path, at_once: int
) -> AsyncIterator[ContainerFacade]:
    os.mkdir(folder)
    config = WorkerConfig(
        port=0,
        jobs_dir=folder / "containers",
        max_concurrent_jobs=at_once,
        cpus=64,
        memory_mb=16_000,
    )
    async with container_worker(config, Settings(data_dir=folder), engine) as (facade, _):
        yield facade


async def ended(one: ContainerFacade, number: str, *command: str) -> float:
    """Seconds from submission to a record that says finished."""
    job = {
        "protocol_version": 1,
        "job_id": number,
        "runtime": {"mode": "image", "image": IMAGE, "cmd": list(command)},
    }
    began = time.perf_counter()
    await one.submit(json.dumps(job).encode())
    record = await one.wait(number, 120)
    assert record is not None
    assert record.state == "finished", record
    return time.perf_counter() - began


async def one_by_one(engine: ContainerEngine, folder: Path, count: int) -> dict[str, float]:
    async with worker(engine, folder, 2) as one:
        await ended(one, "warm", "true")
        times = [await ended(one, f"one-{n}", "true") for n in range(count)]
        waits, runs = [], []
        for n in range(count):
            record = await one.get(f"one-{n}")
            assert record is not None
            job = record.job
            assert job.started_at is not None
            assert job.finished_at is not None
            waits.append(job.started_at - job.accepted_at)
            assert job.result is not None
            assert job.result.execution_ms is not None
            runs.append(
                job.result.execution_ms / 1e3
            )  # `started_at` is when the engine heard of it
    return {
        "end_ms": median(times) * 1e3,
        "run_ms": median(runs) * 1e3,
        "wait_p50_ms": median(waits) * 1e3,
        "wait_p99_ms": percentile(waits, 0.99) * 1e3,
    }


async def rate(engine: ContainerEngine, folder: Path, count: int, at_once: int) -> float:
    async with worker(engine, folder, at_once) as one:
        await ended(one, "warm", "true")
        began = time.perf_counter()
        await asyncio.gather(*(ended(one, f"many-{n}", "true") for n in range(count)))
        return count / (time.perf_counter() - began)


async def output(engine: ContainerEngine, folder: Path, megabytes: int) -> float:
    async with worker(engine, folder, 1) as one:
        return await ended(one, "loud", "head", "-c", str(megabytes * 10**6), "/dev/zero")
