"""A container worker with real files, real threads and the machine's own time."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path

from msgspec.structs import replace
from tests.unit.container_workers import a_job

from penstock.lifecycles.container import ContainerJobState
from penstock.ports.clock import SystemClock
from penstock.testing.aio import run_async
from penstock.testing.containers import FakeEngine, Say, Script
from penstock.workloads.container.config import OnRestart, WorkerConfig
from penstock.workloads.container.files.sandbox import Sandboxes
from penstock.workloads.container.job import Code, ContainerRecord
from penstock.workloads.container.standing.worker import Worker
from penstock.workloads.container.storage.sqlite.store import SqliteContainerStore
from penstock.workloads.container.store import RecordQuery

JOBS = 60
CONFIG = WorkerConfig(max_concurrent_jobs=4, memory_mb=4000, cpus=8, disk_low_mb=0, stop_grace=0.05)
SCRIPTS = {
    "quick:1": Script(says=(Say(b"done\n"),)),
    "slow:1": Script(says=(Say(b"begun\n"),), seconds=0.05),
    "bad:1": Script(seconds=0.01, exit_code=3),
    "stubborn:1": Script(seconds=0.3, heeds_term=False),
}


class Place:
    """A folder with a store, on which workers come and go."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.clock = folder, SystemClock()
        self.engine = FakeEngine(self.clock, SCRIPTS)
        self.config = replace(CONFIG, jobs_dir=folder)

    async def open(self, stack: AsyncExitStack) -> Worker:
        store = SqliteContainerStore(self.folder / "containers.db")
        stack.push_async_callback(store.close)
        sandboxes = Sandboxes(self.folder / "jobs", self.config.inputs)
        worker = Worker(self.config, self.engine, store, sandboxes, self.clock)
        await worker.start()
        stack.push_async_callback(worker.stop)
        return worker


async def submit_and_cancel(worker: Worker, chance: random.Random, numbers: range) -> None:
    async def one(n: int) -> None:
        await asyncio.sleep(chance.random() * 0.2)
        image = chance.choice(list(SCRIPTS))
        await worker.submit(a_job(f"j{n}", image, priority=chance.choice(["low", "high"])))
        if chance.random() < 0.3:
            await asyncio.sleep(chance.random() * 0.1)
            assert await worker.cancel(f"j{n}") is not None

    await asyncio.gather(*map(one, numbers))


def check(record: ContainerRecord) -> None:
    code = record.error.code if record.error is not None else None
    assert record.is_final
    assert (record.state is ContainerJobState.FINISHED) is (code is None)
    assert code in {None, Code.NON_ZERO_EXIT, Code.CANCELLED, Code.WORKER_RESTARTED}
    if code == Code.NON_ZERO_EXIT:
        assert record.exit_code == 3


@run_async
async def test_jobs_that_come_and_are_cancelled_all_at_once_end_once_each(tmp_path: Path) -> None:
    place, chance = Place(tmp_path), random.Random()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(place.engine.close)
        worker = await place.open(stack)
        await submit_and_cancel(worker, chance, range(JOBS))
        for n in range(JOBS):
            record = await worker.wait(f"j{n}", 30)
            assert record is not None
            check(record)
            stdout, _ = await worker.text(record)
            if record.state is ContainerJobState.FINISHED and record.image == "quick:1":
                assert stdout == "done\n"
        await worker.stop(grace=10)
        assert place.engine.leftovers() == []
        assert place.engine.calls.count("start") <= JOBS


@run_async
async def test_jobs_outlive_workers_that_stop_in_the_middle(tmp_path: Path) -> None:
    place, chance = Place(tmp_path), random.Random()
    place.config = replace(place.config, on_restart=chance.choice(list(OnRestart)))
    for life in range(3):
        async with AsyncExitStack() as stack:
            worker = await place.open(stack)
            await submit_and_cancel(worker, chance, range(life * 10, life * 10 + 10))
    async with AsyncExitStack() as stack:
        stack.push_async_callback(place.engine.close)
        worker = await place.open(stack)
        for n in range(30):
            record = await worker.wait(f"j{n}", 30)
            assert record is not None
            check(record)
        assert len(await worker.find(RecordQuery(limit=1000))) == 30
        await worker.stop(grace=10)
        assert place.engine.leftovers() == []


@run_async
async def test_a_job_starts_within_milliseconds_of_being_taken(tmp_path: Path) -> None:
    place = Place(tmp_path)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(place.engine.close)
        worker = await place.open(stack)
        waits = []
        for n in range(20):
            await worker.submit(a_job(f"j{n}", "quick:1"))
            record = await worker.wait(f"j{n}", 30)
            assert record is not None
            assert record.started_at is not None
            waits.append(record.started_at - record.created_at)
    # What a machine that does other things adds is not the worker's doing.
    assert sorted(waits)[len(waits) // 2] < 0.1
