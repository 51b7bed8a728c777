"""Feeds and pages of examples/news, from a server that behaves as badly as it likes."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web
from examples.news.feeds import BadFeed, FeedError, Fetcher, article_text, parse_feed, text_of
from examples.news.settings import Feed
from tests.support.news.newsroom import BODY, SENTENCES, item, metrics, rss, run, settings

from examples.news import feeds as feeding
from penstock.testing.aio import run_async

PAGE = (
    "<html><body><nav>Home</nav><article><h1>Big</h1>"
    + "".join(f"<p>{one}</p>" for one in SENTENCES)
    + "</article><script>steal()</script></body></html>"
)
BOMB = "<!DOCTYPE lolz [<!ENTITY lol 'lol'>" + "".join(
    f"<!ENTITY lol{n} '{f'&lol{n - 1 or str()};' * 10}'>" for n in range(1, 10)
) + "]>" + rss(item(1)).replace(BODY, "&lol9;")  # fmt: skip


class NewsSite:
    """Answers by path; counts what is asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.url = ""
        self.feed = rss(item(1))
        self.busy = 1
        self.packed = b""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        name = request.path.strip("/")
        self.asked.append(name)
        match name:
            case "feed":
                if request.headers.get("If-None-Match") == '"1"':
                    return web.Response(status=304)
                return web.Response(text=self.feed, headers={"ETag": '"1"'})
            case "page":
                return web.Response(text=PAGE, content_type="text/html")
            case "busy" if self.busy:
                self.busy -= 1
                return web.Response(status=503, headers={"Retry-After": "0"})
            case "busy":
                return web.Response(text=PAGE, content_type="text/html")
            case "big":
                return web.Response(body=bytes(feeding.MAX_FEED + 1))
            case "packed":
                return web.Response(body=self.packed, headers={"Content-Encoding": "gzip"})
            case "gzip":
                body = gzip.compress(self.feed.encode())
                return web.Response(body=body, headers={"Content-Encoding": "gzip"})
            case "circle":
                return web.Response(status=302, headers={"Location": "/circle"})
            case "file":
                return web.Response(status=302, headers={"Location": "file:///etc/passwd"})
            case "elsewhere":
                port = request.url.port
                return web.Response(
                    status=302, headers={"Location": f"http://localhost:{port}/feed"}
                )
            case "slow":
                await asyncio.sleep(30)
        return web.Response(status=404)


