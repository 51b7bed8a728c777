"""Jobs in PostgreSQL: from submit to done, and how soon a killed owner is replaced."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from ours.jobs import NOOP
from ours.system import engine_process, running, start_worker, start_workers
from processes import running as started

import penstock

Figures = dict[str, float | None]


async def through(folder: Path, *, jobs: int, workers: int) -> Figures:
    """Submitted a thousand a call while worker processes run them, to the last durable end."""
    async with running(folder) as system:
        with started(start_workers(folder, workers)):
            await system.wait_for_workers(workers)
            begin = time.monotonic()
            await system.submit(NOOP, jobs)
            await system.wait_finished(jobs)
            took = time.monotonic() - begin
        await system.check(jobs)
    return {"rate": jobs / took}


def takeover(folder: Path) -> Figures:
    """SIGKILL the engine that owns the database; the time until a job of the other one is done."""
    first, second = folder / "first" / "data", folder / "second" / "data"
    for data in (first, second):
        data.parent.mkdir(parents=True)
    with (
        engine_process(first) as owner,
        engine_process(second),
        started([start_worker(second)]),
        penstock.connect(data=second) as client,
    ):
        client.submit(NOOP, {"sent": 0}).result(30)
        begin = time.monotonic()
        os.kill(owner, signal.SIGKILL)
        client.submit(NOOP, {"sent": 0}).result(30)
        return {"takeover_s": time.monotonic() - begin}
