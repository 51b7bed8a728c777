"""Pipelines for the crash tests: each call of an item is written down, durably, when it ends."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec

import penstock

app = penstock.App()
walk = penstock.Pipeline("walk", cancel_grace=1)
far = penstock.Pipeline("far")

CALLS = Path(os.environ.get("PENSTOCK_X_MARKS", os.devnull)).with_name("calls")


def mark(what: str) -> None:
    handle = os.open(CALLS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(handle, f"{what} {os.getpid()}\n".encode())
    os.close(handle)


def calls() -> list[str]:
    return CALLS.read_text().splitlines() if CALLS.exists() else []


@walk.map(over=lambda config, ctx: range(config.get("n", 20)), concurrency=2)
async def first(n: int, ctx: Any) -> int:
    await asyncio.sleep(config_pause(ctx))
    mark(f"first {n}")
    return n


@walk.map(over=first)
def second(n: int, ctx: Any) -> int:
    time.sleep(config_pause(ctx))
    mark(f"second {n}")
    return n * n


@walk.step()
async def last(results: Any, ctx: Any) -> int:
    return sum([n async for n in results])


def config_pause(ctx: Any) -> float:
    return float(ctx.config.get("pause", 0.0))


@far.map(over=lambda config, ctx: range(config["n"]), distributed=True, concurrency=8)
async def child(n: int, ctx: Any) -> int:
    await asyncio.sleep(0.05)
    mark(f"child {n}")
    return n


@far.step()
async def total(results: Any, ctx: Any) -> int:
    return sum([n async for n in results])


class Sized(msgspec.Struct):
    n: Annotated[int, msgspec.Meta(ge=1, le=5)] = 1


sized = penstock.Pipeline("sized", config=Sized)


@sized.step()
async def say(ctx: Any) -> int:
    return int(ctx.config.n)


shared = penstock.Pipeline("shared", single_flight=False, breakers={"feeds": {"threshold": 2}})


@shared.step()
async def count(ctx: Any) -> list[int]:
    """The processes that ran this before."""
    before = await ctx.recall("seen") or []
    await ctx.remember("seen", [*before, os.getpid()])
    return list(before)


@shared.step(breaker="feeds", when_open="skip", retry=0, enabled="fetches")
async def fetch(ctx: Any) -> None:
    raise ConnectionError("the feed is down")


app.add(walk, far, sized, shared)
