"""Pipelines: stages in order, and an honest word about what came of them."""

from __future__ import annotations

import asyncio
import re
from importlib.util import find_spec
from pathlib import Path

import penstock
from scenarios.scenario import Scenario, Stage, Story, expect

pages = penstock.Pipeline(
    "pages",
    single_flight=False,
    cancel_grace=2,
    doc="Counts the words of pages; one of them is always missing the first time.",
)


class Rooms:
    """What the demo's stages meet outside."""

    def __init__(self) -> None:
        self.mended = False
        self.calls: list[str] = []
        self.reached = asyncio.Event()


ROOMS = Rooms()


@pages.map(over=lambda config, ctx: config.get("pages", ["one", "two", "three"]))
async def fetch(page, ctx):
    ROOMS.calls.append(page)
    if page == "two" and not ROOMS.mended:
        raise ValueError("page two is missing")
    if page == "endless":
        ROOMS.reached.set()
        await asyncio.sleep(3600)
    return {"page": page, "words": len(page)}


@pages.map(over=fetch)
def count(page, ctx):
    return page["words"]


@pages.step()
async def total(results, ctx):
    return sum([words async for words in results])


async def again(stage: Stage) -> Story:
    ada = stage.people["ada"]
    first = await ada.pipelines.astart("pages")
    await (await ada.aget(first.id)).aresult(20)
    before = len(ROOMS.calls)
    ROOMS.mended = True
    second = await ada.pipelines.aretry_failed(first.id)
    job = await ada.aget(second.id)
    result = await job.aresult(20)
    expect(result["status"] == "COMPLETED", f"it ended {result['status']}")
    expect(ROOMS.calls[before:] == ["two"], f"it ran {ROOMS.calls[before:]} again")
    record = await ada.pipelines.aget(second.id)
    reused = sum(one.reused for one in record.stages)
    return Story(job, f"PARTIAL, then retry_failed ran page two alone: COMPLETED, {reused} reused")


async def stopped(stage: Stage) -> Story:
    ada = stage.people["ada"]
    run = await ada.pipelines.astart("pages", {"pages": ["one", "endless"]})
    async with asyncio.timeout(20):
        async for event in ada.pipelines.astream(run.id):
            if event.kind == "stage_start":
                break
        await ROOMS.reached.wait()
    answer = await ada.pipelines.acancel(run.id)
    expect(answer.status == "CANCELLED", f"the answer was {answer.status}")
    record = await ada.pipelines.aget(run.id)
    expect(not record.abandoned_items, f"left running: {record.abandoned_items}")
    return Story(await ada.aget(run.id), "cancelled in the middle of a stage; nothing left running")


def add_news(app: penstock.App, folder: Path) -> None:
    """The example `news`, with its sample feeds; its home is chosen here, not by a job's input."""
    if not without_feeds():
        from news.pipeline import build
        from news.settings import SAMPLE, SAMPLE_TIME, load

        settings = load(folder / "news", SAMPLE, as_of=SAMPLE_TIME)
        app.add(build(settings, app.client))


async def news(stage: Stage) -> Story:
    run = await stage.ps.pipelines.astart("news")
    job = await stage.ps.aget(run.id)
    result = await job.aresult(60)
    expect(result["status"] == "PARTIAL", f"it ended {result['status']}")
    record = await stage.ps.pipelines.aget(run.id)
    ingest = record.stage("ingest")
    assert ingest is not None
    brief = (stage.data.parent / "news" / "brief.md").read_text()
    stories = re.findall(r"^- \*\*\[(.+?)\]\(", brief, re.M)
    expect(len(stories) > 8, f"the brief has {len(stories)} stories")
    return Story(
        job,
        f"PARTIAL: {ingest.failed} of {ingest.total} feeds is dead; a brief of {len(stories)}"
        f" stories, as: {stories[0]}",
    )


def without_feeds() -> str:
    there = find_spec("feedparser") and find_spec("trafilatura")
    return "" if there else "it needs pip install 'penstock[news]'"


SCENARIOS = [
    Scenario("a pipeline, retried in part", "job.pipeline.pages", "SUCCEEDED", again),
    Scenario("a pipeline, cancelled", "job.pipeline.pages", "CANCELLED", stopped),
    Scenario("the news pipeline", "job.pipeline.news", "SUCCEEDED", news, without_feeds),
]
