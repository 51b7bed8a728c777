"""Pieces of results that are told while they are made: to whom, how many, and for how long."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from penstock.control import feed as feeds
from penstock.control.feed import Feed
from penstock.control.ledger import Ledger
from penstock.ports.bus import JobPiece, JobProgress
from penstock.ports.engine_api import Streamed
from penstock.testing.aio import run_async


class Held:
    """A feed, and the jobs that workers have."""

    def __init__(self) -> None:
        self.jobs = {"j"}
        self.feed = Feed(cast("Ledger", None), self.jobs.__contains__)

    async def say(self, *pieces: tuple[int, int, str]) -> None:
        await self.feed._take_in([JobPiece("j", *piece) for piece in pieces])


def texts(queue: asyncio.Queue[Any]) -> list[str]:
    told = [queue.get_nowait() for _ in range(queue.qsize())]
    return [one.text for one in told if isinstance(one, Streamed)]


@run_async
async def test_what_comes_after_a_job_s_end_is_not_kept() -> None:
    held = Held()
    held.jobs.clear()
    await held.say((1, 1, "late"), (1, 2, "r"))
    await held.feed._take_in([JobProgress("j", 1, 0.5, "late")])

    assert held.feed._streamed == {}
    assert held.feed.progress_of("j") is None


@run_async
async def test_pieces_whose_beginning_nobody_heard_are_not_kept_and_not_told() -> None:
    held = Held()
    with held.feed.reading("j") as queue:
        await held.say((1, 57, "of a feed that was restarted"))
        assert texts(queue) == []
        await held.say((2, 1, "again"), (2, 2, "!"), (2, 2, "!"), (1, 58, "old"))
        assert texts(queue) == ["again", "!"]

    assert held.feed._streamed["j"].n == 2


@run_async
async def test_only_so_much_is_kept_and_who_comes_late_is_told_no_text_with_a_gap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeds, "_KEPT_CHARACTERS", 8)
    held = Held()
    with held.feed.reading("j") as early:
        await held.say((1, 1, "aaaa"), (1, 2, "bbbb"), (1, 3, "cccc"))
        with held.feed.reading("j") as late:
            await held.say((1, 4, "dddd"))
            assert texts(early) == ["aaaa", "bbbb", "cccc", "dddd"]
            assert texts(late) == ["aaaa", "bbbb"]
            await held.say((2, 1, "again"))
            assert texts(late) == texts(early) == ["again"]
