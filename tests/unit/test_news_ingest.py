"""The stage that reads sources, on the feeds that come along."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.unit.news_context import NewsContext

from penstock.core.errors import InvalidRequest
from penstock.testing.aio import run_async
from penstock.workloads.pipeline.news.articles import Article
from penstock.workloads.pipeline.news.errors import BadFeed
from penstock.workloads.pipeline.news.fetching import shown
from penstock.workloads.pipeline.news.ingest import SAMPLE_FEEDS, ingest, sources
from penstock.workloads.pipeline.records import ErrorClass
from penstock.workloads.pipeline.retrying import judge


@pytest.fixture(autouse=True)
def every_folder_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NEWS_FOLDERS", "/")


FEED = (
    "<rss version='2.0'><channel><title>Own</title><item><title>{}</title></item></channel></rss>"
)


async def read_samples(ctx: NewsContext) -> dict[str, list[Article] | BadFeed]:
    found: dict[str, list[Article] | BadFeed] = {}
    for source in sources(ctx.config, ctx):
        try:
            found[source] = await ingest(source, ctx)
        except BadFeed as error:
            found[source] = error
    return found


def test_without_sources_the_feeds_that_come_along_are_read() -> None:
    ctx = NewsContext()
    assert sources(ctx.config, ctx) == [f"sample:{name}" for name in SAMPLE_FEEDS]


def test_the_sources_that_are_given_are_read_and_no_others() -> None:
    ctx = NewsContext(sources=["a.xml", "b.xml"])
    assert sources(ctx.config, ctx) == ["a.xml", "b.xml"]


@run_async
async def test_of_the_sample_one_feed_is_dead_one_malformed_and_one_repeats() -> None:
    ctx = NewsContext()
    found = await read_samples(ctx)
    dead = found.pop("sample:lighthouse.xml")
    assert isinstance(dead, BadFeed)
    assert "there is no file" in str(dead)
    assert judge(dead).error_class is ErrorClass.PERMANENT
    assert all(isinstance(articles, list) for articles in found.values())
    assert dict(ctx.metrics) == {
        "total": 15,
        "success": 12,
        "body_downloaded": 11,
        "body_failed": 4,
        "skipped_duplicate": 3,
        "unreadable": 0,
        "malformed": 1,
    }
    assert any("valley.xml is malformed" in line for line in ctx.logged)


@run_async
async def test_the_sample_has_work_for_the_later_stages() -> None:
    found = await read_samples(NewsContext())
    articles = [a for part in found.values() if isinstance(part, list) for a in part]
    long = [a for a in articles if len(a.body) >= 600]
    assert len({a.hash for a in long}) >= 11
    for article in long:
        assert any(mark in article.body for mark in '"“')
        assert any(letter.isdigit() for letter in article.body)
    text = " ".join(a.title + a.body for a in articles).lower()
    assert all(word in text for word in ("slams", "shocking", "plummet", "you won't believe"))


@run_async
async def test_what_an_item_counts_does_not_change_when_it_is_tried_again() -> None:
    ctx = NewsContext()
    await ingest("sample:harbour.xml", ctx)
    again = NewsContext()
    again._seen = ctx._seen
    await ingest("sample:harbour.xml", again)
    assert again.metrics == ctx.metrics


@run_async
async def test_the_number_of_entries_of_a_source_is_bounded() -> None:
    assert len(await ingest("sample:harbour.xml", NewsContext(max_items_per_source=2))) == 2


@run_async
async def test_a_path_and_a_file_address_are_the_same_to_it(tmp_path: Path) -> None:
    file = tmp_path / "my feed.xml"
    file.write_text(FEED.format("From a file"))
    for source in (str(file), file.as_uri()):
        (article,) = await ingest(source, NewsContext())
        assert (article.title, article.source) == ("From a file", "Own")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("no-such.xml", "there is no file"),
        ("/dev/zero", "is not a file"),
        (".", "is not a file"),
        ("ftp://a.example/feed", "ftp: is not read"),
        ("data:text/xml,x", "data: is not read"),
        ("gopher://a.example/", "is not read"),
        ("file://other.example/etc/passwd", "a file of another machine"),
        ("sample:../config.py", "does not exist"),
        ("http://", "is not an address"),
        ("a\0b", "is no path"),
        ("corpus:No Such Outlet", "corpus"),
    ],
)
@run_async
async def test_a_source_that_may_not_be_read_says_why_for_good(source: str, words: str) -> None:
    with pytest.raises((BadFeed, LookupError, InvalidRequest), match=words) as caught:
        await ingest(source, NewsContext())
    assert judge(caught.value).error_class is ErrorClass.PERMANENT


@run_async
async def test_a_pipe_without_a_writer_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadFeed, match="is not a file"):
        await ingest(str(tmp_path / "pipe"), NewsContext())


@run_async
async def test_a_file_over_the_limit_is_refused_unread(tmp_path: Path) -> None:
    file = tmp_path / "big.xml"
    file.touch()
    os.truncate(file, 100_000_000)
    with pytest.raises(BadFeed, match="larger than 5,000,000 bytes"):
        await ingest(str(file), NewsContext())


def test_a_password_is_never_shown() -> None:
    assert shown("https://me:secret@a.example/feed") == "https://a.example/feed"
