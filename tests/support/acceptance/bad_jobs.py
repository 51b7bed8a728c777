"""Functions that misbehave, for the tests of bad input."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from typing import Any

import penstock

app = penstock.App()


@app.job("job.good.add")
async def add(a: int, b: int = 1) -> int:
    return a + b


@app.job("job.bad.big")
async def big(size: int) -> str:
    return "x" * size


@app.job("job.bad.unstorable")
async def unstorable() -> Any:
    return threading.Lock()


@app.job("job.bad.nan")
async def nan() -> float:
    return float("nan")


@app.job("job.bad.raises")
async def raises() -> None:
    raise LookupError("no such thing")


@app.job("job.bad.exits")
def exits() -> None:
    sys.exit(3)


@app.job("job.bad.endless", timeout=0.3)
async def endless() -> None:
    await asyncio.Event().wait()


@app.job("job.bad.endless_process", timeout=0.5, mode="process")
def endless_process() -> None:
    while True:
        time.sleep(60)


@app.job("job.bad.killed", mode="process")
def killed() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


@app.job("job.bad.hungry", mode="process", memory_limit=200 << 20)
def hungry() -> int:
    return len(bytearray(10 << 30))


@app.job("job.bad.exits_process", mode="process")
def exits_process() -> None:
    os._exit(7)
