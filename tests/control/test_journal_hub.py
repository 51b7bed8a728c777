from __future__ import annotations

import asyncio
import gc
import logging
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

import pytest
from tests.support.ledgers import MemoryLedger

from penstock.control.feed import JournalHub
from penstock.core.errors import InvalidRequest, StoreFailed
from penstock.lifecycles.canonical import JobEvent
from penstock.ports.clock import SystemClock
from penstock.ports.engine_api import EventBatch
from penstock.ports.store import JournalEvent
from penstock.testing.aio import run_async
from penstock.testing.clock import LoopClock, VirtualLoop
from penstock.testing.samples import accept, move


def run_virtually(test: Any) -> None:
    """Run it in a loop where time passes only when everything waits."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(test(LoopClock(runner.get_loop())))


class CountingStore(MemoryLedger):
    """Counts how often its journal is read, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0
        self.broken = False

    async def events(self, after: int, limit: int = 1000) -> list[JournalEvent]:
        self.reads += 1
        await asyncio.sleep(0)
        if self.broken:
            raise StoreFailed("the disk is gone")
        return await super().events(after, limit)


def a_hub(clock: Any = None, **options: Any) -> tuple[CountingStore, JournalHub]:
    store = CountingStore()
    hub = JournalHub(store, clock or SystemClock(), **options)
    store.listen(hub.hear)
    return store, hub


async def submit(store: MemoryLedger, *job_ids: str, tenant: str = "default") -> None:
    await store.apply([accept(job_id, tenant=tenant) for job_id in job_ids])


async def take(stream: AsyncIterator[EventBatch], count: int) -> list[JournalEvent]:
    """At least so many events."""
    taken: list[JournalEvent] = []
    while len(taken) < count:
        taken += (await anext(stream)).events
    return taken


def ids(events: list[JournalEvent]) -> list[str]:
    return [event.transition.job_id for event in events]


def test_fifty_readers_that_come_and_go_see_exactly_the_journal_once_and_in_order() -> None:
    for seed in range(5):
        run_virtually(lambda clock, seed=seed: coming_and_going(clock, seed))


async def coming_and_going(clock: LoopClock, seed: int) -> None:
    chance = random.Random(seed)
    store, hub = a_hub(clock, kept=4)
    rounds = 60
    final: list[int] = []

    async def writer() -> None:
        for n in range(rounds):
            size = chance.choice([1, 2, 5, 40, 300])
            tenant = chance.choice("xyz")
            await submit(store, *[f"{n}-{i}" for i in range(size)], tenant=tenant)
            (answer,) = await store.apply([move(f"{n}-0", JobEvent.SCHEDULE, JobEvent.DISPATCH)])
            assert answer.moved
            await clock.sleep(chance.choice([0, 0.001, 0.03, 0.5]))
        # What only others may see wakes nobody, so each gets to see a last one.
        for tenant in "xy":
            await submit(store, f"last-{tenant}", tenant=tenant)
        final.append(await store.last_event() - 16)

    async def reader(tenant: str | None) -> list[JournalEvent]:
        seen: list[JournalEvent] = []
        cursor = 0
        while not (final and cursor >= final[0]):
            patience = chance.randrange(1, 30)
            async with aclosing(hub.events(cursor, tenant)) as batches:
                async for batch in batches:
                    assert batch.cursor >= cursor
                    cursor = batch.cursor
                    seen += batch.events
                    patience -= 1
                    await clock.sleep(chance.choice([0, 0, 0, 0.01, 0.2, 3.0]))
                    if not patience or (final and cursor >= final[0]):
                        break
        return seen

    tenants = [chance.choice([None, None, "x", "y"]) for _ in range(50)]
    readers = [asyncio.create_task(reader(tenant)) for tenant in tenants]
    await writer()
    journal = await store.events(0, 1_000_000)
    for task, tenant in zip(readers, tenants, strict=True):
        seen = await task
        expected = [e for e in journal if tenant in (None, e.tenant)]
        assert seen == expected[: len(seen)]
        assert [e for e in expected[len(seen) :] if e.cursor <= final[0]] == []
    await settle(hub)


async def settle(hub: JournalHub) -> None:
    """Nobody reads, and nothing is left of those who did."""
    assert hub.readers == 0
    if hub._task is not None:
        await hub._task
    assert not hub._ring


