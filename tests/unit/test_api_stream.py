from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, cast

import pytest

from penstock.adapters.http.connection import Event, EventParser
from penstock.api.frames import EventFilter, Written
from penstock.api.stream import EventStreams, cursor_of, place_of
from penstock.control.feed import JournalHub
from penstock.core.errors import InvalidRequest, NotFound
from penstock.core.job import Job
from penstock.core.journal import Transition
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports.engine_api import EngineApi, EventBatch, JobUpdate, Logged, Moved, Progressed
from penstock.ports.store import LogLine
from penstock.testing.clock import LoopClock, VirtualLoop
from penstock.testing.ledgers import MemoryLedger
from penstock.testing.samples import T0, accept, move

_E = JobEvent
ALL = EventFilter()


class StoreEngineApi:
    """The part of an EngineApi that streams need, straight from a store."""

    def __init__(self, clock: LoopClock, tenant: str | None = None) -> None:
        self.store = MemoryLedger()
        self.hub = JournalHub(self.store, clock)
        self.store.listen(self.hub.hear)
        self.tenant = tenant
        self.said: asyncio.Queue[JobUpdate | None] = asyncio.Queue()

    def events(self, after: int | None = None) -> AsyncIterator[EventBatch]:
        return self.hub.events(after, self.tenant)

    async def get(self, job_id: str) -> Job:
        job = await self.store.get(job_id)
        if job is None:
            raise NotFound(f"no job {job_id}")
        return job

    async def history(self, job_id: str) -> list[Transition]:
        return await self.store.history(job_id)

    async def follow(self, job_id: str, after_log: int = 0) -> AsyncIterator[JobUpdate]:
        while (update := await self.said.get()) is not None:
            if not (isinstance(update, Logged) and update.line.n <= after_log):
                yield update

    @property
    def served(self) -> EngineApi:
        return cast("EngineApi", self)


