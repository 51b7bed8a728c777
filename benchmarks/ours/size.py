"""What it costs to have many jobs in the store: time, processor and memory."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

from measure import percentile, resident_bytes
from ours.jobs import NOOP
from ours.speed import Figures, drain_watched, latencies
from ours.system import running, settings_for, start_workers
from processes import running as started

from penstock.adapters.sqlite.store import SqliteStore
from penstock.core.ids import IdSource
from penstock.core.job import JobRequest, JobResult
from penstock.core.pointer import encode_data
from penstock.core.transition import Accept, Change, Move
from penstock.lifecycles.canonical import JobEvent, JobState, Role
from penstock.ports.store import Durability

_BATCH = 2000
_INPUT = encode_data(b'{"sent":0}')

RARE, COMMON = "rare", "t1"
"""In a varied store: whose jobs are few and old, and whose are a quarter of all."""
_OLD = 1000
"""Where a varied store's rare jobs are: among the first so many."""


async def fill(folder: Path, *, jobs: int, varied: bool = False) -> Figures:
    """Bring the store to so many finished jobs, by the same moves as a real life, in bulk.

    In a varied one they are of several tenants and topics, and some have failed.
    """
    store = _open(folder)
    try:
        stored = sum((await store.tally()).values())
        ids, begin = IdSource(), time.monotonic()
        for done in range(stored, jobs, _BATCH):
            numbers = range(done, min(done + _BATCH, jobs))
            lives = [_life(ids.next(time.time()), *_kind(n, varied)) for n in numbers]
            await store.apply([change for life in lives for change in life])
        tally = await store.tally()
    finally:
        await store.close()
    assert sum(tally.values()) == max(stored, jobs), tally
    assert varied or set(tally) == {JobState.SUCCEEDED}, tally
    return {"stored": jobs, "seconds": time.monotonic() - begin}


def _open(folder: Path) -> SqliteStore:
    """Only while it is filled may the disk be late: what is measured later is flushed."""
    folder.mkdir(exist_ok=True)
    return SqliteStore(settings_for(folder).database, durability=Durability.OS)


def _kind(n: int, varied: bool) -> tuple[str, str, JobEvent]:
    """Topic, tenant and end of the n-th job."""
    if not varied:
        return NOOP, "default", JobEvent.SUCCEED
    rare = n < _OLD and n % 10 == 0
    tenant = RARE if rare else f"t{n % 4}"
    return f"job.bench.{tenant}", tenant, JobEvent.FAIL if rare else JobEvent.SUCCEED


def _life(job_id: str, topic: str, tenant: str, end: JobEvent) -> list[Change]:
    now, worker = time.time(), "w1"
    request = JobRequest(job_id=job_id, topic=topic, tenant=tenant, context_ptr=_INPUT)
    failed = end is JobEvent.FAIL
    result = JobResult(
        job_id=job_id,
        status=JobState.FAILED if failed else JobState.SUCCEEDED,
        worker_id=worker,
        execution_ms=0.01,
        attempt=1,
        error_code="BENCH" if failed else None,
    )
    return [
        Accept(request, now, fresh=True),
        Move(
            job_id,
            (JobEvent.SCHEDULE, JobEvent.DISPATCH),
            Role.SCHEDULER.value,
            now,
            worker_id=worker,
            pool="default",
        ),
        Move(
            job_id,
            (JobEvent.START, end),
            f"{Role.WORKER}:{worker}",
            now,
            attempt=1,
            result=result,
        ),
    ]


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
