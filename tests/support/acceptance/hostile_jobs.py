"""What the engine of test_hostile_caller serves."""

from __future__ import annotations

import asyncio
from typing import Any

import penstock
from penstock import Pipeline

app = penstock.App()


@app.job("job.calm.add")
async def add(a: int, b: int = 1) -> int:
    return a + b


@app.job("job.open.any")
async def anything(value: Any = None) -> str:
    return "fine"


@app.job("job.open.named")
async def named(**values: Any) -> str:
    return "fine"


@app.job("job.open.fail")
async def fail(text: str) -> None:
    raise ValueError(text)


@app.job("job.open.slow")
async def slow() -> None:
    await asyncio.sleep(3600)


tiny = Pipeline("tiny")


@tiny.map(over=lambda config, ctx: [1, 2])
async def double(number: int, ctx: Any) -> int:
    return 2 * number


app.add(tiny)
