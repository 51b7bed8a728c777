"""A scenario, where it plays, and the row of the table that it becomes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import penstock
from penstock import Transition

T = TypeVar("T")


@dataclass(frozen=True)
class Stage:
    """Where scenarios play: one running engine, and people who come in through HTTP."""

    ps: penstock.Client
    data: Path
    people: Mapping[str, penstock.Client]
    stack: AsyncExitStack
    """Of what lasts as long as the demo."""
    stays: bool = False
    """Whether the dashboard stays open, to show what the scenarios started."""

    @asynccontextmanager
    async def started(self, context: AbstractAsyncContextManager[T]) -> AsyncIterator[T]:
        """With something that a scenario starts; it lasts if the dashboard stays open."""
        if self.stays:
            yield await self.stack.enter_async_context(context)
        else:
            async with context as value:
                yield value


@dataclass(frozen=True)
class Story:
    """What a scenario did: its job, if one was stored, and what is worth saying of it."""

    job: penstock.JobHandle | None
    note: str = ""
    way: str = ""
    end: str = ""
    """Where it went and ended, if it was no job of the engine."""


@dataclass(frozen=True)
class Scenario:
    """One kind of job, and the end that it must come to."""

    kind: str
    topic: str
    end: str
    play: Callable[[Stage], Awaitable[Story]]
    missing: Callable[[], str] = lambda: ""
    """What an optional scenario lacks on this machine; it is then skipped."""


@dataclass(frozen=True)
class Row:
    scenario: Scenario
    end: str = ""
    note: str = ""
    chain: list[list[Transition]] = field(default_factory=list)
    """The history of the job, and of each retry after it."""
    way: str = ""
    problem: str = ""
    skipped: bool = False

    @property
    def seconds(self) -> float | None:
        return self.chain[-1][-1].at - self.chain[0][0].at if self.chain else None


async def play(scenario: Scenario, stage: Stage) -> Row:
    """Play it, and say what came of it. Never raises: a demo should show all it can."""
    if lacks := scenario.missing():
        return Row(scenario, "skipped", lacks, skipped=True)
    try:
        story = await scenario.play(stage)
        chain = await _chain(stage.ps, story.job)
    except Exception as error:
        return Row(scenario, "?", problem=f"{type(error).__name__}: {error}")
    end = story.end or (str(chain[-1][-1].after) if chain else "refused")
    problem = "" if end == scenario.end else f"ended {end}, and should have ended {scenario.end}"
    return Row(scenario, end, story.note, chain, story.way, problem)


async def _chain(ps: penstock.Client, job: penstock.JobHandle | None) -> list[list[Transition]]:
    histories = []
    while job is not None:
        record = await job.arefresh()
        histories.append(await job.ahistory())
        job = await ps.aget(record.successor) if record.successor else None
    return histories


def expect(true: bool, otherwise: str) -> None:
    """Check what a scenario promises beside its end."""
    if not true:
        raise AssertionError(otherwise)


async def until(job: penstock.JobHandle, holds: Callable[[penstock.Job], bool]) -> None:
    """Wait until this can be said of the job."""
    async with asyncio.timeout(20):
        while not holds(await job.arefresh()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)  # no event of ours: somebody elsewhere makes it happen


async def running(job: penstock.JobHandle) -> None:
    """Wait until a worker has started the job."""
    await until(job, lambda record: record.state is penstock.JobState.RUNNING)
