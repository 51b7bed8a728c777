"""How fast: drained, sustained, submitted, and how soon."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from marks import Marks
from measure import cpu_seconds, flush_times, percentile
from ours.jobs import NOOP, noop
from ours.system import PROFILE, SLOTS, System, running, start_workers, until
from processes import running as started
from sampling import Sampler

import penstock

Figures = dict[str, float | None]


async def drain(
    folder: Path,
    *,
    jobs: int,
    workers: int,
    topic: str = NOOP,
    profile: bool = False,
    slots: int = SLOTS,
) -> Figures:
    """A backlog worked off by worker processes, to its last durable end."""
    async with running(folder) as system:
        await system.fill(topic, jobs)
        with (
            sampled(folder, profile) as environment,
            started(start_workers(folder, workers, environment, slots)) as pids,
        ):
            figures = await drain_watched(system, jobs, workers, pids)
        await system.check(jobs)
    return figures


async def drain_in_process(
    folder: Path, *, jobs: int, topic: str = NOOP, profile: bool = False
) -> Figures:
    """The same by the engine's own worker: an engine that finds a backlog at its start."""
    async with running(folder) as system:
        await system.fill(topic, jobs)
    async with running(folder, local=True) as system:
        with sampled(folder, profile):
            figures = await drain_watched(system, jobs, 1, [])
        await system.check(jobs)
    return figures


@contextmanager
def sampled(folder: Path, wanted: bool = True) -> Iterator[dict[str, str]]:
    """Sample this process, and workers that have this environment: profiles beside the folder."""
    if not wanted:
        yield {}
        return
    sampler = Sampler()
    sampler.start()
    yield {PROFILE: str(folder.parent / "worker.json")}
    sampler.stop()
    sampler.save(folder.parent / "engine.json")


async def children(folder: Path, *, jobs: int) -> Figures:
    """So many jobs mapped over and gathered; and submitted in bulk and drained, to compare."""
    plain_folder, bulk = folder.with_name("plain"), 1000
    async with running(plain_folder) as system:
        begin = time.monotonic()
        for first in range(0, jobs, bulk):
            await noop.asubmit_many([(0,)] * min(bulk, jobs - first))
        submitted = time.monotonic() - begin
        await system.judged()
        with started(start_workers(plain_folder, 1)) as pids:
            plain = await drain_watched(system, jobs, 1, pids)
        await system.check(jobs)
    Marks.given().clear()
    async with running(folder) as system:
        begin = time.monotonic()
        handles = await noop.amap(0 for _ in range(jobs))
        mapped = time.monotonic() - begin
        await system.judged()
        gathering = asyncio.ensure_future(penstock.agather(*handles))
        with started(start_workers(folder, 1)) as pids:
            await drain_watched(system, jobs, 1, pids)
            results = await gathering
            end = time.monotonic_ns()
        done, begin_ns = Marks.given().since_all_worked()
        assert results == [None] * jobs
        await system.check(jobs)
    return {
        "map": jobs / mapped,
        "gather": done / (end - begin_ns) * 1e9,
        "submit": jobs / submitted,
        "drain": plain["rate"],
    }


async def drain_watched(system: System, jobs: int, workers: int, pids: list[int]) -> Figures:
    """Wait for the last durable end; what happened since every worker had done something."""
    marks = Marks.given()
    if not await until(lambda: marks.processes() >= workers or system.finished >= jobs):
        raise TimeoutError(f"{marks.processes()} of {workers} workers did anything")
    engine, others = time.process_time(), cpu_seconds(*pids)
    counted = jobs - marks.count()
    await system.wait_finished(jobs)
    end = time.monotonic_ns()
    engine, others = time.process_time() - engine, cpu_seconds(*pids) - others
    done, begin = marks.since_all_worked()
    assert marks.count() == jobs, f"{jobs} jobs were executed {marks.count()} times"
    figures: Figures = {"rate": done / (end - begin) * 1e9}
    if counted * 2 > jobs:  # else most was done before we looked, and the rest says little
        figures |= {"engine_us": engine / counted * 1e6, "worker_us": others / counted * 1e6}
        figures["cpu_us"] = (engine + others) / counted * 1e6
    return figures


