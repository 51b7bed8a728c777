"""Feeds over HTTP, from a real server that behaves as badly as it likes."""

from __future__ import annotations

import asyncio
import gzip
import socket
import tracemalloc
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from tests.unit.news_context import NewsContext

from penstock.testing.aio import run_async
from penstock.workloads.pipeline.news.errors import BadFeed, FeedError, SlowFeed
from penstock.workloads.pipeline.news.fetching import MAX_REDIRECTS, fetch
from penstock.workloads.pipeline.news.ingest import ingest
from penstock.workloads.pipeline.records import ErrorClass
from penstock.workloads.pipeline.retrying import judge

LIMIT = 1_000_000
FEED = (
    b"<rss version='2.0'><channel><title>Served</title>"
    b"<item><title>First of the day</title></item></channel></rss>"
)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    def __init__(self) -> None:
        self.asked: list[web.Request] = []
        self.url = ""


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[Server]:
    server = Server()

    async def answer(request: web.Request) -> web.StreamResponse:
        server.asked.append(request)
        return await handler(request)

    app = web.Application()
    app.router.add_get("/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.url = f"http://{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()


async def plain(request: web.Request) -> web.StreamResponse:
    return web.Response(body=FEED, content_type="application/rss+xml")


async def get(url: str, limit: int = LIMIT, timeout: float = 20.0) -> bytes:
    return (await fetch(url, timeout=timeout, limit=limit)).data


# -- good answers --------------------------------------------------------------------------


@run_async
async def test_a_feed_is_read_and_its_server_told_who_asks() -> None:
    async with serving(plain) as server:
        (article,) = await ingest(f"{server.url}/feed", NewsContext())
        assert (article.title, article.source) == ("First of the day", "Served")
        assert server.asked[0].headers["User-Agent"] == "penstock-news"


@run_async
async def test_the_servers_charset_is_heard() -> None:
    async def cyrillic(request: web.Request) -> web.StreamResponse:
        body = FEED.decode().replace("First of the day", "Первый").encode("koi8-r")
        return web.Response(body=body, headers={"Content-Type": "text/xml; charset=koi8-r"})

    async with serving(cyrillic) as server:
        (article,) = await ingest(server.url, NewsContext())
        assert article.title == "Первый"


@run_async
async def test_a_packed_feed_is_unpacked() -> None:
    async def packed(request: web.Request) -> web.StreamResponse:
        return web.Response(body=gzip.compress(FEED), headers={"Content-Encoding": "gzip"})

    async with serving(packed) as server:
        assert await get(server.url) == FEED


@run_async
async def test_a_feed_that_has_not_changed_gives_the_articles_of_last_time() -> None:
    async def careful(request: web.Request) -> web.StreamResponse:
        headers = {"ETag": '"v1"', "Last-Modified": "Thu, 04 Jun 2026 10:00:00 GMT"}
        if request.headers.get("If-None-Match") == '"v1"':
            assert request.headers["If-Modified-Since"] == headers["Last-Modified"]
            return web.Response(status=304, headers=headers)
        return web.Response(body=FEED, headers=headers)

    async with serving(careful) as server:
        first, second = NewsContext(), NewsContext()
        read = await ingest(server.url, first)
        second.memory = first.memory
        assert await ingest(server.url, second) == read
        assert second.metrics["not_modified"] == 1
        assert second.metrics["success"] == first.metrics["success"] == 1

        other_limit = NewsContext(max_items_per_source=7)
        other_limit.memory = first.memory
        await ingest(server.url, other_limit)
        assert other_limit.metrics["not_modified"] == 0


@run_async
async def test_memory_that_makes_no_sense_is_not_used() -> None:
    async with serving(plain) as server:
        for nonsense in (None, 3, {"feed": 1}, {"limit": 25, "validators": {"etag": 4}}):
            ctx = NewsContext()
            ctx.recall = lambda name, nonsense=nonsense: asyncio.sleep(0, nonsense)  # type: ignore[method-assign, misc]
            assert len(await ingest(server.url, ctx)) == 1


@run_async
async def test_a_304_that_was_not_asked_for_is_an_error() -> None:
    async def confused(request: web.Request) -> web.StreamResponse:
        return web.Response(status=304)

    async with serving(confused) as server:
        with pytest.raises(FeedError, match="answered 304"):
            await get(server.url)


# -- answers that mean no ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, ErrorClass.PERMANENT),
        (404, ErrorClass.PERMANENT),
        (410, ErrorClass.PERMANENT),
        (408, ErrorClass.TRANSIENT),
        (429, ErrorClass.TRANSIENT),
        (500, ErrorClass.TRANSIENT),
        (503, ErrorClass.TRANSIENT),
    ],
)
@run_async
async def test_a_status_says_whether_to_try_again(status: int, kind: ErrorClass) -> None:
    async def refusing(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status)

    async with serving(refusing) as server:
        with pytest.raises(FeedError, match=f"answered {status}") as caught:
            await get(server.url)
    assert caught.value.status == status
    assert judge(caught.value).error_class is kind


@pytest.mark.parametrize(
    ("said", "seconds"),
    [("120", 120.0), ("Thu, 04 Jun 2026 10:00:30 GMT", 30.0), ("presently", None)],
)
@run_async
async def test_a_server_says_when_it_wants_to_be_asked_again(
    said: str, seconds: float | None
) -> None:
    async def busy(request: web.Request) -> web.StreamResponse:
        return web.Response(status=503, headers={"Retry-After": said})

    async with serving(busy) as server:
        with pytest.raises(FeedError) as caught:
            await ingest(server.url, NewsContext())
    now = 1_780_567_200.0
    assert judge(caught.value, now).retry_after == seconds


