"""The application of the real-process tests. Each run leaves marks outside the engine."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import penstock

app = penstock.App()


def mark(word: str) -> None:
    """Append `word job_id attempt pid` to the marks file, in one write."""
    ctx = penstock.current()
    line = f"{word} {ctx.job_id} {ctx.attempt} {os.getpid()}\n"
    handle = os.open(os.environ["PENSTOCK_X_MARKS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(handle, line.encode())
    os.close(handle)


@app.job("job.chaos.quick", idempotent=True)
async def quick(n: int) -> int:
    mark("begin")
    mark("end")
    return n * 2


@app.job("job.chaos.short", idempotent=True)
async def short(n: int) -> int:
    """Twenty milliseconds, as in the benchmarks of the peers."""
    mark("begin")
    await asyncio.sleep(0.02)
    mark("end")
    return n


@app.job("job.chaos.gated", idempotent=True, timeout=120)
async def gated(gate: str) -> str:
    """Runs until a file appears."""
    mark("begin")
    while not os.path.exists(gate):  # noqa: ASYNC110, ASYNC240 the gate is another process's
        await asyncio.sleep(0.01)
    mark("end")
    return "through"


@app.job("job.chaos.once", timeout=120)
async def once(gate: str) -> str:
    """The same, but never to be run twice under one id."""
    return await gated.fn(gate)


ONE_RETRY = penstock.RetryPolicy(retries=1, delay=0.1)


@app.job("job.chaos.once_retried", timeout=120, retries=ONE_RETRY)
async def once_retried(gate: str) -> str:
    return await gated.fn(gate)


@app.job("job.chaos.hog", timeout=120)
async def hog(seconds: float) -> str:
    """Computes without ever awaiting: its worker's event loop is blocked meanwhile."""
    mark("begin")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))
    mark("end")
    return "done"


@app.job("job.chaos.suicide")
async def suicide() -> None:
    """Takes its worker with it, before the worker can say a word."""
    mark("begin")
    os.kill(os.getpid(), signal.SIGKILL)
