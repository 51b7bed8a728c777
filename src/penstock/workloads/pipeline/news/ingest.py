"""The first stage: one source in, its articles out.

A source that can't be read fails its own item only. An article that two sources bring is
counted as skipped here; which of the two goes on is settled by the next stage's listing, by
the order of the sources, so that a run gives the same however its items happened to overlap.
"""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import msgspec

from penstock.workloads.pipeline.news import corpus
from penstock.workloads.pipeline.news.access import check_path, local_path
from penstock.workloads.pipeline.news.articles import Article
from penstock.workloads.pipeline.news.config import NewsConfig
from penstock.workloads.pipeline.news.errors import BadFeed
from penstock.workloads.pipeline.news.feeds import Feed, parse_feed
from penstock.workloads.pipeline.news.fetching import (
    NOTHING_KNOWN,
    Fetched,
    Validators,
    fetch,
    read_file,
    shown,
)
from penstock.workloads.pipeline.news.identity import Seen

SEEN = "seen"
"""The job's resource that knows which source brought an article first."""
SAMPLE = "sample:"
SAMPLE_FEEDS = ("harbour.xml", "valley.xml", "echo.xml", "lighthouse.xml")
"""The feeds that come along. One is malformed, one repeats another, and the last is dead."""
_SAMPLE_FOLDER = Path(__file__).parent / "sample"


def sources(config: NewsConfig, ctx: Any) -> list[str]:
    """What is read, one item each."""
    if config.corpus:
        return [corpus.PREFIX + outlet for outlet in corpus.outlets()]
    return list(config.sources) or [SAMPLE + name for name in SAMPLE_FEEDS]


async def ingest(source: str, ctx: Any) -> list[Article]:
    """The newest articles of one source. Raises FeedError."""
    feed = await _read(source, ctx)
    _count(feed, source, ctx)
    return list(feed.articles)


async def _read(source: str, ctx: Any) -> Feed:
    config: NewsConfig = ctx.config
    if source.startswith(corpus.PREFIX):
        outlet = source.removeprefix(corpus.PREFIX)
        picked = await asyncio.to_thread(corpus.newest, outlet, config.corpus_size)
        return Feed(articles=picked)
    if source.startswith(SAMPLE):
        data = await asyncio.to_thread(_sample, source, config.max_feed_bytes)
        return await _parse(Fetched(data=data), source, config)
    return await _fetched(source, ctx)


def _sample(source: str, limit: int) -> bytes:
    name = source.removeprefix(SAMPLE)
    if name not in SAMPLE_FEEDS:
        raise BadFeed(f"{source} does not exist", hint=f"there are {', '.join(SAMPLE_FEEDS)}")
    path = _SAMPLE_FOLDER / name
    if not path.exists():
        raise BadFeed(f"there is no file {name}", hint="this source is dead on purpose")
    return read_file(path, limit)


async def _parse(fetched: Fetched, source: str, config: NewsConfig) -> Feed:
    """In a thread: a large feed takes seconds."""
    return await asyncio.to_thread(
        parse_feed,
        fetched.data,
        shown(source),
        charset=fetched.charset,
        limit=config.max_items_per_source,
    )


# -- a feed that may be the one of last time -----------------------------------------------


class _Last(msgspec.Struct, frozen=True, kw_only=True):
    """What a server gave the last time, for when it says that nothing is new."""

    validators: Validators
    limit: int
    feed: Feed


async def _fetched(source: str, ctx: Any) -> Feed:
    config: NewsConfig = ctx.config
    if (path := local_path(source)) is not None:
        check_path("config.sources", path)
    name = "feed/" + hashlib.sha256(source.encode()).hexdigest()[:20]
    last = _usable(await ctx.recall(name), config.max_items_per_source)
    fetched = await fetch(
        source,
        timeout=config.fetch_timeout,
        limit=config.max_feed_bytes,
        known=last.validators if last else NOTHING_KNOWN,
    )
    if fetched.unchanged and last:
        ctx.metric("not_modified")
        return last.feed
    feed = await _parse(fetched, source, config)
    if fetched.validators:
        new = _Last(validators=fetched.validators, limit=config.max_items_per_source, feed=feed)
        await ctx.remember(name, msgspec.to_builtins(new))
    return feed


def _usable(remembered: Any, limit: int) -> _Last | None:
    """None for what was cut at another limit, or written by another version of this."""
    try:
        last = msgspec.convert(remembered, _Last)
    except msgspec.ValidationError:
        return None
    return last if last.limit == limit else None


# -- figures -------------------------------------------------------------------------------


def _count(feed: Feed, source: str, ctx: Any) -> None:
    seen: Seen = ctx.resource(SEEN)
    new = [article for article in feed.articles if seen.claim(article, source)]
    # Of all entries: which source a repeated one is new from depends on who was read first.
    cut = sum(article.truncated for article in feed.articles)
    skipped = feed.repeated + len(feed.articles) - len(new)
    ctx.metric("total", len(new) + skipped)
    ctx.metric("success", len(new))
    ctx.metric("body_downloaded", len(feed.articles) - cut)
    ctx.metric("body_failed", cut)
    ctx.metric("skipped_duplicate", skipped)
    ctx.metric("unreadable", feed.unreadable)
    ctx.metric("malformed", int(bool(feed.malformed)))
    if feed.malformed:
        ctx.log(f"{shown(source)} is malformed, and was read all the same: {feed.malformed}")