def test_readers_at_the_head_share_one_batch_and_one_read() -> None:
    async def scenario(clock: LoopClock) -> None:
        store, hub = a_hub(clock)
        streams = [hub.events() for _ in range(50)]
        for stream in streams:
            await anext(stream)
        await clock.sleep(1)
        reads = store.reads
        await submit(store, "a", "b")
        batches = [await anext(stream) for stream in streams]
        assert all(batch is batches[0] for batch in batches)
        assert ids(list(batches[0].events)) == ["a", "b"]
        assert store.reads <= reads + 2
        for stream in streams:
            await stream.aclose()
        await settle(hub)

    run_virtually(scenario)


def test_a_tenants_view_of_a_batch_is_made_once_and_moves_past_the_others() -> None:
    async def scenario(clock: LoopClock) -> None:
        store, hub = a_hub(clock)
        streams = [hub.events(None, "x") for _ in range(3)]
        for stream in streams:
            await anext(stream)
        await store.apply([accept("a", tenant="x"), accept("b", tenant="y")])
        batches = [await anext(stream) for stream in streams]
        assert all(batch is batches[0] for batch in batches)
        assert ids(list(batches[0].events)) == ["a"]
        assert batches[0].cursor == await store.last_event()
        for stream in streams:
            await stream.aclose()

    run_virtually(scenario)


def test_a_tenant_for_whom_nothing_happens_still_learns_how_far_the_journal_is() -> None:
    async def scenario(clock: LoopClock) -> None:
        store, hub = a_hub(clock)
        async with aclosing(hub.events(None, "x")) as stream:
            await anext(stream)
            for n in range(12):
                await submit(store, *[f"{n}-{i}" for i in range(500)], tenant="y")
            batch = await anext(stream)
            assert batch.events == ()
            assert 0 < batch.cursor <= await store.last_event()

    run_virtually(scenario)


def test_a_reader_for_whom_nothing_happens_gets_signs_of_life() -> None:
    async def scenario(clock: LoopClock) -> None:
        store, hub = a_hub(clock, pulse=5.0)
        async with aclosing(hub.events()) as idle, aclosing(hub.events(None, "x")) as other:
            await anext(idle)
            await anext(other)
            for n in range(3):
                assert await anext(idle) == EventBatch((), 0)
                assert clock.monotonic() == pytest.approx(5.0 * (n + 1))
            for n in range(20):
                await submit(store, f"job-{n}")
                await clock.sleep(1)
            seen = [await anext(other) for _ in range(5)]
            assert all(batch.events == () for batch in seen)
            assert seen[-1].cursor > seen[0].cursor

    run_virtually(scenario)


def test_reading_begins_where_it_is_asked_to() -> None:
    async def scenario(clock: LoopClock) -> None:
        store, hub = a_hub(clock)
        await submit(store, "a", "b", "c")
        first, *_ = await store.events(0)
        async with aclosing(hub.events(first.cursor)) as stream:
            assert await anext(stream) == EventBatch((), first.cursor)
            assert ids(await take(stream, 2)) == ["b", "c"]
        async with aclosing(hub.events()) as stream:
            assert await anext(stream) == EventBatch((), await store.last_event())
            await submit(store, "d")
            assert ids(await take(stream, 1)) == ["d"]

    run_virtually(scenario)


@run_async
async def test_a_cursor_that_the_journal_never_gave_is_refused() -> None:
    store, hub = a_hub()
    await submit(store, "a")
    for cursor in (-1, await store.last_event() + 1):
        with pytest.raises(InvalidRequest, match="after"):
            await anext(hub.events(cursor))
    assert hub.readers == 0


def test_a_batch_is_bounded() -> None:
    async def scenario(clock: LoopClock) -> None:
        store, hub = a_hub(clock)
        for n in range(3):
            await submit(store, *[f"{n}-{i}" for i in range(999)])
        async with aclosing(hub.events(0)) as old, aclosing(hub.events()) as live:
            await anext(live)
            for n in range(3, 6):
                await submit(store, *[f"{n}-{i}" for i in range(999)])
            for stream, count in ((old, 6 * 999), (live, 3 * 999)):
                while count:
                    batch = await anext(stream)
                    assert len(batch.events) <= 500
                    count -= len(batch.events)

    run_virtually(scenario)


