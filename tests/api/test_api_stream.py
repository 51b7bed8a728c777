from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, cast

import pytest
from tests.support.ledgers import MemoryLedger

from penstock.adapters.http.connection import Event, EventParser
from penstock.api.stream import EventStreams, cursor_of, place_of
from penstock.control.feed import Feed, JournalHub
from penstock.control.open_jobs import OpenJobs
from penstock.control.stream import EventStream
from penstock.control.workers import Roster
from penstock.core.errors import InvalidRequest, NotFound
from penstock.core.job import Job
from penstock.lifecycles.canonical import JobEvent, JobState
from penstock.ports.engine_api import (
    JOURNAL_KINDS,
    EngineApi,
    JobUpdate,
    Logged,
    Moved,
    Progressed,
    StreamBatch,
    StreamQuery,
)
from penstock.ports.store import LogLine
from penstock.testing.clock import LoopClock, VirtualLoop
from penstock.testing.samples import T0, accept, move

_E = JobEvent
KINDS = tuple(JOURNAL_KINDS)


def wanting(**conditions: Any) -> StreamQuery:
    """Entries of the journal that meet these conditions."""
    return StreamQuery(kinds=KINDS, **conditions)


JOURNAL = wanting()


class StoreEngineApi:
    """The part of an EngineApi that streams need, straight from a store."""

    def __init__(self, clock: LoopClock, tenant: str | None = None) -> None:
        self.store = MemoryLedger()
        self.hub = JournalHub(self.store, clock)
        self.store.listen(self.hub.hear)
        open_jobs = OpenJobs(Roster({}), clock.now)
        self.source = EventStream(self.store, self.hub, Feed(self.store), open_jobs, clock)
        self.tenant = tenant
        self.said: asyncio.Queue[JobUpdate | None] = asyncio.Queue()

    def stream(self, query: StreamQuery, after: str | None = None) -> AsyncIterator[StreamBatch]:
        return self.source.read(query, after, self.tenant, frozenset(query.kinds), self.get)

    async def get(self, job_id: str) -> Job:
        job = await self.store.get(job_id)
        if job is None:
            raise NotFound(f"no job {job_id}")
        return job

    async def follow(
        self, job_id: str, after_log: int = 0, after_move: int = 0
    ) -> AsyncIterator[JobUpdate]:
        for entry in await self.store.history(job_id):
            if entry.n > after_move:
                yield Moved(entry)
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
        reply = await EventStreams(retry=2.5).everything(api.served, JOURNAL, None, KINDS)
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
        reply = await EventStreams().everything(api.served, JOURNAL, "0", KINDS)
        async with aclosing(reply.content) as content:
            accepted, _, dispatched = await read(content, 3)
        assert accepted.kind == dispatched.kind == "job"
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
        reply = await EventStreams().everything(api.served, JOURNAL, "0", KINDS)
        async with aclosing(reply.content) as content:
            first, second = await read(content, 2)
        assert (first.kind, second.kind) == ("job", "job")
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
            reply = await streams.everything(api.served, JOURNAL, str(after), KINDS)
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
        reply = await streams.everything(api.served, wanting(topic="other"), None, KINDS)
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
        (wanting(topic="job.text.*"), {"a"}),
        (wanting(job_ids=("b",)), {"b"}),
        (wanting(tenant="acme"), {"c"}),
        (wanting(states=(JobState.CANCELLED,)), {"b"}),
        (wanting(events=(JobEvent.SCHEDULE,)), {"c"}),
        (wanting(topic="job.*", states=(JobState.PENDING,)), {"a", "b", "c"}),
    ],
)
def test_only_what_is_asked_for_is_told(wanted: StreamQuery, jobs: set[str]) -> None:
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
        reply = await EventStreams().everything(api.served, wanted, "0", KINDS)
        async with aclosing(reply.content) as content:
            events: list[dict[str, Any]] = []
            while not (part := await anext(content)).startswith(b":"):
                events += data_of([e for e in EventParser().feed(part) if e.data])
        assert {event["job_id"] for event in events} == jobs

    run_virtually(scenario)


def test_a_batch_is_written_once_for_all_readers_who_cost_nothing_when_they_are_gone() -> None:
    async def scenario(clock: LoopClock) -> None:
        api = StoreEngineApi(clock)
        streams = EventStreams()
        contents = [
            (await streams.everything(api.served, JOURNAL, None, KINDS)).content for _ in range(20)
        ]
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
        assert api.source._task is None  # nobody reads: nothing is looked at

    run_virtually(scenario)


def test_batches_that_were_written_are_forgotten_after_a_while() -> None:
    async def scenario(clock: LoopClock) -> None:
        api = StoreEngineApi(clock)
        streams = EventStreams()
        content = (await streams.everything(api.served, JOURNAL, None, KINDS)).content
        for n in range(200):
            await api.store.apply([accept(f"{n}")])
            await read(content)
        assert len(streams._frames._written) <= 64
        await content.aclose()

    run_virtually(scenario)


def test_closing_the_hub_ends_the_stream() -> None:
    async def scenario(clock: LoopClock) -> None:
        api = StoreEngineApi(clock)
        reply = await EventStreams().everything(api.served, JOURNAL, None, KINDS)
        await anext(reply.content)
        waiting = asyncio.create_task(read_to_end(reply.content))
        await clock.sleep(1)
        await api.hub.close()
        assert await waiting == []

    run_virtually(scenario)


def test_what_is_not_there_has_no_stream() -> None:
    async def scenario(clock: LoopClock) -> None:
        api = StoreEngineApi(clock)
        streams = EventStreams()
        with pytest.raises(NotFound):
            await streams.updates(api.served, "nothing")
        with pytest.raises(NotFound):
            await streams.everything(api.served, wanting(logs=("nothing",)), None, KINDS)
        for wrong in ("x", "1-2", "-1", "1" * 30, ""):
            with pytest.raises(InvalidRequest):
                await streams.everything(api.served, JOURNAL, wrong, KINDS)
        gc.collect()
        assert api.hub.readers == 0

    run_virtually(scenario)


# -- a job's own words ----------------------------------------------------------------


def test_updates_tell_with_each_where_to_resume() -> None:
    async def scenario(clock: LoopClock) -> None:
        api = StoreEngineApi(clock)
        await api.store.apply([accept("a")])
        reply = await EventStreams().updates(api.served, "a")
        reading = asyncio.create_task(read_to_end(reply.content))
        await clock.sleep(1)
        moves = (_E.SCHEDULE, _E.DISPATCH, _E.START, _E.SUCCEED)
        await api.store.apply([move("a", event) for event in moves])
        *first, last = [Moved(entry) for entry in (await api.store.history("a"))[1:]]
        line = Logged(LogLine("a", 1, T0, "info", "hello", 1))
        for update in (*first, Progressed("a", 0.5, "half"), line, last, None):
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