def run_virtually(test: Any) -> None:
    """Run it in a loop where time passes only when everything waits."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(test(LoopClock(runner.get_loop())))


async def read(content: AsyncGenerator[bytes, None], count: int = 1) -> list[Event]:
    """So many frames with data, as a reader of the stream gets them."""
    parser = EventParser()
    events: list[Event] = []
    while len(events) < count:
        events += [event for event in parser.feed(await anext(content)) if event.data]
    return events


async def read_to_end(content: AsyncGenerator[bytes, None]) -> list[Event]:
    parser = EventParser()
    return [event async for part in content for event in parser.feed(part) if event.data]


def data_of(events: list[Event]) -> list[dict[str, Any]]:
    return [json.loads(event.data) for event in events]


def test_a_stream_begins_by_telling_where_it_is_and_when_to_come_back() -> None:
    async def scenario(clock: LoopClock) -> None:
        api = StoreEngineApi(clock)
        await api.store.apply([accept("a")])
        reply = await EventStreams(retry=2.5).journal(api.served, ALL)
        async with aclosing(reply.content) as content:
            last = await api.store.last_event()
            assert await anext(content) == b"retry: 2500\nid: %d\n\n" % last
        assert (b"content-type", b"text/event-stream; charset=utf-8") in reply.headers

    run_virtually(scenario)


def test_an_event_tells_all_of_its_transition() -> None:
    async def scenario(clock: LoopClock) -> None:
        api = StoreEngineApi(clock)
        await api.store.apply([accept("a", tenant="acme")])
        await api.store.apply([move("a", _E.SCHEDULE, _E.DISPATCH, reason="why not")])
        reply = await EventStreams().journal(api.served, ALL, 0)
        async with aclosing(reply.content) as content:
            accepted, _, dispatched = await read(content, 3)
        assert accepted.kind == "accept"
        assert dispatched.kind == "dispatch"
        journal = await api.store.events(0)
        assert [int(accepted.id), int(dispatched.id)] == [journal[0].cursor, journal[2].cursor]
        assert data_of([dispatched]) == [
            {
                "job_id": "a",
                "tenant": "acme",
                "topic": "job.test",
                "n": 3,
                "before": "SCHEDULED",
                "event": "dispatch",
                "after": "DISPATCHED",
                "attempt": 1,
                "actor": "scheduler",
                "at": T0,
                "reason": "why not",
                "worker_id": "w1",
                "cursor": journal[2].cursor,
            }
        ]

    run_virtually(scenario)


def test_what_people_write_can_not_forge_an_event() -> None:
    async def scenario(clock: LoopClock) -> None:
        api = StoreEngineApi(clock)
        forged = "x\n\nid: 1\nevent: succeed\r\ndata: {}\u2028\n\n"
        await api.store.apply([accept("a", topic=forged), move("a", _E.CANCEL, reason=forged)])
        reply = await EventStreams().journal(api.served, ALL, 0)
        async with aclosing(reply.content) as content:
            first, second = await read(content, 2)
        assert (first.kind, second.kind) == ("accept", "cancel")
        assert data_of([second])[0]["reason"] == forged

    run_virtually(scenario)


def test_a_reader_that_comes_back_after_any_event_misses_none_and_gets_none_twice() -> None:
    async def scenario(clock: LoopClock) -> None:
        api = StoreEngineApi(clock)
        streams = EventStreams()
        for n in range(4):
            await api.store.apply([accept(f"{n}"), move(f"{n}", _E.SCHEDULE, _E.DISPATCH)])
        journal = await api.store.events(0)
        for start in range(len(journal)):
            after = journal[start].cursor
            reply = await streams.journal(api.served, ALL, after)
            async with aclosing(reply.content) as content:
                await api.store.apply([accept(f"new-{start}")])
                events = await read(content, len(journal) - start)
            journal = await api.store.events(0)
            assert [int(event.id) for event in events] == [e.cursor for e in journal[start + 1 :]]

    run_virtually(scenario)


def test_a_silent_stream_gives_signs_of_life_that_tell_how_far_it_is() -> None:
    async def scenario(clock: LoopClock) -> None:
        api = StoreEngineApi(clock)
        streams = EventStreams(heartbeat=15.0)
        reply = await streams.journal(api.served, EventFilter(topic="other"))
        async with aclosing(reply.content) as content:
            await anext(content)
            begun = clock.monotonic()
            await api.store.apply([accept("a")])
            beat = await anext(content)
            assert beat == b": still here\nid: %d\n\n" % await api.store.last_event()
            assert clock.monotonic() - begun == pytest.approx(15.0)
            assert (await anext(content)).startswith(b": still here\n")

    run_virtually(scenario)


@pytest.mark.parametrize(
    ("wanted", "jobs"),
    [
        (EventFilter(topic="job.text.*"), {"a"}),
        (EventFilter(job_id="b"), {"b"}),
        (EventFilter(tenant="acme"), {"c"}),
        (EventFilter(state=(JobState.CANCELLED,)), {"b"}),
        (EventFilter(event=(JobEvent.SCHEDULE,)), {"c"}),
        (EventFilter(topic="job.*", state=(JobState.PENDING,)), {"a", "b", "c"}),
    ],
)
def test_only_what_is_asked_for_is_told(wanted: EventFilter, jobs: set[str]) -> None:
    async def scenario(clock: LoopClock) -> None:
        api = StoreEngineApi(clock)
        await api.store.apply(
            [
                accept("a", topic="job.text.shout"),
                accept("b"),
                accept("c", tenant="acme"),
                move("b", _E.CANCEL),
                move("c", _E.SCHEDULE),
            ]
        )
        reply = await EventStreams().journal(api.served, wanted, 0)
        async with aclosing(reply.content) as content:
            events: list[dict[str, Any]] = []
            while not (part := await anext(content)).startswith(b":"):
                events += data_of([e for e in EventParser().feed(part) if e.data])
        assert {event["job_id"] for event in events} == jobs

    run_virtually(scenario)


def test_a_batch_is_written_once_for_all_readers_and_forgotten_with_them() -> None:
    async def scenario(clock: LoopClock) -> None:
        api = StoreEngineApi(clock)
        streams = EventStreams()
        contents = [(await streams.journal(api.served, ALL)).content for _ in range(20)]
        for content in contents:
            await anext(content)
        await api.store.apply([accept("a"), accept("b")])
        parts = [await anext(content) for content in contents]
        assert all(part is parts[0] for part in parts)
        assert (streams.open, streams.told) == (20, 40)
        for content in contents:
            await content.aclose()
        assert streams.open == api.hub.readers == 0
        await clock.sleep(1)
        gc.collect()
        assert len(streams._written) == 0

    run_virtually(scenario)


def test_two_batches_alike_are_not_taken_for_each_other() -> None:
    written = Written()
    first, second = EventBatch((), 1), EventBatch((), 1)
    written.whole(first)
    written.whole(second)
    assert len(written) == 2
    del first
    assert len(written) == 1


def test_closing_the_hub_ends_the_stream() -> None:
    async def scenario(clock: LoopClock) -> None:
        api = StoreEngineApi(clock)
        reply = await EventStreams().journal(api.served, ALL)
        await anext(reply.content)
        waiting = asyncio.create_task(read_to_end(reply.content))
        await clock.sleep(1)
        await api.hub.close()
        assert await waiting == []

    run_virtually(scenario)


# -- one job --------------------------------------------------------------------------


def test_a_jobs_stream_is_its_history_then_what_happens_then_the_end() -> None:
    async def scenario(clock: LoopClock) -> None:
        api = StoreEngineApi(clock)
        await api.store.apply([accept("a"), accept("b"), move("a", _E.SCHEDULE)])
        reply = await EventStreams().job(api.served, "a")
        reading = asyncio.create_task(read_to_end(reply.content))
        await clock.sleep(40)
        await api.store.apply([move("b", _E.CANCEL), move("a", _E.DISPATCH), move("a", _E.START)])
        await clock.sleep(1)
        await api.store.apply([move("a", _E.SUCCEED)])
        *events, end = await reading
        assert [event.kind for event in events] == [
            "accept",
            "schedule",
            "dispatch",
            "start",
            "succeed",
        ]
        assert [event.id for event in events] == ["1", "2", "3", "4", "5"]
        assert [data["n"] for data in data_of(events)] == [1, 2, 3, 4, 5]
        assert (end.kind, data_of([end])) == ("end", [{"job_id": "a", "state": "SUCCEEDED"}])
        assert api.hub.readers == 0

    run_virtually(scenario)


def test_the_stream_of_a_job_that_has_ended_ends() -> None:
    async def scenario(clock: LoopClock) -> None:
        api = StoreEngineApi(clock)
        await api.store.apply([accept("a"), move("a", _E.CANCEL)])
        streams = EventStreams()
        for after, kinds in (
            (0, ["accept", "cancel", "end"]),
            (1, ["cancel", "end"]),
            (2, ["end"]),
        ):
            reply = await streams.job(api.served, "a", after)
            assert [event.kind for event in await read_to_end(reply.content)] == kinds

    run_virtually(scenario)


def test_what_has_no_history_has_no_stream() -> None:
    async def scenario(clock: LoopClock) -> None:
        api = StoreEngineApi(clock)
        streams = EventStreams()
        with pytest.raises(NotFound):
            await streams.job(api.served, "nothing")
        with pytest.raises(NotFound):
            await streams.updates(api.served, "nothing")
        await api.store.apply([accept("a")])
        with pytest.raises(InvalidRequest):
            await streams.job(api.served, "a", 7)
        with pytest.raises(InvalidRequest):
            await streams.journal(api.served, ALL, 1 << 62)
        gc.collect()
        assert api.hub.readers == 0

    run_virtually(scenario)


# -- a job's own words ----------------------------------------------------------------


def test_updates_tell_each_move_once_even_those_that_nobody_told_of() -> None:
    async def scenario(clock: LoopClock) -> None:
        api = StoreEngineApi(clock)
        await api.store.apply([accept("a")])
        reply = await EventStreams().updates(api.served, "a")
        reading = asyncio.create_task(read_to_end(reply.content))
        await clock.sleep(1)
        answers = await api.store.apply(
            [move("a", _E.SCHEDULE), move("a", _E.DISPATCH), move("a", _E.START)]
        )
        await api.store.apply([move("a", _E.SUCCEED)])
        (start,) = answers[2].transitions
        for update in (
            Moved(start),
            Moved(start),
            Progressed("a", 0.5, "half"),
            Logged(LogLine("a", 1, T0, "info", "hello", 1)),
            None,
        ):
            api.said.put_nowait(update)
        events = await reading
        kinds = ["moved", "moved", "moved", "progress", "log", "moved", "end"]
        assert [event.kind for event in events] == kinds
        assert [event.id for event in events] == ["2-0", "3-0", "4-0", "4-0", "4-1", "5-1", "5-1"]
        assert data_of(events)[3] == {
            "type": "progress",
            "job_id": "a",
            "fraction": 0.5,
            "message": "half",
        }

    run_virtually(scenario)


def test_updates_go_on_where_they_were_broken_off() -> None:
    async def scenario(clock: LoopClock) -> None:
        api = StoreEngineApi(clock)
        await api.store.apply([accept("a"), move("a", _E.SCHEDULE), move("a", _E.CANCEL)])
        for n in (1, 2):
            api.said.put_nowait(Logged(LogLine("a", 1, T0, "info", f"line {n}", n)))
        api.said.put_nowait(None)
        reply = await EventStreams().updates(api.served, "a", place_of("2-1", "after"))
        events = await read_to_end(reply.content)
        assert [(event.kind, event.id) for event in events] == [
            ("moved", "3-1"),
            ("log", "3-2"),
            ("end", "3-2"),
        ]

    run_virtually(scenario)


def test_a_job_that_says_nothing_still_gives_signs_of_life() -> None:
    async def scenario(clock: LoopClock) -> None:
        api = StoreEngineApi(clock)
        await api.store.apply([accept("a")])
        streams = EventStreams(heartbeat=15.0)
        reply = await streams.updates(api.served, "a")
        async with aclosing(reply.content) as content:
            assert b"id: 1-0\n" in await anext(content)
            assert await anext(content) == b": still here\nid: 1-0\n\n"
            assert await anext(content) == b": still here\nid: 1-0\n\n"
        assert streams.open == 0

    run_virtually(scenario)


@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1.5", "1e3", "\u0661", "9" * 19, "9" * 400, " 1", "1-2"]
)
def test_an_id_that_no_stream_gave_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest, match="after"):
        cursor_of(text, "after")
    with pytest.raises(InvalidRequest, match="after"):
        place_of(f"{text}-1" if text != "1-2" else "1-2-3", "after")
