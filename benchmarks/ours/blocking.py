"""Submitting jobs one after another from ordinary synchronous code."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from marks import Marks
from ours.jobs import NOOP, SHORT, app
from ours.speed import Figures, sampled
from ours.system import (
    check_all_succeeded,
    engine_process,
    running,
    settings_for,
    start_workers,
)
from processes import running as started
from processes import wait

import penstock
from penstock.app.client import Client
from penstock.lifecycles.canonical import JobState

_WARM, _ALONE, _BOTH = 0.05, 0.4, 0.85
"""Shares of the backlog that are worked off when each phase ends."""


def submit_apart(folder: Path, *, seconds: float) -> Figures:
    """The engine is another process ('penstock up'): without and with a worker process."""
    marks = Marks.given()
    with engine_process(folder), penstock.connect(data=folder) as client:
        count, one = _submit_for(client, seconds)
        with started(start_workers(folder, 1)):
            wait(lambda: marks.count() >= count, "the backlog was not executed")
            more, running_one = _submit_for(client, seconds)
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
        count, own = _submit_for(client, seconds)
        _finish(client, count)
    figures: Figures = {"own": own}
    for name, topic, jobs in (("noop", NOOP, backlog), ("short", SHORT, short_jobs)):
        marks.clear()
        asyncio.run(_fill(folder / name, topic, jobs))
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
            figures[f"{name}_kept"] = beside / alone
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


async def _fill(folder: Path, topic: str, jobs: int) -> None:
    async with running(folder) as system:
        await system.fill(topic, jobs)


def _submit_for(client: Client, seconds: float) -> tuple[int, float]:
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