@run_async
async def test_a_web_page_is_refused_for_good() -> None:
    async def page(request: web.Request) -> web.StreamResponse:
        return web.Response(text="<!doctype html><html>Hello</html>", content_type="text/html")

    async with serving(page) as server:
        with pytest.raises(BadFeed, match="is a web page, not a feed"):
            await ingest(server.url, NewsContext())


@run_async
async def test_nobody_there_is_worth_another_try() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://me:secret@127.0.0.1:{taken.getsockname()[1]}/feed"
        with pytest.raises(FeedError, match="can't be reached") as caught:
            await get(url)
    assert judge(caught.value).error_class is ErrorClass.TRANSIENT
    assert "secret" not in str(caught.value)


# -- redirects -----------------------------------------------------------------------------


@run_async
async def test_five_redirects_are_followed() -> None:
    async def hop(request: web.Request) -> web.StreamResponse:
        left = int(request.path.strip("/"))
        if not left:
            return await plain(request)
        # A relative one, as many servers send.
        return web.Response(status=302, headers={"Location": f"/{left - 1}"})

    async with serving(hop) as server:
        assert await get(f"{server.url}/{MAX_REDIRECTS}") == FEED
        with pytest.raises(BadFeed, match="redirects for ever: more than 5 times"):
            await get(f"{server.url}/{MAX_REDIRECTS + 1}")


@run_async
async def test_an_endless_redirect_ends() -> None:
    async def circle(request: web.Request) -> web.StreamResponse:
        return web.Response(status=301, headers={"Location": request.path})

    async with serving(circle) as server:
        with pytest.raises(BadFeed, match="redirects for ever") as caught:
            await ingest(f"{server.url}/feed", NewsContext())
        assert len(server.asked) == MAX_REDIRECTS + 1
    assert judge(caught.value).error_class is ErrorClass.PERMANENT


@pytest.mark.parametrize("target", ["file:///etc/hostname", "ftp://a.example/", "data:,x", ""])
@run_async
async def test_a_redirect_leads_nowhere_but_to_http(target: str) -> None:
    async def away(request: web.Request) -> web.StreamResponse:
        return web.Response(status=302, headers={"Location": target})

    async with serving(away) as server:
        with pytest.raises(BadFeed, match="which is not read"):
            await get(server.url)


# -- too much, too slow --------------------------------------------------------------------


async def peak_of(reading: Awaitable[object]) -> int:
    """Bytes that Python had allocated at most; the server's part is in it."""
    tracemalloc.start()
    try:
        with pytest.raises(BadFeed, match="is larger than"):
            await reading
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("announced", [True, False])
@run_async
async def test_a_hundred_megabytes_are_not_read(announced: bool) -> None:
    chunk, sent = b"x" * 100_000, 0

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        if announced:
            response.content_length = 1000 * len(chunk)
        await response.prepare(request)
        for _ in range(1000):
            await response.write(chunk)
            sent += len(chunk)
        return response

    async with serving(endless) as server:
        assert await peak_of(get(server.url)) < 30_000_000
    assert sent < 50_000_000


@run_async
async def test_a_gzip_bomb_is_not_unpacked() -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    zeros = bytes(1_000_000)
    bomb = b"".join(packer.compress(zeros) for _ in range(200)) + packer.flush()
    assert len(bomb) < LIMIT

    async def hostile(request: web.Request) -> web.StreamResponse:
        return web.Response(body=bomb, headers={"Content-Encoding": "gzip"})

    async with serving(hostile) as server:
        assert await peak_of(get(server.url)) < 20_000_000


@pytest.mark.parametrize(
    ("body", "packing", "words"),
    [
        (b"no gzip at all", "gzip", "can't be unpacked"),
        (gzip.compress(FEED)[:-12], "gzip", "broke off"),
        (b"", "gzip", "broke off"),
        (FEED, "br", "packed with br"),
    ],
    # The bytes have the time of day in them, and a test's name must not.
    ids=["no gzip", "cut short", "empty", "another packing"],
)
@run_async
async def test_what_can_not_be_unpacked_says_so(body: bytes, packing: str, words: str) -> None:
    async def broken(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, headers={"Content-Encoding": packing})

    async with serving(broken) as server:
        with pytest.raises(FeedError, match=words):
            await get(server.url)


@run_async
async def test_a_body_that_trickles_ends_with_the_time_for_it() -> None:
    async def trickle(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        while True:
            await response.write(b" ")
            await asyncio.sleep(0.02)

    async with serving(trickle) as server:
        with pytest.raises(SlowFeed, match=r"was not read within 0\.2 s") as caught:
            await get(server.url, timeout=0.2)
    assert judge(caught.value).error_class is ErrorClass.TIMEOUT


@run_async
async def test_a_body_that_breaks_off_is_worth_another_try() -> None:
    async def breaking(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = 1000
        await response.prepare(request)
        await response.write(b"<rss")
        assert request.transport is not None
        request.transport.abort()
        return response

    async with serving(breaking) as server:
        with pytest.raises(FeedError, match="can't be reached") as caught:
            await get(server.url)
    assert judge(caught.value).error_class is ErrorClass.TRANSIENT
