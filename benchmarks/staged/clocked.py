"""Times and processor time of many runs, some at once."""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Awaitable, Callable, Coroutine
from statistics import median
from typing import Any

from penstock.app.portal import new_event_loop

STAGES = 6
WARM_JOBS = 3
"""Runs that are not counted, before those that are."""
WARM_ITEMS = 10
"""Items of a run that is not counted, before one that is."""


def cpu() -> float:
    """Processor time of this process and of children that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def peak() -> float:
    """The most memory that this process ever had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def many(run: Callable[[], Awaitable[Any]], jobs: int, at_once: int) -> dict[str, float]:
    """Run so many, so many at once; the first few are not counted."""
    for _ in range(WARM_JOBS):
        await run()
    times: list[float] = []
    left = iter(range(jobs))

    async def worker() -> None:
        for _ in left:
            began = time.perf_counter()
            await run()
            times.append(time.perf_counter() - began)

    began, used = time.perf_counter(), cpu()
    await asyncio.gather(*(worker() for _ in range(at_once)))
    wall, used = time.perf_counter() - began, cpu() - used
    return {
        "jobs_s": jobs / wall,
        "p50_ms": median(times) * 1e3,
        "cpu_job_ms": used / jobs * 1e3,
        "cpu_stage_ms": used / jobs / STAGES * 1e3,
    }


def run(measuring: Coroutine[Any, Any, dict[str, float]]) -> dict[str, float]:
    """Run it in the same kind of event loop for every side."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(measuring)


async def once(run: Callable[[], Awaitable[Any]], items: int) -> dict[str, float]:
    began, used = time.perf_counter(), cpu()
    await run()
    wall, used = time.perf_counter() - began, cpu() - used
    return {
        "items_s": items / wall,
        "item_us": wall / items * 1e6,
        "cpu_item_us": used / items * 1e6,
        "peak_mib": peak(),
    }
