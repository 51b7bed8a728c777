"""What it costs to do nothing, and what is lost when a worker is killed."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from marks import Marks
from measure import cpu_seconds
from ours.jobs import NAP
from ours.speed import Figures
from ours.system import running, start_worker, start_workers, until
from processes import kill as kill_process
from processes import running as started

from penstock.lifecycles.canonical import JobEvent


async def idle(folder: Path, *, seconds: float) -> Figures:
    """Processor time of an engine with its own worker and one worker process, in percent."""
    async with running(folder, local=True) as system:
        with started(start_workers(folder, 1)) as pids:
            await system.wait_for_workers(2)
            await asyncio.sleep(1)
            engine, worker, begin = time.process_time(), cpu_seconds(*pids), time.monotonic()
            await asyncio.sleep(seconds)
            took = time.monotonic() - begin
            engine, worker = time.process_time() - engine, cpu_seconds(*pids) - worker
    return {
        "cpu_percent": (engine + worker) / took * 100,
        "engine_percent": engine / took * 100,
        "worker_percent": worker / took * 100,
    }


async def kill(folder: Path, *, jobs: int, after: int, slots: int, window: float) -> Figures:
    """SIGKILL the worker amid short jobs, start another, and count what became of them."""
    marks = Marks.given()
    async with running(folder) as system:
        inputs = [{"sent": n} for n in range(jobs)]
        handles = await system.client.asubmit_many(NAP, inputs)
        victim = start_worker(folder, "victim", slots)
        try:
            await until(lambda: marks.count() >= after)
        finally:
            kill_process(victim)
        begin, before = time.monotonic(), marks.count()
        with started([start_worker(folder, "heir", slots)]):
            all_done = await until(lambda: system.finished >= jobs, window)
            took = time.monotonic() - begin
            await asyncio.sleep(0.5)
        seen = marks.sent()
        applied_twice = 0
        for handle in handles:
            ends = [e for e in await handle.ahistory() if e.event is JobEvent.SUCCEED]
            applied_twice += len(ends) > 1
        if all_done:
            await system.check(jobs)
    return {
        "before_kill": before,
        "missing": jobs - len(set(seen)),
        "run_twice": len(seen) - len(set(seen)),
        "applied_twice": applied_twice,
        "all_done_s": took if all_done else None,
    }
