"""Jobs in PostgreSQL: from submit to done, and how soon a killed owner is replaced."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from marks import Marks
from ours.speed import drain_watched
from ours.system import (
    IDEMPOTENT,
    NOOP,
    SLOTS,
    engine_process,
    running,
    start_worker,
    start_workers,
)
from processes import running as started

import penstock
from penstock.adapters.postgres.schema import PARTITION, Address, connect, ensure_partitions

Figures = dict[str, float | None]


async def through(
    folder: Path, *, jobs: int, workers: int, topic: str = NOOP, slots: int = SLOTS
) -> Figures:
    """Submitted a thousand a call while worker processes run them, to the last durable end."""
    async with running(folder) as system:
        with started(start_workers(folder, workers, slots=slots)):
            await system.wait_for_workers(workers)
            begin = time.monotonic()
            await system.submit(topic, jobs)
            await system.wait_finished(jobs)
            took = time.monotonic() - begin
        await system.check(jobs)
    return {"rate": jobs / took}


async def stored(folder: Path, *, stored: int, jobs: int, slots: int) -> Figures:
    """A backlog drained beside so many jobs that ended before; and the time of a page of them."""
    url = os.environ["PENSTOCK_STORE"]
    async with running(folder) as system:
        with started(start_workers(folder, 1)):
            await system.client.asubmit(NOOP, {"sent": 0})
            await system.wait_finished(1)
    await _fill_ended(url, stored)
    Marks.given().clear()
    async with running(folder) as system:
        await system.fill(IDEMPOTENT, jobs)
        with started(start_workers(folder, 1, slots=slots)) as pids:
            figures = await drain_watched(system, jobs, 1, pids)
        begin = time.perf_counter()
        assert len(await system.client.ajobs(limit=100)) == 100
        figures["page_ms"] = (time.perf_counter() - begin) * 1e3
        tally = (await system.client.astatus()).tally
        assert sum(tally.values()) == max(stored, 1) + jobs, tally
    return figures


async def _fill_ended(url: str, count: int) -> None:
    """Copies of the one ended job, so many that there are `count`."""
    db = await connect(Address.parse(url))
    columns = [
        row[0]
        for row in await db.fetch(
            "SELECT column_name FROM information_schema.columns WHERE table_schema = 'penstock'"
            " AND table_name = 'done' ORDER BY ordinal_position"
        )
    ]
    changed = {"seq": "seq + n", "job_id": "job_id || '-' || n"}
    values = ", ".join(changed.get(name, name) for name in columns)
    for first in range(1, count, PARTITION):
        last = min(first + PARTITION, count) - 1
        await ensure_partitions(db, "penstock", last)
        await db.execute(
            f"INSERT INTO penstock.done SELECT {values}"
            " FROM (SELECT * FROM penstock.done ORDER BY seq LIMIT 1) AS one"
            f" CROSS JOIN generate_series({first}, {last}) AS n"
        )
    await db.execute(
        "INSERT INTO penstock.tally SELECT state, tenant, $1 FROM penstock.done LIMIT 1", count - 1
    )
    await db.execute("VACUUM (ANALYZE) penstock.done")
    await db.close()


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
