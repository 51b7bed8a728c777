"""The jobs that Penstock runs here; the peers' are the same."""

from __future__ import annotations

import asyncio
import time

from marks import mark

import penstock

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
