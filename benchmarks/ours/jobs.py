"""The jobs that Penstock runs here; the peers' are the same."""

from __future__ import annotations

import time

from marks import mark

import penstock

NOOP = "job.bench.noop"
IDEMPOTENT = "job.bench.idempotent"
THREAD = "job.bench.thread"
NAP = "job.bench.nap"

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
