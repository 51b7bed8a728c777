"""What the tests of pipeline jobs have in common: virtual time, and the seed's six stages."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

from msgspec import Struct

from penstock.testing.clock import VirtualLoop
from penstock.workloads.pipeline.context import AsyncStageContext
from penstock.workloads.pipeline.definition import Definition

STAGES = ("ingest", "classify", "neutralize", "brief", "evaluation", "optimization")
"""The seed's six."""
ITEM = 1.0
"""Seconds that one call of a stage takes."""


def on_virtual_time(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        loop = VirtualLoop()
        try:
            loop.run_until_complete(test(*args, **kwargs))
        finally:
            loop.close()

    return run


class Journal:
    """What was called, and whether it came to an end."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, str]] = []
        self.ended: list[tuple[str, str]] = []
        self.running: set[tuple[str, str]] = set()
        self.failing: set[tuple[str, str]] = set()
        self.seconds: dict[str, float] = {}
        """How long the calls of a stage take, where that is not ITEM."""
        self._reached: dict[str, asyncio.Event] = {stage: asyncio.Event() for stage in STAGES}

    async def work(self, ctx: AsyncStageContext) -> None:
        call = (ctx.stage, ctx.key)
        self.begun.append(call)
        self.running.add(call)
        try:
            self._reached[ctx.stage].set()
            await asyncio.sleep(self.seconds.get(ctx.stage, ITEM))
            if call in self.failing:
                raise ValueError(f"{ctx.key} can't be done")
            self.ended.append(call)
        finally:
            self.running.discard(call)

    async def reached(self, stage: str) -> None:
        """Wait until a call of this stage is under way."""
        await self._reached[stage].wait()

    def stages(self) -> list[str]:
        """The stages that were begun, in order."""
        return list(dict.fromkeys(stage for stage, _ in self.begun))


class Config(Struct):
    sources: tuple[str, ...] = ("a", "b")
    enable_evaluation: bool = False
    enable_auto_optimize: bool = False


def news_shaped(journal: Journal, **options: Any) -> Definition:
    """The seed's pipeline, with nothing in it but time: two articles a source."""
    news = Definition("news", config=Config, summary_after="brief", **options)

    @news.map(over="sources")
    async def ingest(source: str, ctx: AsyncStageContext) -> list[str]:
        await journal.work(ctx)
        return [f"{source}{n}" for n in range(2)]

    @news.map(over=ingest)
    async def classify(article: str, ctx: AsyncStageContext) -> str:
        await journal.work(ctx)
        return article

    @news.map(over=classify)
    async def neutralize(article: str, ctx: AsyncStageContext) -> str:
        await journal.work(ctx)
        return article.upper()

    @news.step()
    async def brief(results: Any, ctx: AsyncStageContext) -> str:
        await journal.work(ctx)
        return " ".join([article async for article in results])

    @news.step(enabled="enable_evaluation")
    async def evaluation(results: Any, ctx: AsyncStageContext) -> int:
        await journal.work(ctx)
        return 1

    @news.step(enabled="enable_auto_optimize", needs=[evaluation])
    async def optimization(results: Any, ctx: AsyncStageContext) -> int:
        await journal.work(ctx)
        return 2

    return news
