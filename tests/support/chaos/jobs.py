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


@app.job("job.chaos.steps", idempotent=True, timeout=120)
async def steps(ctx: penstock.Context, count: int, notes: str) -> int:
    """Does things in order, each with a checkpoint, and goes on after the last one kept."""
    mark("begin")
    kept = {row.n async for row in ctx.steps("thing")}
    with open(notes, "a", buffering=1) as file:  # noqa: ASYNC230 it is read when this is killed
        for n in range(count):
            if n not in kept:
                file.write(f"did {n} {ctx.attempt}\n")
                await ctx.checkpoint([penstock.Step("thing", n, outcome="done")])
                file.write(f"kept {n} {ctx.attempt}\n")
                await asyncio.sleep(0.005)
    mark("end")
    return len(kept)


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


@app.job("job.chaos.child", timeout=120)
async def child(n: int) -> int:
    """One of many, not to be run twice; every tenth fails."""
    mark("begin")
    await asyncio.sleep(0.02)
    mark("end")
    if n % 10 == 9:
        raise ValueError(f"child {n} failed")
    return n


@app.job("job.chaos.parent", idempotent=True, timeout=120)
async def parent(count: int, gate: str) -> list[int | str]:
    """Submits its children in an order that differs between attempts, and takes what they say."""
    mark("begin")
    numbers = list(range(count))
    if penstock.current().attempt > 1:
        numbers.reverse()
    submitted = child.options(labels={"place.role": "child"})
    handles = {n: await submitted.asubmit(n) for n in numbers}
    results: dict[int, int | str] = {}
    for n in numbers:
        try:
            results[n] = await handles[n]
        except penstock.JobFailed as failed:
            results[n] = failed.message
        if len(results) > count // 2 and not os.path.exists(gate):  # noqa: ASYNC240
            await asyncio.sleep(60)
    mark("end")
    return [results[n] for n in sorted(results)]


@app.job("job.chaos.waiting_parent", idempotent=True, timeout=300)
async def waiting_parent(gate: str, children: int) -> int:
    """Waits for children that run until a file appears."""
    mark("begin")
    jobs = await gated.asubmit_many([(gate,) for _ in range(children)])
    ends = await asyncio.gather(*(job.aresult() for job in jobs))
    mark("end")
    return len(ends)


@app.job("job.chaos.thread_parent", idempotent=True, timeout=300)
def thread_parent(gate: str, children: int) -> int:
    """The same, in a thread that submits and waits one by one."""
    mark("begin")
    jobs = [gated.submit(gate) for _ in range(children)]
    ends = [job.result() for job in jobs]
    mark("end")
    return len(ends)
