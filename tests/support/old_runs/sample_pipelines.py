"""Pipelines of the data directories in this folder. Old and new versions of Penstock import it."""

from __future__ import annotations

import asyncio
import inspect
import os
from pathlib import Path
from typing import Any

import penstock

HOLD = "hold"
"""The order at which a run waits, as long as the file in OLD_RUNS_HOLD is there."""
LARGE = "large"
"""The order whose output is a blob."""
BLOB = 20_000
_DISTRIBUTED = (
    "distributed"
    if "distributed" in inspect.signature(penstock.Pipeline.map).parameters
    else "spread"
)


def called(name: str) -> None:
    """Write down a call, so that another process can count them."""
    with Path(os.environ["OLD_RUNS_CALLS"]).open("a") as calls:
        calls.write(f"{name}\n")


def is_held() -> bool:
    return Path(os.environ["OLD_RUNS_HOLD"]).exists()


orders = penstock.Pipeline(
    "orders",
    single_flight=False,
    alerts=[penstock.AlertRule(code="FAILURES", metric="fetch.failed", above=0)],
)


@orders.step(name="prepare")
async def prepare(ctx: Any) -> str:
    called("prepare")
    ctx.metric("prepared", 1)
    return "ready"


@orders.map(over="orders", name="fetch", key=str, concurrency=1)
async def fetch(order: str, ctx: Any) -> str:
    while order == HOLD and is_held():  # noqa: ASYNC110 another process removes the file
        await asyncio.sleep(0.02)
    called(f"fetch {order}")
    ctx.metric("letters", len(order))
    if order.startswith("bad"):
        raise ValueError(f"no such order: {order}")
    return "x" * BLOB if order == LARGE else order.upper()


@orders.step(name="report")
async def report(results: Any, ctx: Any) -> int:
    called("report")
    total = sum([len(one) async for one in results])
    await ctx.remember("last", {"total": total, "before": await ctx.recall("last")})
    return total


feeds = penstock.Pipeline("feeds", breakers={"feeds": {"threshold": 2, "cooldown": 86_400 * 30}})


@feeds.map(over="urls", name="read", breaker="feeds", when_open="skip", concurrency=1)
async def read(url: str, ctx: Any) -> str:
    raise ConnectionError(f"{url} does not answer")


apart = penstock.Pipeline("apart")


@apart.map(over="words", name="shout", **{_DISTRIBUTED: True})
async def shout(word: str, ctx: Any) -> str:
    return word.upper()


ALL = (orders, feeds, apart)
app = penstock.App()
app.add(*ALL)