def test_a_reader_that_never_reads_costs_others_nothing_and_memory_stays_bounded() -> None:
    async def scenario(clock: LoopClock) -> None:
        store, hub = a_hub(clock, kept=4)
        stuck = hub.events()
        await anext(stuck)
        async with aclosing(hub.events()) as stream:
            await anext(stream)
            for n in range(40):
                await submit(store, f"job-{n}")
                assert ids(await take(stream, 1)) == [f"job-{n}"]
                await clock.sleep(1)
        gc.collect()
        # By its type: some objects of others do something when they are asked for their class.
        alive = [thing for thing in gc.get_objects() if type(thing) is EventBatch]
        assert len(alive) <= 2 * 4
        assert len(hub._ring) == 4
        assert ids(await take(stuck, 40)) == [f"job-{n}" for n in range(40)]
        await stuck.aclose()
        await settle(hub)

    run_virtually(scenario)


def test_a_commit_costs_nothing_while_nobody_reads() -> None:
    async def scenario(clock: LoopClock) -> None:
        store, hub = a_hub(clock)
        async with aclosing(hub.events()) as stream:
            await anext(stream)
        await settle(hub)
        reads = store.reads
        await submit(store, "a")
        await clock.sleep(10)
        assert store.reads == reads

    run_virtually(scenario)


def test_a_store_that_fails_is_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(clock: LoopClock) -> None:
        store, hub = a_hub(clock)
        async with aclosing(hub.events()) as live, aclosing(hub.events(0)) as old:
            await anext(live)
            await anext(old)
            store.broken = True
            await submit(store, "a")
            waiting = asyncio.create_task(take(live, 1))
            await clock.sleep(5)
            assert not waiting.done()
            store.broken = False
            assert ids(await waiting) == ["a"]
            assert ids(await take(old, 1)) == ["a"]

    with caplog.at_level(logging.ERROR):
        run_virtually(scenario)
    assert "the disk is gone" in caplog.text


def test_what_was_pruned_is_passed_over() -> None:
    async def scenario(clock: LoopClock) -> None:
        store, hub = a_hub(clock)
        await submit(store, "old")
        await store.apply([move("old", JobEvent.CANCEL)])
        async with aclosing(hub.events(0)) as stream:
            await anext(stream)
            await store.prune(float("inf"), 10)
            await submit(store, "new")
            assert ids(await take(stream, 1)) == ["new"]

    run_virtually(scenario)


def test_closing_ends_every_stream() -> None:
    async def scenario(clock: LoopClock) -> None:
        store, hub = a_hub(clock)

        async def read() -> list[str]:
            return [job_id async for batch in hub.events(0) for job_id in ids(list(batch.events))]

        await submit(store, "a")
        readers = [asyncio.create_task(read()) for _ in range(5)]
        await clock.sleep(1)
        assert hub.readers == 5
        await hub.close()
        assert await asyncio.gather(*readers) == [["a"]] * 5
        await settle(hub)

    run_virtually(scenario)


def test_a_cancelled_reader_leaves_nothing_behind() -> None:
    async def scenario(clock: LoopClock) -> None:
        store, hub = a_hub(clock)

        async def read() -> None:
            async for _ in hub.events():
                pass

        readers = [asyncio.create_task(read()) for _ in range(5)]
        await clock.sleep(1)
        assert hub.readers == 5
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        del reader, readers
        gc.collect()
        await submit(store, "a")
        await settle(hub)

    run_virtually(scenario)


def test_a_wait_for_the_next_batch_can_be_given_up_and_taken_up_again() -> None:
    async def scenario(clock: LoopClock) -> None:
        store, hub = a_hub(clock)
        stream = hub.events()
        await anext(stream)
        seen: list[str] = []
        for n in range(50):
            with suppress(TimeoutError):
                async with asyncio.timeout(0.003 * n):
                    while True:
                        seen += ids(list((await anext(stream)).events))
            await submit(store, f"job-{n}")
        while len(seen) < 50:
            seen += ids(list((await anext(stream)).events))
        assert seen == [f"job-{n}" for n in range(50)]
        await stream.aclose()

    run_virtually(scenario)
