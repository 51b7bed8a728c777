"""Who is told of changes to container jobs."""

from __future__ import annotations

import asyncio
import gc

import pytest

from penstock.testing.aio import run_async
from penstock.workloads.container.job import ContainerRecord
from penstock.workloads.container.standing.feed import MOST_BEHIND, Feed


def a_record(job_id: str) -> ContainerRecord:
    return ContainerRecord(job_id=job_id, created_at=0)


@run_async
async def test_who_waits_for_one_job_is_not_woken_by_another() -> None:
    feed = Feed()
    with feed.next_change("a") as first, feed.next_change("a") as second:
        feed.hear(a_record("b"))
        assert not first.done()
        feed.hear(a_record("a"))
        assert first.done()
        assert second.done()


@run_async
async def test_nobody_is_remembered_who_does_not_wait_any_more() -> None:
    feed = Feed()
    with feed.next_change("a"), feed.next_change("a"):
        pass
    with feed.next_change("b"):
        feed.hear(a_record("b"))
    reader = feed.changes()
    del reader
    gc.collect()
    assert not feed._waiters
    assert not feed._readers


@run_async
async def test_a_reader_that_lags_too_far_behind_is_sent_away() -> None:
    feed = Feed()
    slow, quick = feed.changes(), feed.changes()
    for n in range(MOST_BEHIND + 1):
        feed.hear(a_record(f"j{n}"))
        assert await anext(quick) == f"j{n}"
    with pytest.raises(StopAsyncIteration):
        await anext(slow)
    feed.hear(a_record("last"))
    assert await anext(quick) == "last"


@run_async
async def test_after_the_end_nobody_waits() -> None:
    feed = Feed()
    reader = feed.changes()
    reading = asyncio.ensure_future(anext(reader))
    with feed.next_change("a") as change:
        await asyncio.sleep(0)
        feed.close()
        assert change.done()
    with pytest.raises(StopAsyncIteration):
        await reading
    with feed.next_change("a") as change:
        assert change.done()
    with pytest.raises(StopAsyncIteration):
        await anext(feed.changes())
