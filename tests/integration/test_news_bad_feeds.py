"""A whole run of the news pipeline over HTTP, most of its feeds as bad as can be."""

from __future__ import annotations

import asyncio
from collections import Counter

from aiohttp import web
from tests.integration.test_news_fetching import FEED, serving
from tests.unit.test_news_feeds import billion_laughs

from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.clock import SystemClock
from penstock.testing.aio import run_async
from penstock.workloads.pipeline.manager import PipelineJobManager
from penstock.workloads.pipeline.news.pipeline import news
from penstock.workloads.pipeline.records import (
    ErrorClass,
    ItemOutcome,
    ItemRecord,
    PipelineRecord,
    StageStatus,
)
from penstock.workloads.pipeline.storage.memory import MemoryPipelineStore


class Feeds:
    """A server of good and bad feeds that counts what it is asked for."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        name = request.path.strip("/")
        self.asked[name] += 1
        match name:
            case "good":
                if request.headers.get("If-None-Match") == '"1"':
                    return web.Response(status=304)
                return web.Response(body=FEED, headers={"ETag": '"1"'})
            case "page":
                return web.Response(text="<html>Hello</html>", content_type="text/html")
            case "laughs":
                return web.Response(text=billion_laughs(), content_type="text/xml")
            case "circle":
                return web.Response(status=302, headers={"Location": "/circle"})
            case "big":
                return web.Response(body=bytes(1_000_000))
            case "busy" if self.asked[name] == 1:
                return web.Response(status=503, headers={"Retry-After": "0"})
            case "busy":
                body = FEED.replace(b"First of the day", b"From one that was busy")
                return web.Response(body=body)
            case "slow":
                await asyncio.sleep(30)
        return web.Response(status=404)


async def run(
    manager: PipelineJobManager,
    store: MemoryPipelineStore,
    sources: list[str],
    fetch_timeout: float = 20.0,
) -> tuple[PipelineRecord, dict[str, ItemRecord]]:
    config = {"sources": sources, "max_feed_bytes": 100_000, "fetch_timeout": fetch_timeout}
    job = await manager.start_job(news, config)
    record = await manager.wait(job.id)
    items = await store.items(job.id, "ingest", after=-1, limit=100)
    return record, {item.key.rpartition("/")[2]: item for item in items}


@run_async
async def test_every_bad_feed_fails_its_own_item_and_nothing_else() -> None:
    feeds, store = Feeds(), MemoryPipelineStore()
    names = ["page", "good", "laughs", "circle", "big", "busy", "gone"]
    async with (
        serving(feeds.answer) as server,
        PipelineJobManager(store, [news], MemoryBlobs(), SystemClock()) as manager,
    ):
        record, items = await run(manager, store, [f"{server.url}/{name}" for name in names])

    assert record.status is PipelineJobStatus.PARTIAL
    assert record.stage_progress["ingest"].status is StageStatus.PARTIAL
    said = {
        "page": "is a web page, not a feed",
        "laughs": "declares XML entities",
        "circle": "redirects for ever",
        "big": "is larger than 100,000 bytes",
        "gone": "answered 404",
    }
    for name, words in said.items():
        assert items[name].outcome is ItemOutcome.FAILED
        assert words in str(items[name].error)
        assert items[name].error_class is ErrorClass.PERMANENT
        assert items[name].attempts == 1
    assert items["good"].outcome is items["busy"].outcome is ItemOutcome.OK
    assert items["busy"].attempts == 2
    assert record.stage_progress["classify"].total == 2


@run_async
async def test_a_slow_feed_is_tried_again_and_then_given_up() -> None:
    feeds, store = Feeds(), MemoryPipelineStore()
    async with (
        serving(feeds.answer) as server,
        PipelineJobManager(store, [news], MemoryBlobs(), SystemClock()) as manager,
    ):
        sources = [f"{server.url}/slow", f"{server.url}/good"]
        record, items = await run(manager, store, sources, fetch_timeout=0.3)
    assert record.status is PipelineJobStatus.PARTIAL
    assert items["slow"].error_class is ErrorClass.TIMEOUT
    assert items["slow"].attempts == feeds.asked["slow"] > 1


@run_async
async def test_a_second_run_asks_only_whether_anything_is_new() -> None:
    feeds, store = Feeds(), MemoryPipelineStore()
    async with (
        serving(feeds.answer) as server,
        PipelineJobManager(store, [news], MemoryBlobs(), SystemClock()) as manager,
    ):
        first, _ = await run(manager, store, [f"{server.url}/good"])
        second, _ = await run(manager, store, [f"{server.url}/good"])
    assert "not_modified" not in first.stage_progress["ingest"].metrics
    assert second.stage_progress["ingest"].metrics["not_modified"] == 1
    for record in (first, second):
        assert record.stage_progress["classify"].total == 1
