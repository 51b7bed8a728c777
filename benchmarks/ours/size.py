"""What it costs to have many jobs in the store: time, processor and memory."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

import msgspec
from measure import percentile, resident_bytes
from ours.jobs import NOOP, RARE, TENANTS, topic_of
from ours.speed import Figures, drain_watched, latencies
from ours.system import running, settings_for, start_workers
from processes import running as started

from penstock.core.job import JobRequest
from penstock.core.pointer import encode_data
from penstock.lifecycles.canonical import JobState
from penstock.ports.store import Durability

_CHUNK = 1000
_MOST_OPEN = 8000
"""Jobs that wait or run while a store is filled."""
_INPUT = encode_data(b'{"sent":0}')
_OLD = 1000
"""Where a varied store's rare jobs are: among the first so many."""


async def fill(folder: Path, *, jobs: int, varied: bool = False) -> Figures:
    """Bring the store to so many finished jobs: submitted in bulk and run in this process.

    In a varied one they are of several tenants and topics, and some have failed.
    """
    begin = time.monotonic()
    # Only while it is filled may the disk be late: what is measured later is flushed.
    settings = msgspec.structs.replace(settings_for(folder), durability=Durability.OS)
    async with running(folder, local=True, settings=settings) as system:
        stored = done = sum((await system.client.astatus()).tally.values())
        while done < jobs:
            numbers = range(done, min(done + _CHUNK, jobs))
            await system.submit_requests([_request(n, varied) for n in numbers])
            done = numbers.stop
            await system.wait_finished(done - stored - _MOST_OPEN)
        await system.wait_finished(jobs - stored)
        tally = (await system.client.astatus()).tally
    assert sum(tally.values()) == max(stored, jobs), tally
    ends = {JobState.SUCCEEDED, JobState.FAILED} if varied else {JobState.SUCCEEDED}
    assert set(tally) == ends, tally
    return {"stored": jobs, "seconds": time.monotonic() - begin}


def _request(n: int, varied: bool) -> JobRequest:
    """The n-th job. A tenth of the first thousand are the rare tenant's, and fail."""
    if not varied:
        return JobRequest(job_id="", topic=NOOP, context_ptr=_INPUT)
    tenant = RARE if n < _OLD and n % 10 == 0 else TENANTS[n % len(TENANTS)]
    return JobRequest(job_id="", topic=topic_of(tenant), tenant=tenant, context_ptr=_INPUT)


async def cost(folder: Path, *, jobs: int, seconds: float, rate: int) -> Figures:
    """What a job costs on a store that is filled already."""
    begin = time.monotonic()
    async with running(folder) as system:
        figures: Figures = {"start_s": time.monotonic() - begin}
        begin, cpu = time.monotonic(), time.process_time()
        await system.submit(NOOP, jobs)
        figures["submit_rate"] = jobs / (time.monotonic() - begin)
        await system.judged()
        figures["submit_us"] = (time.process_time() - cpu) / jobs * 1e6
        with started(start_workers(folder, 1)) as pids:
            figures |= await drain_watched(system, jobs, 1, pids)
            times = await latencies(system, seconds, rate)
        figures["p50_ms"] = percentile(times, 0.5) * 1e3
        figures["rss_mb"] = _resident_mb()
    if "cpu_us" in figures:
        figures["total_us"] = (figures["cpu_us"] or 0) + (figures["submit_us"] or 0)
    return figures


async def memory(folder: Path, *, waiting: int) -> Figures:
    """The engine's memory when so many more jobs wait."""
    async with running(folder) as system:
        before = _resident_mb()
        await system.fill(NOOP, waiting)
        return {"before_mb": before, "filled_mb": _resident_mb()}


async def memory_again(folder: Path) -> Figures:
    """The same after a restart, when only what is needed was read."""
    begin = time.monotonic()
    async with running(folder):
        return {"restarted_mb": _resident_mb(), "restart_s": time.monotonic() - begin}


def _resident_mb() -> float:
    gc.collect()
    return resident_bytes(os.getpid()) / 2**20
