"""What every `Ledger` must do with its journal, read as one stream of events."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from penstock.control.ledger import Ledger
from penstock.core.journal import Stride
from penstock.lifecycles.canonical import JobEvent
from penstock.ports.store import JournalEvent
from penstock.testing.aio import run_async
from penstock.testing.samples import T0, accept, move, succeeded

_E = JobEvent


async def lives(store: Ledger) -> None:
    """Two jobs, six moves, ten transitions."""
    await store.apply([accept("a", tenant="t1", topic="job.one"), accept("b")])
    await store.apply([move("a", _E.SCHEDULE, _E.DISPATCH), move("b", _E.SCHEDULE, _E.DISPATCH)])
    await store.apply([move("b", _E.SUCCEED, result=succeeded("b"))])
    await store.apply([move("a", _E.SUCCEED, result=succeeded("a"))])


def told(events: Sequence[JournalEvent]) -> list[tuple[str, int]]:
    return [(event.transition.job_id, event.transition.n) for event in events]


class JournalContract:
    """The promises of `events` and `last_event`."""

    @run_async
    async def test_events_are_every_transition_in_the_order_of_the_commits(
        self, store: Ledger
    ) -> None:
        assert (await store.events(0), await store.last_event()) == ([], 0)
        heard: list[Stride] = []
        store.listen(heard.extend)
        await lives(store)
        events = await store.events(0)
        happened = [step for s in heard for job in s.jobs for step in s.transitions(job)]
        assert [event.transition for event in events] == happened
        assert len(events) == 10
        cursors = [event.cursor for event in events]
        assert cursors == sorted(set(cursors))
        assert await store.last_event() == cursors[-1]
        assert (events[0].tenant, events[0].topic) == ("t1", "job.one")
        assert (events[1].tenant, events[1].topic) == ("default", "job.test")

    @run_async
    async def test_a_reader_resumes_after_any_event(self, store: Ledger) -> None:
        await lives(store)
        events = await store.events(0)
        for index, event in enumerate(events, start=1):
            assert await store.events(event.cursor) == events[index:]
        assert await store.events(events[-1].cursor + 1000) == []

    @pytest.mark.parametrize("limit", [1, 2, 3, 5, 100])
    @run_async
    async def test_pages_of_events_have_no_gap_no_repeat_and_part_no_move(
        self, store: Ledger, limit: int
    ) -> None:
        await lives(store)
        whole = await store.events(0)
        at, pages = 0, []
        while page := await store.events(at, limit):
            pages.append(page)
            at = page[-1].cursor
        assert [event for page in pages for event in page] == whole
        for page in pages:
            assert limit <= len(page) or page is pages[-1]
            assert len(page) < limit + 2
        parted = {_E.SCHEDULE, _E.START}  # each is the first of two events of one move
        assert not [page for page in pages if page[-1].transition.event in parted]

    @run_async
    async def test_a_reader_that_follows_sees_each_event_once(self, store: Ledger) -> None:
        at, seen = await store.last_event(), []
        for round_ in range(5):
            await store.apply([accept(f"j{round_}"), move(f"j{round_}", _E.SCHEDULE, _E.DISPATCH)])
            news = await store.events(at)
            seen.extend(told(news))
            at = news[-1].cursor
            assert at == await store.last_event()
        assert seen == [(f"j{i}", n) for i in range(5) for n in (1, 2, 3)]

    @run_async
    async def test_a_listener_finds_the_events_of_what_it_hears(self, store: Ledger) -> None:
        asked: list[asyncio.Future[list[JournalEvent]]] = []
        store.listen(lambda _: asked.append(asyncio.ensure_future(store.events(0))))
        await store.apply([accept("a"), accept("a"), move("a", _E.START)])
        await store.apply([move("a", _E.CANCEL)])
        assert list(map(told, await asyncio.gather(*asked)))[-1] == [("a", 1), ("a", 2)]
        assert len(asked) == 2

    @run_async
    async def test_no_cursor_is_given_twice_though_its_event_was_pruned(
        self, store: Ledger
    ) -> None:
        await store.apply([accept("old")])
        await store.apply([accept("a"), move("a", _E.CANCEL)])
        at = await store.last_event()
        await store.prune(T0 + 1, limit=10)
        assert told(await store.events(0)) == [("old", 1)]
        assert await store.last_event() >= at
        await store.apply([accept("b")])
        assert told(await store.events(at)) == [("b", 1)]
        await store.apply([move("b", _E.CANCEL), move("old", _E.CANCEL)])
        at = await store.last_event()
        await store.prune(T0 + 1, limit=10)
        assert await store.events(0) == []
        await store.apply([accept("c")])
        assert told(await store.events(at)) == told(await store.events(0)) == [("c", 1)]
