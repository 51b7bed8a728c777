"""The jobs of Penstock's side, an engine in this process, and worker processes beside it.

`python -m ours.system FOLDER NAME SLOTS` is one worker process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from cpu import Sampler
from marks import mark
from processes import start, stop

import penstock
from penstock.adapters.link.address import Address
from penstock.app.application import make_executors
from penstock.app.client import Client
from penstock.app.engine import Engine
from penstock.app.portal import Portal
from penstock.app.service import run_service
from penstock.app.worker_process import WorkerProcess
from penstock.config import Settings, load
from penstock.core.job import JobRequest
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import EngineStatus
from penstock.ports.store import Durability, Verified

Figures = dict[str, float | None]
SLOTS = 32
PROFILE = "BENCH_PROFILE"
"""The variable that names the file for a worker's profile."""
SERVER = "BENCH_SERVER"
"""The variable that has the process id of the database's server, if there is one."""
_BULK = 1000

# -- jobs ---------------------------------------------------------------------------

NOOP = "job.bench.noop"
IDEMPOTENT = "job.bench.idempotent"
THREAD = "job.bench.thread"
NAP = "job.bench.nap"
SHORT = "job.bench.short"
TENANTS = ("t0", "t1", "t2", "t3")
RARE = "rare"
"""In a varied store: the tenant whose jobs are few and old."""

app = penstock.App()


@app.job(NOOP)
async def noop(sent: int = 0) -> None:
    mark(sent)


@app.job(IDEMPOTENT, idempotent=True)
async def noop_that_may_run_twice(sent: int = 0) -> None:
    mark(sent)


@app.job(THREAD)
def noop_in_a_thread(sent: int = 0) -> None:
    mark(sent)


@app.job(NAP, idempotent=True)
def nap(sent: int = 0) -> None:
    time.sleep(0.02)
    mark(sent)


@app.job(SHORT)
async def short(sent: int = 0) -> None:
    await asyncio.sleep(0.01)
    mark(sent)


def topic_of(tenant: str) -> str:
    return f"job.bench.{tenant}"


async def nothing(sent: int = 0) -> None:
    pass


async def failing(sent: int = 0) -> None:
    raise RuntimeError("it always fails")


for _tenant in TENANTS:
    app.job(topic_of(_tenant), idempotent=True)(nothing)
app.job(topic_of(RARE), idempotent=True)(failing)


# -- the engine and its workers -------------------------------------------------------


def settings_for(folder: Path) -> Settings:
    """The defaults: every commit flushed to disk, every transition in the journal."""
    settings = load(flags={"data_dir": str(folder), "unknown_topics": "hold"})
    assert settings.durability is Durability.DISK
    return settings


class System:
    """A running engine and a client of it. Only here is the engine's inside looked at."""

    def __init__(self, engine: Engine, client: Client) -> None:
        self.engine, self.client = engine, client

    @property
    def finished(self) -> int:
        """How many jobs have come to a durable end since the engine started."""
        return self.engine.open_jobs.finished

    @property
    def unjudged(self) -> int:
        """How many jobs the safety kernel has not judged yet."""
        return len(self.engine.open_jobs.unjudged)

    async def submit_requests(self, requests: list[JobRequest]) -> None:
        """Submit as an API server does: ready-made requests, without a client."""
        await self.engine.api.submit(requests)

    async def fill(self, topic: str, jobs: int) -> None:
        """Submit so many, and see the safety kernel judge them all."""
        await self.submit(topic, jobs)
        await self.judged()

    async def submit(self, topic: str, jobs: int) -> None:
        for begin in range(0, jobs, _BULK):
            await self.client.asubmit_many(topic, [{"sent": 0}] * min(_BULK, jobs - begin))

    async def judged(self) -> None:
        """Wait until no job is new, and the commit that says so is over."""
        await until(lambda: not self.unjudged)
        await asyncio.sleep(0.1)

    async def wait_finished(self, jobs: int) -> None:
        if not await until(lambda: self.finished >= jobs):
            raise TimeoutError(f"{self.finished} of {jobs} jobs ended")

    async def wait_for_workers(self, count: int) -> None:
        for _ in range(1000):
            if len(await self.client.aworkers()) >= count:
                return
            await asyncio.sleep(0.02)
        raise TimeoutError(f"{count} workers did not join")

    async def check(self, jobs: int) -> None:
        """Read the whole store: all SUCCEEDED, and every step of every job journalled."""
        verified = await self.client.averify()
        check_all_succeeded(await self.client.astatus(), verified, jobs)


def check_all_succeeded(status: EngineStatus, verified: Verified, jobs: int) -> None:
    tally = status.tally
    assert tally == {JobState.SUCCEEDED: jobs}, f"{jobs} submitted, the store has {tally}"
    assert not verified.mismatches, verified.mismatches[:3]
    assert verified.transitions >= 5 * jobs, verified


@asynccontextmanager
async def running(
    folder: Path, *, local: bool = False, settings: Settings | None = None
) -> AsyncIterator[System]:
    """An engine on this folder; with `local`, one that works itself."""
    settings = settings or settings_for(folder)
    executors = make_executors(app, settings) if local else []
    async with Engine(settings, executors) as engine:
        portal = Portal(asyncio.get_running_loop())
        client = Client(engine.api, portal, app.functions)
        app.bind(client)
        yield System(engine, client)


@contextmanager
def engine_process(folder: Path) -> Iterator[int]:
    """'penstock up' on this folder in a process of its own; gives its id."""
    log = folder.parent / "engine.log"
    code = "import sys; from penstock.cli import main; sys.exit(main())"
    options = ["--data", str(folder), "up", "--no-http", "--no-worker"]
    hold = {"PENSTOCK_UNKNOWN_TOPICS": "hold"}
    process = start([sys.executable, "-c", code, *options], log, hold)
    try:
        end = time.monotonic() + 30
        while b"ready" not in log.read_bytes():
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the engine did not start: {log.read_text()[-1000:]}")
            time.sleep(0.02)
        yield process.pid
    finally:
        stop(process)


def start_worker(
    folder: Path,
    name: str = "w1",
    slots: int = SLOTS,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "ours.system", str(folder), name, str(slots)]
    return start(argv, folder.parent / "worker.log", environment)


def start_workers(
    folder: Path,
    count: int,
    environment: Mapping[str, str] | None = None,
    slots: int = SLOTS,
) -> list[subprocess.Popen[bytes]]:
    return [start_worker(folder, f"w{n}", slots, environment) for n in range(1, count + 1)]


async def until(met: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Wait for something; whether it came to be in time."""
    end = time.monotonic() + seconds
    while not met():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.005)
    return True


async def work(folder: str, name: str, slots: str) -> None:
    """One worker process; with the variable, its processor time is sampled."""
    settings = load(flags={"data_dir": folder, "concurrency": int(slots)})
    site = WorkerProcess(app, Address(path=settings.socket), settings, worker_id=name)
    working = asyncio.ensure_future(site.run())
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, working.cancel)
    sampler = Sampler() if PROFILE in os.environ else None
    if sampler is not None:
        sampler.start()
    await asyncio.gather(working, return_exceptions=True)
    if sampler is not None:
        sampler.stop()
        sampler.save(Path(os.environ[PROFILE]))


if __name__ == "__main__":
    run_service(work(*sys.argv[1:]))