async def sustain(
    folder: Path, *, seconds: float, in_flight: int, bulk: int = 1, topic: str = NOOP
) -> Figures:
    """Submit and see to the end, everything at once: producers, engine, one worker process."""
    done, submitted, stopping = 0, 0, False

    async def produce(system: System) -> None:
        nonlocal done, submitted
        while not stopping:
            handles = await system.client.asubmit_many(topic, [{"sent": 0}] * bulk)
            submitted += bulk
            for handle in handles:
                await handle.await_end()
                done += 1

    async with running(folder) as system:
        with started(start_workers(folder, 1)) as pids:
            producers = [
                asyncio.ensure_future(produce(system)) for _ in range(max(1, in_flight // bulk))
            ]
            await until(lambda: done > 0)
            await asyncio.sleep(min(1.0, seconds / 3))
            count, begin, cpu = done, time.monotonic(), cpu_seconds(os.getpid(), *pids)
            await asyncio.sleep(seconds)
            count, took = done - count, time.monotonic() - begin
            cpu = cpu_seconds(os.getpid(), *pids) - cpu
            stopping = True
            await asyncio.gather(*producers)
        await system.check(submitted)
    assert Marks.given().count() == submitted
    return {"rate": count / took, "cpu_us": cpu / count * 1e6}


async def submit(folder: Path, *, seconds: float, in_flight: int, bulk: int) -> Figures:
    """Submissions accepted: one after another, many at once, and in bulk."""
    async with running(folder) as system:
        one, many, bulky = [
            await _submit_for(seconds, system, producers, size)
            for producers, size in ((1, 1), (in_flight, 1), (1, bulk))
        ]
        tally = (await system.client.astatus()).tally
        accepted = sum(count for count, _ in (one, many, bulky))
        assert sum(tally.values()) == accepted, f"{accepted} accepted, the store has {tally}"
    return {"one": one[1], "many": many[1], "bulk": bulky[1]}


async def _submit_for(
    seconds: float, system: System, producers: int, size: int
) -> tuple[int, float]:
    """How many jobs were accepted, and how many a second."""
    end = (begin := time.monotonic()) + seconds

    async def produce() -> int:
        accepted = 0
        while time.monotonic() < end:
            accepted += len(await system.client.asubmit_many(NOOP, [{"sent": 0}] * size))
        return accepted

    count = sum(await asyncio.gather(*[produce() for _ in range(producers)]))
    return count, count / (time.monotonic() - begin)


async def latency(folder: Path, *, seconds: float, rate: int, topic: str = NOOP) -> Figures:
    """From before the submit until a waiter hears of the durable end, at a steady rate."""
    flushes = flush_times(folder.parent)
    async with running(folder) as system:
        with started(start_workers(folder, 1)):
            await latencies(system, 0.5, rate, topic)
            Marks.given().clear()
            times = await latencies(system, seconds, rate, topic)
    flush = median(flushes + flush_times(folder.parent))
    p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
    executed = Marks.given().delays()
    return {
        "executed_p50_ms": percentile(executed, 0.5) * 1e3,
        "executed_p99_ms": percentile(executed, 0.99) * 1e3,
        "p50_ms": p50 * 1e3,
        "p99_ms": p99 * 1e3,
        "flush_ms": flush * 1e3,
        "p50_flushes": p50 / flush,
        "p99_flushes": p99 / flush,
    }


async def latencies(system: System, seconds: float, rate: int, topic: str = NOOP) -> list[float]:
    """Submit at this rate; how long each took to its durable end."""
    times: list[float] = []

    async def one() -> None:
        begin, sent = time.perf_counter(), time.monotonic_ns()
        handle = await system.client.asubmit(topic, {"sent": sent})
        await handle.await_end()
        times.append(time.perf_counter() - begin)

    jobs, start = [], time.monotonic()
    for n in range(int(seconds * rate)):
        jobs.append(asyncio.ensure_future(one()))
        await asyncio.sleep(max(0.0, start + (n + 1) / rate - time.monotonic()))
    await asyncio.gather(*jobs)
    return times
