"""What the tests of pipeline jobs have in common: the seed's six stages, and a place to run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import partial, wraps
from typing import Any, Self

from msgspec import Struct

from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.core.errors import StoreFailed
from penstock.lifecycles.pipeline import PipelineJobEvent
from penstock.testing.clock import LoopClock, VirtualLoop
from penstock.workloads.pipeline.context import AsyncStageContext
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.manager import PipelineJobManager
from penstock.workloads.pipeline.records import PipelineRecord
from penstock.workloads.pipeline.store import PipelineStore, Save, Saved

STAGES = ("ingest", "classify", "neutralize", "brief", "evaluation", "optimization")
"""The seed's six."""
ENDS = frozenset(
    {
        PipelineJobEvent.COMPLETE,
        PipelineJobEvent.COMPLETE_PARTLY,
        PipelineJobEvent.FAIL,
        PipelineJobEvent.CANCEL,
    }
)
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


class Line:
    """A store as one process sees it: it can be cut, and it can fail.

    Behind a cut line a process is as good as stopped: whatever it asks is answered only after
    the line was mended, as with SIGSTOP and SIGCONT.
    """

    def __init__(self, store: PipelineStore) -> None:
        self._store = store
        self._mended = asyncio.Event()
        self._mended.set()
        self.failing = False
        self.refused = 0
        self.saves: list[Save] = []
        """What was written with success."""
        self.before_save: Callable[[Save], Coroutine[Any, Any, object]] = _nothing

    def cut(self) -> None:
        self._mended.clear()

    def mend(self) -> None:
        self._mended.set()

    def when_ending(self) -> asyncio.Future[None]:
        """Done when a write that is to end a job was asked for."""
        asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def look(save: Save) -> None:
            if save.event in ENDS and not asked.done():
                asked.set_result(None)

        self.before_save = look
        return asked

    async def save(self, save: Save) -> Saved:
        await self.before_save(save)
        saved: Saved = await self._pass(self._store.save, save)
        self.saves.append(save)
        return saved

    def listen(self, listener: Callable[[Sequence[str]], None]) -> Callable[[], None]:
        return self._store.listen(listener)

    async def _pass(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        await self._mended.wait()
        if self.failing:
            self.refused += 1
            await asyncio.sleep(0)
            raise StoreFailed("the disk is on fire")
        return await call(*args, **kwargs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._pass, getattr(self._store, name))


async def _nothing(save: Save) -> None:
    pass


class Process:
    """What stands for one process: a manager with its own code, journal and line."""

    def __init__(
        self,
        store: PipelineStore,
        owner: str = "here",
        *,
        pipelines: Sequence[Definition] | None = None,
        definition: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.line, self.journal = Line(store), Journal()
        self.news = news_shaped(self.journal, **(definition or {}))
        self.clock = LoopClock(asyncio.get_running_loop())
        known = [self.news] if pipelines is None else pipelines
        self.manager = PipelineJobManager(
            self.line, known, MemoryBlobs(), self.clock, owner=owner, **options
        )

    async def __aenter__(self) -> Self:
        await self.manager.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.line.mend()
        self.line.failing = False
        await self.manager.shutdown()

    def freeze(self) -> None:
        """As SIGSTOP, or a death of which nobody heard: it says nothing any more."""
        self.line.cut()


async def record_of(store: PipelineStore, job_id: str) -> PipelineRecord:
    record = await store.get(job_id)
    assert record is not None
    return record
