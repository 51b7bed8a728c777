"""An engine in this process, and workers beside it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from ours.jobs import app
from processes import start

from penstock.app.application import make_executors
from penstock.app.client import Client
from penstock.app.engine import Engine
from penstock.app.portal import Portal
from penstock.config import Settings, load
from penstock.lifecycles.canonical import JobState
from penstock.ports.store import Durability

SLOTS = 32
_BULK = 1000


def settings_for(folder: Path) -> Settings:
    """The defaults: every commit flushed to disk, every transition in the journal."""
    settings = load(flags={"data_dir": str(folder), "unknown_topics": "hold"})
    assert settings.durability is Durability.DISK
    return settings


class System:
    """A running engine and its caller's view."""

    def __init__(self, engine: Engine, client: Client) -> None:
        self.engine, self.client = engine, client

    @property
    def finished(self) -> int:
        """How many jobs have come to a durable end since the engine started."""
        return self.engine.board.finished

    async def fill(self, topic: str, jobs: int) -> None:
        """Submit so many, and see the safety kernel judge them all."""
        await self.submit(topic, jobs)
        await self.judged()

    async def submit(self, topic: str, jobs: int) -> None:
        for begin in range(0, jobs, _BULK):
            await self.client.asubmit_many(topic, [{"sent": 0}] * min(_BULK, jobs - begin))

    async def judged(self) -> None:
        """Wait until no job is new, and the commit that says so is over."""
        await until(lambda: not self.engine.board.unjudged)
        await asyncio.sleep(0.1)

    async def check(self, jobs: int) -> None:
        """Read the whole store: all SUCCEEDED, and every step of every job journalled."""
        verified = await self.client.desk.verify()
        tally = (await self.client.desk.status()).tally
        assert tally == {JobState.SUCCEEDED: jobs}, f"{jobs} submitted, the store has {tally}"
        assert not verified.mismatches, verified.mismatches[:3]
        assert verified.transitions >= 5 * jobs, verified


@asynccontextmanager
async def running(folder: Path, *, local: bool = False) -> AsyncIterator[System]:
    """An engine on this folder; with `local`, one that works itself."""
    settings = settings_for(folder)
    executors = make_executors(app, settings) if local else []
    async with Engine(settings, executors) as engine:
        portal = Portal(asyncio.get_running_loop())
        yield System(engine, Client(engine.desk, portal, time.time, app.functions))


def start_worker(folder: Path, name: str = "w1", slots: int = SLOTS) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "ours.worker", str(folder), name, str(slots)]
    return start(argv, folder.parent / "worker.log")


def start_workers(folder: Path, count: int) -> list[subprocess.Popen[bytes]]:
    return [start_worker(folder, f"w{n}") for n in range(1, count + 1)]


async def until(met: Callable[[], bool], seconds: float = 120.0) -> bool:
    """Wait for something; whether it came to be in time."""
    end = time.monotonic() + seconds
    while not met():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(0.005)
    return True
