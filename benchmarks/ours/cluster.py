"""Jobs in PostgreSQL: from submit to done, and how soon a killed owner is replaced."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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
from penstock.adapters.postgres.admin import database_status, migrate_database
from penstock.adapters.postgres.schema import PARTITION, Address, connect, ensure_partitions
from penstock.app.shards import folder_of
from penstock.core.shards import shard_of
from penstock.lifecycles.canonical import JobState

Figures = dict[str, float | None]
_BULK = 1000


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


def shards(folder: Path, *, shards: int, jobs: int, slots: int) -> Figures:
    """As `through`, of so many shards at once, with an engine and a worker process for each."""
    url = os.environ["PENSTOCK_STORE"]
    asyncio.run(migrate_database(url, shards))
    tenants = {shard_of(name := f"t{n}", shards): name for n in range(1000)}
    with ExitStack() as ending:
        homes = {}
        for n in range(shards):
            home = folder / str(n) / "data"
            home.parent.mkdir(parents=True)
            homes[ending.enter_context(engine_process(home))] = home
        owners = _spread(url, shards)
        folders = [folder_of(homes[pid], n) for n, pid in enumerate(owners)]
        ending.enter_context(started([start_worker(one, slots=slots) for one in folders]))
        clients = [ending.enter_context(penstock.connect(data=one)) for one in folders]
        for client in clients:
            while not client.workers():
                time.sleep(0.02)
        share = jobs // shards
        with ThreadPoolExecutor(shards) as threads:
            begin = time.monotonic()
            work = [
                threads.submit(_through, client, share, tenants[n])
                for n, client in enumerate(clients)
            ]
            for one in work:
                one.result()
            took = time.monotonic() - begin
    return {"rate": share * shards / took}


def _spread(url: str, shards: int) -> list[int]:
    """The processes that own the shards, once each is another one."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        found = asyncio.run(database_status(url))
        owners = [one.owner for one in found.shards if one.owned] or [found.owner]
        if len({*owners}) == shards:
            return [int(owner.rpartition(":")[2]) for owner in owners]
        time.sleep(0.2)
    raise TimeoutError(f"{shards} shards are not spread over as many engines")


def _through(client: penstock.Client, jobs: int, tenant: str) -> None:
    for begin in range(0, jobs, _BULK):
        inputs = [{"sent": 0}] * min(_BULK, jobs - begin)
        client.submit_many(IDEMPOTENT, inputs, tenant=tenant)
    end = time.monotonic() + 120
    while client.status().tally.get(JobState.SUCCEEDED, 0) < jobs:
        if time.monotonic() > end:
            raise TimeoutError(f"{jobs} jobs did not end")
        time.sleep(0.02)


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
