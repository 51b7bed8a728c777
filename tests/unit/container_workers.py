"""A container worker with a fake engine, in an event loop whose time is made up."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from tests.unit.container_runs import _Threadless

from penstock.core.errors import StoreFailed
from penstock.lifecycles.container import ContainerJobState
from penstock.testing.clock import LoopClock
from penstock.testing.containers import FakeEngine, Script
from penstock.workloads.container.config import WorkerConfig
from penstock.workloads.container.files.sandbox import Sandboxes
from penstock.workloads.container.job import Code, ContainerRecord, Rejected
from penstock.workloads.container.running.patience import drop
from penstock.workloads.container.standing.worker import Worker
from penstock.workloads.container.storage.memory import MemoryContainerStore
from penstock.workloads.container.store import Change, RecordQuery

QUICK, SLOW, ENDLESS = "quick:1", "slow:1", "endless:1"
"""Images whose jobs take no time, ten seconds, and as long as they are let."""
SCRIPTS = {
    QUICK: Script(),
    SLOW: Script(seconds=10),
    ENDLESS: Script(seconds=1e6),
}
CONFIG = WorkerConfig(max_concurrent_jobs=2, memory_mb=1000, cpus=8, disk_low_mb=0, stop_grace=1)


class Shaky(MemoryContainerStore):
    """A store whose writes fail when a test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.failing: Counter[str] = Counter()
        """How many more times: `add`, or the name of an event."""
        self.lying: Counter[str] = Counter()
        """The same, but what it says has failed was written."""
        self.moves: list[tuple[str, str]] = []
        """Each change that was written: the job and the state after it."""

    async def add(self, record: ContainerRecord, *, most_waiting: int = 0) -> ContainerRecord:
        self._fail(self.failing, "add")
        record = await super().add(record, most_waiting=most_waiting)
        self._fail(self.lying, "add")
        return record

    async def change(self, change: Change) -> ContainerRecord:
        event = change.event.value if change.event else ""
        self._fail(self.failing, event)
        before = await self.get(change.job_id)
        record = await super().change(change)
        if before is not None and before.state is not record.state:
            self.moves.append((record.job_id, record.state.value))
        self._fail(self.lying, event)
        return record

    @staticmethod
    def _fail(which: Counter[str], what: str) -> None:
        if which[what] > 0:
            which[what] -= 1
            raise StoreFailed("the disk is on fire")


class Rig:
    """One folder, one engine and one store; workers come and go."""

    def __init__(self, folder: Path, loop: asyncio.AbstractEventLoop) -> None:
        self.clock = LoopClock(loop)
        self.engine = FakeEngine(self.clock, SCRIPTS)
        self.store = Shaky()
        self.config = replace(CONFIG, jobs_dir=folder)
        self.sandboxes = Sandboxes(folder / "jobs", self.config.inputs)
        self._running: list[Worker] = []

    async def start(self, **config: Any) -> Worker:
        self.config = replace(self.config, **config)
        worker = Worker(self.config, self.engine, self.store, self.sandboxes, self.clock)
        await worker.start()
        self._running.append(worker)
        return worker

    async def stop(self, worker: Worker, **how: Any) -> None:
        await worker.stop(**how)
        self._running.remove(worker)

    async def kill(self, worker: Worker) -> None:
        """It is gone; its containers are not."""
        self._running.remove(worker)
        await drop(*worker._services, *worker._writes)
        await worker._scheduler.abandon()

    async def close(self) -> None:
        for worker in self._running:
            await worker.stop()
        await self.engine.close()

    async def passes(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def record(self, job_id: str) -> ContainerRecord:
        record = await self.store.get(job_id)
        assert record is not None
        return record

    async def records(self) -> list[ContainerRecord]:
        return await self.store.find(RecordQuery(limit=10_000))

    async def state(self, job_id: str) -> ContainerJobState:
        return (await self.record(job_id)).state

    def ends(self) -> Counter[str]:
        """How often each job has ended."""
        final = {"finished", "failed"}
        return Counter(job_id for job_id, state in self.store.moves if state in final)


def a_job(job_id: str, image: str = QUICK, **fields: Any) -> bytes:
    """A submission; `limits` and what else is of the runtime goes there."""
    runtime = {"mode": "image", "image": image}
    for name in ("cmd", "env", "limits", "stdin", "build", "mode"):
        if name in fields:
            runtime[name] = fields.pop(name)
    job = {"protocol_version": 1, "job_id": job_id, "task": {}, "runtime": runtime, **fields}
    return json.dumps(job).encode()


async def ended(worker: Worker, job_id: str) -> ContainerRecord:
    record = await worker.wait(job_id, 1e5)
    assert record is not None
    assert record.is_final, f"{job_id} is {record.state}: {worker.waits_for(record)}"
    return record


async def refused(worker: Worker, body: bytes, key: str = "") -> Rejected:
    try:
        await worker.submit(body, key)
    except Rejected as rejected:
        return rejected
    raise AssertionError("it was taken")


def code_of(record: ContainerRecord) -> Code | None:
    return Code(record.error.code) if record.error is not None else None


Body = Callable[[Rig], Coroutine[Any, Any, None]]


def with_rig(test: Body) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        virtually(tmp_path, test)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def virtually(folder: Path, body: Body) -> None:
    """Run it; nothing may run on afterwards."""
    loop = _Threadless()
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(_whole(Rig(folder, loop), body))
    finally:
        asyncio.set_event_loop(None)
        loop.close()


async def _whole(rig: Rig, body: Body) -> None:
    try:
        await body(rig)
    finally:
        await rig.close()
    await asyncio.sleep(0)
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not left, f"somebody forgot {left}"