@asynccontextmanager
async def serving() -> AsyncIterator[NewsSite]:
    site, app = NewsSite(), web.Application()
    app.router.add_get("/{path:.*}", site.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    site.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield site
    finally:
        await runner.cleanup()


async def fetch(url: str) -> bytes:
    async with Fetcher(Feed(name="a", url=url)) as fetcher:
        return (await fetcher.feed()).data


# -- over HTTP -----------------------------------------------------------------------------


@run_async
async def test_pages_are_downloaded_once_and_an_unchanged_feed_is_not_read_again(
    tmp_path: Path,
) -> None:
    async with serving() as site:
        site.feed = rss(item(1, "A teaser.", link=f"{site.url}/page"))
        chosen = settings(tmp_path, Feed(name="Paper", url=f"{site.url}/feed"))
        first = await asyncio.to_thread(run, chosen)
        second = await asyncio.to_thread(run, chosen)
    assert site.asked == ["feed", "page", "feed"]
    assert metrics(first, "ingest")["body_downloaded"] == 1
    assert metrics(second, "ingest")["not_modified"] == 1
    assert metrics(second, "ingest")["skipped_duplicate"] == 1
    text = (tmp_path / "brief.md").read_text()
    assert SENTENCES[0] in text
    assert "steal" not in text


@run_async
async def test_a_page_that_was_busy_is_read_in_a_later_run_and_the_story_made_anew(
    tmp_path: Path,
) -> None:
    async with serving() as site:
        site.feed = rss(item(1, "A teaser.", link=f"{site.url}/busy"))
        chosen = settings(tmp_path, Feed(name="Paper", url=f"{site.url}/feed"))
        await asyncio.to_thread(run, chosen)
        assert "teaser only" in (tmp_path / "brief.md").read_text()
        await asyncio.to_thread(run, chosen)
    assert "teaser only" not in (tmp_path / "brief.md").read_text()


@run_async
async def test_a_link_to_a_private_address_is_not_followed_unless_the_settings_allow_it(
    tmp_path: Path,
) -> None:
    async with serving() as inside:
        links = (
            f"{inside.url}/page",
            inside.url.replace("127.0.0.1", "localhost") + "/page",
            "http://169.254.169.254/latest",
            "http://[::ffff:127.0.0.1]:1/",
            "http://0.0.0.0/",
        )
        file = tmp_path / "feed.xml"
        file.write_text(rss(*(item(n, "A teaser.", link=link) for n, link in enumerate(links))))
        feed = Feed(name="Paper", url=str(file))
        record = await asyncio.to_thread(run, settings(tmp_path / "a", feed))
        assert metrics(record, "ingest")["body_failed"] == 5
        assert inside.asked == []
        free = settings(tmp_path / "b", feed, allow_private=True)
        record = await asyncio.to_thread(run, free)
        assert metrics(record, "ingest")["body_downloaded"] == 2


@pytest.mark.parametrize(
    ("path", "kind", "said"),
    [
        ("big", BadFeed, "is larger than 5,000,000 bytes"),
        ("circle", BadFeed, "redirects more than 5 times"),
        ("file", BadFeed, "redirects to 'file:///etc/passwd'"),
        ("elsewhere", BadFeed, "leads to a private address"),
        ("gone", BadFeed, "answered 404"),
        ("busy", FeedError, "answered 503"),
        ("slow", FeedError, "took longer than 0.3 s"),
    ],
)
@run_async
async def test_a_bad_answer_is_refused_with_its_reason(
    path: str, kind: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if path == "slow":
        monkeypatch.setattr(feeding, "FEED_TIMEOUT", 0.3)
    async with serving() as site:
        with pytest.raises(kind) as caught:
            await fetch(f"{site.url}/{path}")
    assert said in str(caught.value)


@run_async
async def test_a_compressed_bomb_is_refused_before_it_fills_the_memory() -> None:
    async with serving() as site:
        assert await fetch(f"{site.url}/gzip") == site.feed.encode()
        site.packed = gzip.compress(bytes(200_000_000), 1)
        tracemalloc.start()
        try:
            with pytest.raises(BadFeed, match="is larger than"):
                await fetch(f"{site.url}/packed")
            _, most = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert most < 60_000_000


@run_async
async def test_a_password_in_a_url_is_not_shown() -> None:
    with pytest.raises(FeedError) as caught:
        await fetch("http://ann:secret@127.0.0.1:9/feed")
    assert "secret" not in str(caught.value)


# -- parsing -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        BOMB.encode(),
        BOMB.encode("utf-16"),
        b"<?xml version='1.0' encoding='utf-7'?>" + BOMB.encode("utf-7"),
        BOMB.replace("<!DOCTYPE lolz [", "").replace("]>", "").encode(),
        BOMB.replace("lolz", "x SYSTEM 'file:///etc/passwd'").encode(),
    ],
)
def test_a_feed_that_declares_entities_is_not_parsed(data: bytes) -> None:
    with pytest.raises(BadFeed, match="declares XML entities"):
        parse_feed(data, "a")


@pytest.mark.parametrize("data", [b"", b"hello", PAGE.encode(), b"{}", bytes(range(256)) * 40])
def test_what_is_no_feed_is_refused(data: bytes) -> None:
    with pytest.raises(BadFeed, match=r"is not an RSS or Atom feed|can't be parsed"):
        parse_feed(data, "a")


@pytest.mark.parametrize(
    "broken",
    [
        rss(item(1))[:-40],
        rss(item(1)).replace("</pubDate>", "", 1),
        rss(item(1)).replace("Council", "Council & Sons &nbsp; &#xD83D;"),
        rss(item(1)).replace("<rss", "<?xml version='1.0' encoding='klingon'?><rss"),
    ],
)
def test_a_malformed_feed_is_read_as_far_as_it_goes(broken: str) -> None:
    (entry,) = parse_feed(broken.encode(), "a").entries
    assert "plan number 1" in entry.title
    assert entry.url == "https://paper.example/world/1"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "iso-8859-1", "cp1252"])
def test_a_feed_is_read_in_the_encoding_that_it_declares(encoding: str) -> None:
    text = f"<?xml version='1.0' encoding='{encoding}'?>" + rss(item(1, title="Zoë café opens"))
    (entry,) = parse_feed(text.encode(encoding), "a").entries
    assert entry.title == "Zoë café opens"


def test_only_links_of_the_web_are_kept() -> None:
    for link in ("javascript:alert(1)", "file:///etc/passwd", "//x", "http://["):
        (entry,) = parse_feed(rss(item(1, link=link)).encode(), "a").entries
        assert entry.url == ""


def test_text_has_no_markup_no_scripts_and_no_control_characters() -> None:
    text = text_of(
        "<p>One &amp; <b>two</b>.</p><script>x()</script><!-- no --><p>Th\x00ree\u200b</p>"
    )
    assert text == "One & two.\nThree"
    assert article_text(b"<html>\x00<body>" + b"<div>" * 100_000) == ""
