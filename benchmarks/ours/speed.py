"""What is measured of Penstock's engine: how fast, how soon, at what cost, and what is lost."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count, cycle, islice
from pathlib import Path
from statistics import median

import msgspec
from cpu import Sampler
from marks import Marks
from ours.system import (
    NAP,
    NOOP,
    PROFILE,
    RARE,
    SERVER,
    SHORT,
    SLOTS,
    TENANTS,
    Figures,
    System,
    app,
    check_all_succeeded,
    engine_process,
    noop,
    running,
    settings_for,
    start_worker,
    start_workers,
    topic_of,
    until,
)
from processes import cpu_seconds, flush_times, percentile, resident_bytes, wait
from processes import kill as kill_process
from processes import running as started

import penstock
from penstock.app.client import Client
from penstock.control.backlog import Backlog
from penstock.control.workers import Placement, Roster
from penstock.core.job import Job, JobRequest
from penstock.core.pointer import encode_data
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports.bus import Handshake
from penstock.ports.store import Durability

BULK = 1000
"""Jobs in one call."""


# -- drained, sustained ---------------------------------------------------------------


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
    plain_folder = folder.with_name("plain")
    async with running(plain_folder) as system:
        begin = time.monotonic()
        for first in range(0, jobs, BULK):
            await noop.asubmit_many([(0,)] * min(BULK, jobs - first))
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
    servers = [int(os.environ[SERVER])] if SERVER in os.environ else []
    engine, others, server = time.process_time(), cpu_seconds(*pids), cpu_seconds(*servers)
    counted = jobs - marks.count()
    await system.wait_finished(jobs)
    end = time.monotonic_ns()
    engine, others = time.process_time() - engine, cpu_seconds(*pids) - others
    server = cpu_seconds(*servers) - server
    done, begin = marks.since_all_worked()
    assert marks.count() == jobs, f"{jobs} jobs were executed {marks.count()} times"
    figures: Figures = {"rate": done / (end - begin) * 1e9}
    if counted * 2 > jobs:  # else most was done before we looked, and the rest says little
        figures |= {"engine_us": engine / counted * 1e6, "worker_us": others / counted * 1e6}
        figures |= {"cpu_us": (engine + others) / counted * 1e6}
        figures |= {"server_us": server / counted * 1e6}
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
        "limit_ms": 3 * flush * 1e3 + 0.7,
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


# -- submitted by synchronous code -----------------------------------------------


_WARM, _ALONE, _BOTH = 0.05, 0.4, 0.85
"""Shares of the backlog that are worked off when each phase ends."""


def submit_apart(folder: Path, *, seconds: float) -> Figures:
    """The engine is another process ('penstock up'): without and with a worker process."""
    marks = Marks.given()
    with engine_process(folder), penstock.connect(data=folder) as client:
        count, one = _submit_one_by_one(client, seconds)
        with started(start_workers(folder, 1)):
            wait(lambda: marks.count() >= count, "the backlog was not executed")
            more, running_one = _submit_one_by_one(client, seconds)
            _finish(client, count + more)
    return {"one": one, "running_one": running_one}


def submit_embedded(folder: Path, *, seconds: float, backlog: int, short_jobs: int) -> Figures:
    """The engine and its worker are in this process ('with app.run()').

    Beside nothing but the jobs that are submitted; beside a backlog of jobs that do nothing
    and keep the process busy; and beside jobs of 10 ms in every slot. Of the last two also the
    rate of the running jobs, before and while the loop submits.
    """
    marks = Marks.given()
    folder.mkdir()
    with app.run(settings=settings_for(folder / "own")) as client:
        count, own = _submit_one_by_one(client, seconds)
        _finish(client, count)
    figures: Figures = {"own": own}
    for name, topic, jobs in (("noop", NOOP, backlog), ("short", SHORT, short_jobs)):
        marks.clear()
        asyncio.run(_fill_backlog(folder / name, topic, jobs))
        with app.run(settings=settings_for(folder / name)) as client:
            wait(lambda least=_WARM * jobs: marks.count() >= least, "no job was executed")
            alone = _rate_until(marks, _ALONE * jobs, seconds, lambda: time.sleep(0.01))
            submitted = 0

            def submit(client: Client = client) -> None:
                nonlocal submitted
                client.submit(NOOP, {"sent": 0})
                submitted += 1

            begin = time.monotonic()
            beside = _rate_until(marks, _BOTH * jobs, seconds, submit)
            figures[f"{name}_one"] = submitted / (time.monotonic() - begin)
            figures |= {f"{name}_alone": alone, f"{name}_beside": beside}
            _finish(client, jobs + submitted)
    return figures


async def submit_sampled(folder: Path, *, jobs: int, topic: str) -> Figures:
    """Jobs submitted to an embedded engine, whose processor time is sampled.

    The engine has the main thread, which is the one that can be sampled well, and the loop that
    submits another: 'with app.run()' has it the other way round.
    """

    def submit(client: Client) -> None:
        for _ in range(jobs):
            client.submit(topic, {"sent": 0})

    async with running(folder, local=True) as system:
        begin, cpu = time.monotonic(), time.process_time()
        with sampled(folder):
            await asyncio.to_thread(submit, system.client)
        took, cpu = time.monotonic() - begin, time.process_time() - cpu
        await system.wait_finished(jobs)
        await system.check(jobs)
    return {"rate": jobs / took, "cpu_us": cpu / jobs * 1e6}


async def _fill_backlog(folder: Path, topic: str, jobs: int) -> None:
    async with running(folder) as system:
        await system.fill(topic, jobs)


def _submit_one_by_one(client: Client, seconds: float) -> tuple[int, float]:
    """How many jobs were accepted, and how many a second."""
    client.submit(NOOP, {"sent": 0})
    end, count = (begin := time.monotonic()) + seconds, 0
    while time.monotonic() < end:
        client.submit(NOOP, {"sent": 0})
        count += 1
    return count + 1, count / (time.monotonic() - begin)


def _rate_until(marks: Marks, most: float, seconds: float, act: Callable[[], None]) -> float:
    """Jobs executed a second while we `act` again and again, until the time or the jobs are up."""
    count, begin = marks.count(), time.monotonic()
    if count >= most:
        raise RuntimeError(f"the backlog was too small: {count} jobs are executed already")
    while (now := time.monotonic()) < begin + seconds and marks.count() < most:
        act()
    return (marks.count() - count) / (now - begin)


def _finish(client: Client, jobs: int) -> None:
    """Wait for the durable end of all, and read the whole store again."""
    wait(lambda: client.status().tally.get(JobState.SUCCEEDED) == jobs, "jobs did not succeed")
    check_all_succeeded(client.status(), client.verify(), jobs)
    executed = Marks.given().count()
    assert executed == jobs, f"{jobs} jobs were executed {executed} times"


# -- many stored jobs ------------------------------------------------------------


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


# -- idle, and killed ------------------------------------------------------------


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
    return {"cpu_percent": (engine + worker) / took * 100}


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
        begin = time.monotonic()
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
        "missing": jobs - len(set(seen)),
        "run_twice": len(seen) - len(set(seen)),
        "applied_twice": applied_twice,
        "all_done_s": took if all_done else math.inf,
    }


# -- placement -------------------------------------------------------------------


_SLOTS = 4
_TURN = 20
"""Jobs that end, and as many that are placed, in one turn of the scheduler."""
_NOBODY = "job.nobody"


def placement(folder: Path, *, workers: int, tenants: int, jobs: int) -> Figures:
    """Processor time a job, and the same with ten times as many workers and tenants.

    All slots are taken, and in each turn a few jobs end. Half of the tenants have jobs that no
    worker serves.
    """
    return {
        "few_us": _cost(workers, tenants, jobs),
        "many_us": _cost(10 * workers, 10 * tenants, jobs),
    }


def _cost(workers: int, tenants: int, jobs: int) -> float:
    roster, backlog = Roster({}), Backlog()
    for n in range(workers):
        hello = Handshake(
            worker_id=f"w{n}", pool="default", topics=("job.bench.*",), slots=_SLOTS, labels={}
        )
        roster.greet(hello, 0.0)
    places = Placement(roster)
    room = workers * _SLOTS
    seqs = count(1)
    for n in range(2 * (tenants + room)):
        backlog.add(_job(next(seqs), n % tenants), 1.0)
    served = cycle(range(0, tenants, 2))
    held: deque[tuple[str, int]] = deque()
    placed, spent = 0, 0.0
    while placed < jobs:
        more = [_job(next(seqs), tenant) for tenant in islice(served, _TURN)]
        begin = time.thread_time()
        for _ in range(min(_TURN, len(held))):
            worker, seq = held.popleft()
            roster.release(worker, str(seq), 1)
        for job in more:
            backlog.add(job, 1.0)
        places.refresh()
        before = len(held)
        for seq, worker in backlog.pick(places.find, places.has_room, places.freed):
            roster.hold(worker, str(seq), 1)
            held.append((worker, seq))
        if before:  # else it was the first turn, which fills all slots
            spent += time.thread_time() - begin
            placed += len(held) - before
        assert len(held) == room, f"{len(held)} of {room} slots are in use"
    return spent / placed * 1e6


def _job(seq: int, tenant: int) -> Job:
    topic = _NOBODY if tenant % 2 else f"job.bench.t{tenant % 5}"
    request = JobRequest(job_id=str(seq), topic=topic, tenant=f"tenant-{tenant}")
    return Job(
        seq=seq,
        request=request,
        state=JobState.SCHEDULED,
        version=1,
        accepted_at=0.0,
        updated_at=0.0,
    )
