"""One EngineApi, three ways to it: in the engine, over a link, over HTTP. Nobody can tell which."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing, asynccontextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import penstock
from penstock import App
from penstock.adapters.http.connection import ConnectionOptions, Event, EventParser
from penstock.adapters.http.engine_api import HttpEngineApi, http_engine_api
from penstock.adapters.link.client import Link
from penstock.adapters.link.proxy import remote_api
from penstock.app.application import make_executors
from penstock.app.engine import Engine
from penstock.config import load
from penstock.core.errors import (
    Conflict,
    EngineUnavailable,
    InvalidRequest,
    Misconfigured,
    NotAuthenticated,
    NotFound,
    NotPermitted,
    NotRunning,
    TooMany,
    Unavailable,
    UnknownTopic,
    UnreadablePointer,
    WaitTimedOut,
)
from penstock.core.job import JobRequest
from penstock.core.pointer import decode_data, encode_data
from penstock.core.verdict import Rate
from penstock.lifecycles.canonical import TERMINAL, JobState
from penstock.ports.engine_api import (
    EngineApi,
    EventBatch,
    JobUpdate,
    KeyRole,
    Limit,
    Logged,
    Moved,
    Progressed,
    Schedule,
    journal,
)
from penstock.ports.store import AuditQuery, JobQuery, JournalEvent
from penstock.testing.aio import run_async

LATER = time.time() + 1e6
BIG = b'{"text": "' + b"x" * 20_000 + b'"}'
RULES = """
default = "allow"

[[rules]]
id = "ask-first"
decision = "require_approval"
topics = ["job.risky"]
approval = { self_approval = true }
"""


def an_app(gate: threading.Event) -> App:
    app = App()

    @app.job("job.text.shout")
    def shout(text: str) -> str:
        """Make a text loud."""
        return text.upper()

    @app.job("job.text.fail")
    def fail() -> None:
        raise ValueError("no")

    @app.job("job.risky")
    def risky() -> None:
        pass

    @app.job("job.tell")
    def tell() -> str:
        ctx = penstock.current()
        for n in range(5):
            ctx.log(f"line {n}")
        ctx.progress(0.5, "half")
        gate.wait(30)
        ctx.log("last line")
        return "told"

    return app


class House:
    """A running engine, and the ways to its EngineApi."""

    def __init__(self, engine: Engine, folder: Path, gate: threading.Event) -> None:
        self.engine, self.folder, self.gate = engine, folder, gate
        self.token = (folder / "token").read_text().strip()

    @asynccontextmanager
    async def api(self, way: str) -> AsyncIterator[EngineApi]:
        if way == "embedded":
            yield self.engine.api
        elif way == "link":
            link = Link(self.engine.addresses[0])
            await link.connect()
            yield remote_api(link)
            await link.close()
        else:
            async with self.http() as api:
                yield api

    @asynccontextmanager
    async def http(self, token: str | None = None) -> AsyncIterator[HttpEngineApi]:
        api = http_engine_api(self.engine.url, self.token if token is None else token)
        await api.connect()
        try:
            yield api
        finally:
            await api.close()


@asynccontextmanager
async def a_house(folder: Path, **flags: Any) -> AsyncIterator[House]:
    gate = threading.Event()
    rules = folder / "rules.toml"
    rules.write_text(RULES)
    settings = load(
        flags={
            "data_dir": str(folder),
            "durability": "os",
            "http__listen": "127.0.0.1:0",
            "rules": str(rules),
            **flags,
        }
    )
    try:
        async with Engine(settings, make_executors(an_app(gate), settings)) as engine:
            yield House(engine, folder, gate)
    finally:
        gate.set()


Scenario = Callable[[EngineApi, House], Coroutine[Any, Any, None]]


def each_way(scenario: Scenario) -> Callable[..., None]:
    """Run it against each kind of EngineApi."""

    @pytest.mark.parametrize("way", ["embedded", "link", "http"])
    def test(way: str, tmp_path: Path) -> None:
        async def run() -> None:
            async with a_house(tmp_path) as house, house.api(way) as api:
                await scenario(api, house)

        asyncio.run(run())

    test.__name__ = scenario.__name__
    return test


def a_job(**fields: Any) -> JobRequest:
    given: dict[str, Any] = {
        "job_id": "",
        "topic": "job.text.shout",
        "context_ptr": encode_data(b'{"text": "hi"}'),
    }
    return JobRequest(**{**given, **fields})


def told(**fields: Any) -> JobRequest:
    return a_job(topic="job.tell", context_ptr="", **fields)


# -- submitting -----------------------------------------------------------------------


@each_way
async def test_a_job_is_submitted_waited_for_and_looked_up(api: EngineApi, house: House) -> None:
    (job,) = await api.submit([a_job(labels={"a": "b/ü"})])
    assert job.state is JobState.PENDING
    done = await api.wait(job.job_id, 20)
    assert done.state is JobState.SUCCEEDED
    assert done.result is not None
    assert decode_data(done.result.result_ptr or "") == b'"HI"'
    assert await api.get(job.job_id) == done
    assert done.request.labels == {"a": "b/ü"}
    assert [entry.after for entry in await api.history(job.job_id)][-1] is JobState.SUCCEEDED
    assert "SUCCEEDED" in await api.why(job.job_id)


@each_way
async def test_a_repeated_submission_is_the_same_job(api: EngineApi, house: House) -> None:
    for request in (a_job(job_id="mine"), a_job(idempotency_key="k/1")):
        (first,) = await api.submit([request])
        (second,) = await api.submit([request])
        assert first.job_id == second.job_id
        other = a_job(
            job_id=request.job_id, idempotency_key=request.idempotency_key, labels={"x": "y"}
        )
        with pytest.raises(Conflict, match="labels differs"):
            await api.submit([other])


@each_way
async def test_many_jobs_are_accepted_in_order(api: EngineApi, house: House) -> None:
    jobs = await api.submit([a_job(labels={"n": str(n)}) for n in range(300)])
    assert [job.request.labels["n"] for job in jobs] == [str(n) for n in range(300)]
    assert len({job.job_id for job in jobs}) == 300
    assert await api.submit([]) == []


@each_way
async def test_of_a_batch_with_one_bad_job_nothing_is_stored(api: EngineApi, house: House) -> None:
    with pytest.raises(UnknownTopic) as caught:
        await api.submit([a_job(), a_job(topic="job.text.shoot")])
    assert caught.value.field.endswith("topic")
    assert "job.text.shout" in caught.value.hint
    assert await api.find(JobQuery()) == []


@each_way
async def test_a_refused_batch_says_how_much_of_it_is_stored(api: EngineApi, house: House) -> None:
    await api.limits.put(Limit(name="few", max_waiting=5500))
    with pytest.raises(TooMany) as caught:
        await api.submit([a_job(run_at=LATER)] * 6000)
    stored = (await api.status()).waiting
    if hasattr(api, "connect"):  # it sends more than 5,000 in several calls
        assert caught.value.hint == "the first 5000 of 6000 jobs are stored"
        assert stored == 5000
    else:
        assert stored == 0


@each_way
async def test_a_wrong_field_is_named(api: EngineApi, house: House) -> None:
    with pytest.raises(InvalidRequest) as caught:
        await api.submit([a_job(timeout=-1.0)])
    assert caught.value.field.endswith("timeout")
    assert caught.value.code == "INVALID"


@each_way
async def test_what_a_function_wants_of_its_jobs_yields_to_what_the_caller_says(
    api: EngineApi, house: House
) -> None:
    (job,) = await api.submit([told(complete=True)])
    assert job.request.complete
    house.gate.set()
    await api.wait(job.job_id, 20)


# -- looking --------------------------------------------------------------------------


@each_way
async def test_jobs_are_found_by_what_is_asked(api: EngineApi, house: House) -> None:
    jobs = await api.submit([a_job(labels={"n": str(n % 3)}) for n in range(30)])
    await api.wait(jobs[-1].job_id, 20)
    found = await api.find(JobQuery(labels={"n": "1"}, limit=5))
    assert [job.job_id for job in found] == [job.job_id for job in jobs[1::3]][::-1][:5]
    oldest = await api.find(JobQuery(oldest_first=True, since=jobs[4].seq, limit=3))
    assert [job.seq for job in oldest] == [job.seq for job in jobs[5:8]]
    newest = await api.find(JobQuery(before=jobs[4].seq, limit=2))
    assert [job.seq for job in newest] == [jobs[3].seq, jobs[2].seq]
    assert await api.find(JobQuery(states=(JobState.DENIED, JobState.FAILED))) == []
    assert await api.find(JobQuery(awaiting_approval=True)) == []
    assert (
        len(await api.find(JobQuery(awaiting_approval=False, topic="job.text.*", limit=100))) == 30
    )


@each_way
async def test_a_job_that_is_not_there_is_not_found(api: EngineApi, house: House) -> None:
    for ask in (api.get, api.history, api.why, api.retry, api.wait, api.read_log):
        with pytest.raises(NotFound):
            await ask("not/there?")
    with pytest.raises(NotFound):
        await anext(api.follow("nothing"))
    with pytest.raises(NotFound):
        await api.cancel("nothing")


@each_way
async def test_a_wait_ends_when_patience_does(api: EngineApi, house: House) -> None:
    (job,) = await api.submit([told()])
    with pytest.raises(WaitTimedOut, match="is still"):
        await api.wait(job.job_id, 0.05)
    house.gate.set()
    assert (await api.wait(job.job_id)).state is JobState.SUCCEEDED


@each_way
async def test_a_job_is_followed_to_its_end(api: EngineApi, house: House) -> None:
    (job,) = await api.submit([told()])
    updates: list[JobUpdate] = []
    async for update in api.follow(job.job_id):
        updates.append(update)
        if any(isinstance(update, Progressed) for update in updates):
            house.gate.set()
    lines = [update.line for update in updates if isinstance(update, Logged)]
    assert [line.text for line in lines] == [*(f"line {n}" for n in range(5)), "last line"]
    assert [line.n for line in lines] == list(range(1, 7))
    moves = [update.transition for update in updates if isinstance(update, Moved)]
    assert [entry.n for entry in moves] == list(range(moves[0].n, moves[-1].n + 1))
    assert moves[-1].after is JobState.SUCCEEDED
    assert Progressed(job.job_id, 0.5, "half") in updates
    after = [update async for update in api.follow(job.job_id, after_log=4)]
    assert [update.line.n for update in after if isinstance(update, Logged)] == [5, 6]
    without = [update async for update in api.follow(job.job_id, None)]
    assert not any(isinstance(update, Logged) for update in without)
    assert [line.n for line in await api.read_log(job.job_id, after=2, limit=3)] == [3, 4, 5]


@each_way
async def test_events_are_the_journal_from_any_place(api: EngineApi, house: House) -> None:
    async with aclosing(journal(api)) as live:  # type: ignore[type-var]
        first = await anext(live)
        assert first.events == ()
        jobs = await api.submit([a_job() for _ in range(20)])
        for job in jobs:
            await api.wait(job.job_id, 20)
        seen = await until(live, ends=20)
    stored = await house.engine.store.events(0, 10_000)
    assert seen == stored
    middle = stored[len(stored) // 2].cursor
    async with aclosing(journal(api, middle)) as rest:  # type: ignore[type-var]
        late = await until(rest, ends=sum(_is_end(e) for e in stored if e.cursor > middle))
    assert late == [event for event in stored if event.cursor > middle]
    with pytest.raises(InvalidRequest, match="after"):
        async for batch in journal(api, stored[-1].cursor + 1000):
            assert batch.events == ()  # over HTTP the gap follows the opening of the stream


def _is_end(event: JournalEvent) -> bool:
    return event.transition.after in TERMINAL


async def until(batches: AsyncIterator[EventBatch], *, ends: int) -> list[JournalEvent]:
    """Events, until so many of them were ends."""
    seen: list[JournalEvent] = []
    while sum(map(_is_end, seen)) < ends:
        seen += (await anext(batches)).events
    return seen


# -- ending and repeating -------------------------------------------------------------


@each_way
async def test_a_waiting_job_is_cancelled(api: EngineApi, house: House) -> None:
    (job,) = await api.submit([a_job(run_at=LATER)])
    done = await api.cancel(job.job_id, reason="not needed")
    assert done.ended
    assert done.job.state is JobState.CANCELLED
    assert (await api.cancel(job.job_id)).job.state is JobState.CANCELLED


@each_way
async def test_dead_letters_are_found_and_retried(api: EngineApi, house: House) -> None:
    jobs = await api.submit([a_job(topic="job.text.fail", context_ptr="") for _ in range(3)])
    for job in jobs:
        assert (await api.wait(job.job_id, 20)).state is JobState.FAILED
    again = await api.retry(jobs[0].job_id)
    assert again.request.parent_job_id == jobs[0].job_id
    await api.wait(again.job_id, 20)
    third = await api.retry(jobs[0].job_id)
    assert third.request.parent_job_id == again.job_id
    await api.wait(third.job_id, 20)
    assert [job.job_id for job in await api.find(JobQuery(first_try=jobs[0].job_id))] == [
        third.job_id,
        again.job_id,
        jobs[0].job_id,
    ]
    listed = {job.job_id for job in await api.find(JobQuery(states=(JobState.FAILED,)))}
    assert listed == {third.job_id, jobs[1].job_id, jobs[2].job_id}
    assert len(await api.find(JobQuery(states=(JobState.FAILED,), tries=True))) == 5
    status = await api.status()
    assert (status.tally, status.retried) == ({JobState.FAILED: 3}, 2)
    assert {job.job_id for job in await api.find(JobQuery(dead=True))} >= {
        jobs[1].job_id,
        jobs[2].job_id,
    }
    bulk = await api.retry_many(JobQuery(job_id=jobs[1].job_id))
    assert (bulk.matched, bulk.done) == (1, 1)


@each_way
async def test_children_are_counted_by_state_by_any_try_of_their_parent(
    api: EngineApi, house: House
) -> None:
    (parent,) = await api.submit([a_job(topic="job.text.fail", context_ptr="")])
    await api.wait(parent.job_id, 20)
    again = await api.retry(parent.job_id)
    child = a_job(run_at=LATER, child_of=again.job_id, detached=True)
    await api.submit([child, child])
    for name in (parent.job_id, again.job_id):
        assert sum((await api.count_children(name)).values()) == 2
    with pytest.raises(NotFound):
        await api.count_children("nobody")


@each_way
async def test_many_are_cancelled_by_what_they_have_in_common(api: EngineApi, house: House) -> None:
    await api.submit([a_job(run_at=LATER, labels={"x": str(n % 2)}) for n in range(6)])
    bulk = await api.cancel_many(JobQuery(labels={"x": "1"}), reason="enough")
    assert (bulk.matched, bulk.done) == (3, 3)
    rest = await api.cancel_many(JobQuery())
    assert rest.done == 3


# -- the rules ------------------------------------------------------------------------


@each_way
async def test_a_parked_job_is_approved_or_rejected(api: EngineApi, house: House) -> None:
    yes, no = await api.submit([a_job(topic="job.risky", context_ptr="") for _ in range(2)])
    for job in (yes, no):
        await parked(api, job.job_id)
    assert {job.job_id for job in await api.find(JobQuery(awaiting_approval=True))} == {
        yes.job_id,
        no.job_id,
    }
    approved = await api.approvals.approve(yes.job_id, reason="fine")
    assert approved.hold is not None
    assert [vote.reason for vote in approved.hold.votes] == ["fine"]
    assert (await api.wait(yes.job_id, 20)).state is JobState.SUCCEEDED
    await api.approvals.reject(no.job_id, reason="no")
    assert (await api.wait(no.job_id, 20)).state is JobState.DENIED
    with pytest.raises(Conflict):
        await api.approvals.approve(no.job_id)
    explained = await api.policy.explain(no.job_id)
    assert explained.now.rule_id == "ask-first"


async def parked(api: EngineApi, job_id: str) -> None:
    async with aclosing(journal(api, 0)) as batches:  # type: ignore[type-var]
        async for batch in batches:
            for event in batch.events:
                if event.transition.job_id == job_id and event.transition.event == "park":
                    return


@each_way
async def test_rules_are_shown_tried_and_read_again(api: EngineApi, house: House) -> None:
    view = await api.policy.current()
    assert [rule.id for rule in view.rules] == ["ask-first"]
    (job,) = await api.submit([a_job()])
    await api.wait(job.job_id, 20)
    tried = await api.policy.simulate('default = "deny"')
    assert tried.looked_at == tried.changed == 1
    (house.folder / "rules.toml").write_text("default = [")
    with pytest.raises(Misconfigured):
        await api.policy.reload()
    assert (await api.status()).policy_problem


# -- the smaller counters -------------------------------------------------------------


@each_way
async def test_limits_are_set_shown_and_deleted(api: EngineApi, house: House) -> None:
    limit = Limit(name="by:tenant", key=("tenant",), topics=("job.*",), rate=Rate(5, 60.0))
    assert (await api.limits.put(limit)).limit == limit
    assert [view.limit for view in await api.limits.list()] == [limit]
    await api.limits.delete("by:tenant")
    with pytest.raises(NotFound):
        await api.limits.delete("by:tenant")
    assert await api.limits.list() == []
    with pytest.raises(InvalidRequest):
        await api.limits.put(Limit(name="odd", key=("colour",)))


@each_way
async def test_a_full_line_says_when_to_come_back(api: EngineApi, house: House) -> None:
    await api.limits.put(Limit(name="few", max_waiting=1))
    await api.submit([a_job(run_at=LATER)])
    with pytest.raises(TooMany) as caught:
        await api.submit([a_job(run_at=LATER)])
    assert caught.value.retry_after > 0


@each_way
async def test_no_more_jobs_wait_than_may_however_many_come_at_once(
    api: EngineApi, house: House
) -> None:
    await api.limits.put(Limit(name="few", max_waiting=10))
    ends = await asyncio.gather(
        *(api.submit([a_job(run_at=LATER)]) for _ in range(60)), return_exceptions=True
    )
    assert sum(isinstance(end, list) for end in ends) == 10
    assert all(isinstance(end, list | TooMany) for end in ends)
    assert (await api.status()).waiting == 10


@each_way
async def test_a_batch_that_loses_a_race_for_an_id_stores_nothing(
    api: EngineApi, house: House
) -> None:
    others = [a_job(job_id="x1"), a_job(job_id="same", labels={"a": "b"}), a_job(job_id="x2")]
    ends = await asyncio.gather(
        api.submit([a_job(job_id="same")]), api.submit(others), return_exceptions=True
    )
    assert sum(isinstance(end, Conflict) for end in ends) == 1
    there = {job.job_id for job in await api.find(JobQuery())}
    assert there == ({"same"} if isinstance(ends[1], Conflict) else {"same", "x1", "x2"})


@each_way
async def test_schedules_are_kept(api: EngineApi, house: House) -> None:
    schedule = Schedule(name="nightly", cron="0 3 * * *", request=a_job(), timezone="Europe/Rome")
    view = await api.schedules.put(schedule)
    assert view.next_at is not None
    assert view.schedule.timezone == "Europe/Rome"
    assert (await api.schedules.pause("nightly")).next_at is None
    assert (await api.schedules.pause("nightly", paused=False)).next_at is not None
    job = await api.schedules.fire("nightly")
    assert job.request.schedule == "nightly"
    assert [view.schedule.name for view in await api.schedules.list()] == ["nightly"]
    again = (await api.schedules.get("nightly")).schedule
    assert (await api.schedules.put(again)).schedule.cron == "0 3 * * *"
    await api.schedules.delete("nightly")
    with pytest.raises(NotFound):
        await api.schedules.get("nightly")
    with pytest.raises(InvalidRequest, match="cron"):
        await api.schedules.put(Schedule(name="odd", cron="never", request=a_job()))


@each_way
async def test_keys_are_made_and_revoked_and_all_is_written_down(
    api: EngineApi, house: House
) -> None:
    made = await api.keys.create("ci", (KeyRole.SUBMIT,), tenant="acme", expires_in=3600)
    assert made.token.startswith("pst_")
    assert [key.name for key in await api.keys.list()] == ["ci"]
    assert (await api.keys.revoke(made.key.key_id)).revoked_at is not None
    entries = await api.audit.read(AuditQuery(action="key.*"))
    assert [entry.action for entry in entries] == ["key.revoke", "key.create"]
    assert await api.audit.read(AuditQuery(before=entries[0].n, limit=1)) == entries[1:]


@each_way
async def test_the_engine_and_its_fleet_are_told_of(api: EngineApi, house: House) -> None:
    (job,) = await api.submit([a_job()])
    await api.wait(job.job_id, 20)
    (worker,) = await api.workers()
    assert worker.local
    assert await api.topics() == sorted(worker.topics)
    assert worker.worker_id == house.engine.worker_id
    assert set(worker.facts) == {f"schema:{topic}" for topic in worker.topics}
    names = [pool.name for pool in await api.pools()]
    assert worker.pool in names
    assert (await api.pause_pool(worker.pool)).paused
    assert (await api.status()).paused_pools == (worker.pool,)
    assert not (await api.resume_pool(worker.pool)).paused
    assert (await api.status()).version == penstock.__version__
    assert (await api.verify()).mismatches == ()
    assert (await api.prune(1000)).jobs == 0
    with pytest.raises(NotFound):
        await api.pause_pool("no such pool")


@each_way
async def test_topics_are_described_by_what_their_workers_announce(
    api: EngineApi, house: House
) -> None:
    described = {view.topic: view for view in await api.describe_topics()}
    assert list(described) == await api.topics()
    shout = described["job.text.shout"]
    assert shout.description == "Make a text loud."
    assert shout.input_schema == {
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
        "additionalProperties": False,
    }
    assert shout.output_schema == {"type": "string"}
    assert (described["job.tell"].input_schema or {})["properties"] == {}


# -- payloads -------------------------------------------------------------------------


@each_way
async def test_blobs_go_up_and_down_whole_and_in_parts(api: EngineApi, house: House) -> None:
    uri = await api.put_blob(BIG, "application/json")
    assert await api.get_blob(uri) == BIG
    assert await api.read_blob(uri, 10, 20) == BIG[10:30]
    assert await api.read_blob(uri, len(BIG) - 5, 100) == BIG[-5:]
    stat = await api.stat_blob(uri)
    assert (stat.uri, stat.size, stat.media_type) == (uri, len(BIG), "application/json")
    (job,) = await api.submit([a_job(context_ptr=uri)])
    done = await api.wait(job.job_id, 20)
    assert done.result is not None
    assert await api.get_blob(done.result.result_ptr or "") == b'"' + b"X" * 20_000 + b'"'


@each_way
async def test_a_blob_that_is_not_there_is_refused(api: EngineApi, house: House) -> None:
    missing = "blob:sha256-" + "0" * 64
    with pytest.raises((NotFound, UnreadablePointer)):
        await api.get_blob(missing)
    with pytest.raises(UnreadablePointer):
        await api.submit([a_job(context_ptr=missing)])


# -- what only the network has --------------------------------------------------------


def at_home(test: Callable[[House], Coroutine[Any, Any, None]]) -> Callable[[Path], None]:
    @wraps(test)
    def run(tmp_path: Path) -> None:
        async def at() -> None:
            async with a_house(tmp_path) as house:
                await test(house)

        asyncio.run(at())

    del run.__wrapped__  # pytest would ask for its parameters
    return run


def test_events_are_read_alike_however_their_bytes_are_cut() -> None:
    text = (
        b"retry: 2500\nid: 3\n\n: still here\nid: 4\n\nid: 7\r\nevent: fail\r\ndata: {}\r\n\r\n"
        b"data: a\ndata: b\n\n: nothing\n\nevent: end\ndata: x\n\nid: 9\ndata: not whole"
    )
    expected = [
        Event("3", "", b""),
        Event("4", "", b""),
        Event("7", "fail", b"{}"),
        Event("7", "message", b"a\nb"),
        Event("7", "end", b"x"),
    ]
    for size in range(1, len(text) + 1):
        parser = EventParser()
        cuts = [text[at : at + size] for at in range(0, len(text), size)]
        assert [event for cut in cuts for event in parser.feed(cut)] == expected
        assert parser.last_id == "7"


@run_async
async def test_where_nothing_listens_that_is_said() -> None:
    api = http_engine_api("http://127.0.0.1:9", "x")
    with pytest.raises(NotRunning, match="no engine answers"):
        await api.connect()


@at_home
async def test_without_a_valid_key_nothing_is_answered_and_a_hint_is_given(house: House) -> None:
    for token in ("", "pst_nobody_knows", "x\u00fc"):
        with pytest.raises(NotAuthenticated) as caught:
            async with house.http(token):
                pass
        assert "key" in caught.value.hint


@at_home
async def test_a_key_does_what_its_roles_allow_and_sees_its_tenant_only(house: House) -> None:
    made = await house.engine.api.keys.create("ci", (KeyRole.SUBMIT,), tenant="acme")
    async with house.http() as owner, house.http(made.token) as ci:
        (theirs,) = await owner.submit([a_job()])
        (mine,) = await ci.submit([a_job()])
        assert mine.request.tenant == "acme"
        assert mine.request.principal == "ci"
        with pytest.raises(NotFound):
            await ci.get(theirs.job_id)
        assert [job.job_id for job in await ci.find(JobQuery())] == [mine.job_id]
        with pytest.raises(NotPermitted):
            await ci.keys.list()
        async with aclosing(journal(ci, 0)) as batches:  # type: ignore[type-var]
            seen = await until(batches, ends=1)
        assert {event.transition.job_id for event in seen} == {mine.job_id}


@at_home
async def test_more_jobs_than_one_call_takes_are_sent_in_parts(house: House) -> None:
    async with house.http() as api:
        jobs = await api.submit([a_job(run_at=LATER, labels={"n": str(n)}) for n in range(6_000)])
        assert [job.request.labels["n"] for job in jobs] == [str(n) for n in range(6_000)]
        found = await api.find(JobQuery(limit=2_500))
        assert [job.job_id for job in found] == [job.job_id for job in jobs[:-2_501:-1]]


class Breaking:
    """Between a client and the engine: breaks connections.

    Each after so many bytes of answers, and after the first answers to POST.
    """

    def __init__(self, url: str, after: list[int] | None = None, posts: int = 0) -> None:
        self._target = int(url.rpartition(":")[2])
        self._after, self._posts = after or [], posts
        self._serving: list[asyncio.Task[Any]] = []
        self.connections = 0
        self.posted = 0

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.append(task)
        self.connections += 1
        left = self._after.pop(0) if self._after else 1 << 60
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target)
        forward = asyncio.create_task(self._forward(reader, up_writer))
        try:
            while left > 0 and (data := await up_reader.read(min(65536, left))):
                if 0 < self.posted <= self._posts:
                    break
                writer.write(data)
                await writer.drain()
                left -= len(data)
        except ConnectionError:
            pass
        finally:
            forward.cancel()
            for one in (writer, up_writer):
                one.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            self.posted += data.count(b"POST /")
            writer.write(data)


@at_home
async def test_a_stream_that_breaks_anywhere_goes_on_without_gap_or_repeat(house: House) -> None:
    inside = house.engine.api
    jobs = await inside.submit([a_job() for _ in range(30)])
    for job in jobs:
        await inside.wait(job.job_id, 20)
    way = Breaking(house.engine.url, [1500 + 331 * n for n in range(25)])
    async with way as url:
        api = http_engine_api(url, house.token)
        await api.connect()
        async with aclosing(journal(api, 0)) as batches:  # type: ignore[type-var]
            seen = await until(batches, ends=30)
        await api.close()
    assert way.connections > 5
    assert seen == await house.engine.store.events(0, 10_000)


@at_home
async def test_what_a_job_says_comes_whole_over_a_line_that_breaks(house: House) -> None:
    (job,) = await house.engine.api.submit([told()])
    way = Breaking(house.engine.url, [1500 - 97 * n for n in range(12)])
    async with way as url:
        api = http_engine_api(url, house.token)
        await api.connect()
        updates: list[JobUpdate] = []
        async for update in api.follow(job.job_id):
            updates.append(update)
            if isinstance(update, Logged) and update.line.n == 5:
                house.gate.set()
        await api.close()
    assert way.connections > 1
    lines = [update.line.n for update in updates if isinstance(update, Logged)]
    assert lines == list(range(1, 7))
    moves = [update.transition.n for update in updates if isinstance(update, Moved)]
    assert moves == list(range(moves[0], moves[-1] + 1))
    assert (await house.engine.api.get(job.job_id)).version == moves[-1]


@at_home
async def test_a_submission_whose_answer_is_lost_is_one_job(house: House) -> None:
    for requests in ([a_job()], [a_job(), a_job()]):
        before = len(await house.engine.api.find(JobQuery()))
        way = Breaking(house.engine.url, posts=2)
        async with way as url:
            api = http_engine_api(url, house.token)
            await api.connect()
            jobs = await api.submit(requests)
            await api.close()
        assert way.posted == 3
        found = await house.engine.api.find(JobQuery())
        assert len(found) == before + len(requests)
        assert {job.job_id for job in jobs} <= {job.job_id for job in found}


@at_home
async def test_what_is_not_safe_to_repeat_is_sent_once(house: House) -> None:
    (job,) = await house.engine.api.submit([a_job(topic="job.text.fail", context_ptr="")])
    await house.engine.api.wait(job.job_id, 20)
    way = Breaking(house.engine.url, posts=1)
    async with way as url:
        api = http_engine_api(url, house.token)
        await api.connect()
        with pytest.raises(EngineUnavailable, match="may have been done"):
            await api.retry(job.job_id)
        await api.close()
    assert way.posted == 1


@at_home
async def test_the_key_goes_to_no_other_place(house: House) -> None:
    elsewhere: list[bytes] = []

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        elsewhere.append(await reader.read(65536))
        writer.close()

    async def send_away(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        port = other.sockets[0].getsockname()[1]
        writer.write(
            b"HTTP/1.1 307 Away\r\nLocation: http://127.0.0.1:%d/\r\nContent-Length: 0\r\n\r\n"
            % port
        )
        await writer.drain()
        writer.close()

    other = await asyncio.start_server(take, "127.0.0.1", 0)
    server = await asyncio.start_server(send_away, "127.0.0.1", 0)
    api = http_engine_api(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", house.token)
    with pytest.raises(Unavailable, match="307"):
        await api.connect()
    server.close()
    other.close()
    assert elsewhere == []


@pytest.mark.parametrize(
    "url", ["jobs.example.org", "ftp://x", "http://", "http://key@host", "http://host/?a=b"]
)
def test_what_is_no_url_of_an_engine_is_refused(url: str) -> None:
    with pytest.raises(Misconfigured):
        http_engine_api(url, "token")


def test_a_blocking_client_works_by_url(tmp_path: Path) -> None:
    app = App()

    @app.job("job.text.shout")
    def shout(text: str) -> str:
        return text.upper()

    with app.run(data=tmp_path, http__listen="127.0.0.1:0") as inside:
        token = (tmp_path / "token").read_text().strip()
        with penstock.connect(inside.url, token=token) as client:
            handle = client.submit("job.text.shout", {"text": "hello"})
            assert handle.result(timeout=20) == "HELLO"
            assert client.status().version == penstock.__version__


@run_async
async def test_a_reader_of_events_outlives_the_engine(tmp_path: Path) -> None:
    async with a_house(tmp_path) as house:
        where, token = house.engine.url.removeprefix("http://"), house.token
        api = http_engine_api(house.engine.url, token)
        await api.connect()
        batches = journal(api, 0)
        (job,) = await api.submit([a_job()])
        seen = await until(batches, ends=1)
    waiting = asyncio.create_task(until(batches, ends=1))
    await asyncio.sleep(0.2)
    assert not waiting.done()
    async with a_house(tmp_path, http__listen=where) as house:
        (after,) = await house.engine.api.submit([a_job()])
        seen += await waiting
        assert seen == await house.engine.store.events(0, 1000)
        assert {event.transition.job_id for event in seen} == {job.job_id, after.job_id}
        assert (await api.wait(after.job_id, 20)).state is JobState.SUCCEEDED
        await batches.aclose()  # type: ignore[attr-defined]
        await api.close()


@run_async
async def test_a_stream_whose_engine_does_not_come_back_says_so(tmp_path: Path) -> None:
    async with a_house(tmp_path) as house:
        options = ConnectionOptions(reconnect_timeout=0.3)
        api = http_engine_api(house.engine.url, house.token, options=options)
        await api.connect()
        batches = journal(api)
        await anext(batches)
    with pytest.raises(EngineUnavailable, match=r"no engine answers at .*, tried for"):
        while True:
            await anext(batches)
    await api.close()


@at_home
async def test_a_stream_ends_with_its_key(house: House) -> None:
    made = await house.engine.api.keys.create("ci", (KeyRole.SUBMIT,))
    async with house.http(made.token) as api:
        batches = journal(api)
        await anext(batches)
        await house.engine.api.keys.revoke("ci")
        with pytest.raises(NotAuthenticated):
            while True:
                await anext(batches)


def certificate(folder: Path) -> tuple[Path, Path]:
    key, cert = folder / "key.pem", folder / "cert.pem"
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    about = ["-nodes", "-days", "2", "-subj", "/CN=x", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(cert)]
    subprocess.run([*new, *about, *files], check=True, capture_output=True)
    return key, cert


@run_async
async def test_an_engine_is_trusted_by_its_certificate_only(tmp_path: Path) -> None:
    key, cert = certificate(tmp_path)
    tls = {"http__certificate": str(cert), "http__private_key": str(key)}
    async with a_house(tmp_path, **tls) as house:
        assert house.engine.url.startswith("https://")
        with pytest.raises(Misconfigured, match="can't be trusted"):
            await http_engine_api(house.engine.url, house.token).connect()
        api = http_engine_api(
            house.engine.url, house.token, options=ConnectionOptions(ca_file=cert)
        )
        await api.connect()
        (job,) = await api.submit([a_job()])
        assert (await api.wait(job.job_id, 20)).state is JobState.SUCCEEDED
        await api.close()
    options = ConnectionOptions(ca_file=tmp_path / "none.pem")
    with pytest.raises(Misconfigured, match="can't use the certificates"):
        await http_engine_api("https://127.0.0.1:1", options=options).connect()


@at_home
async def test_figures_are_for_operators_of_the_whole_engine(house: House) -> None:
    api = house.engine.api
    ops = await api.keys.create("ops", (KeyRole.OPERATE,))
    theirs = await api.keys.create("acme", (KeyRole.OPERATE,), tenant="acme")
    submits = await api.keys.create("ci", (KeyRole.SUBMIT,))
    async with aiohttp.ClientSession(house.engine.url) as session:

        async def scrape(token: str) -> tuple[int, str]:
            headers = {"Authorization": f"Bearer {token}"}
            async with session.get("/metrics", headers=headers) as response:
                return response.status, await response.text()

        for made in (theirs, submits):
            assert (await scrape(made.token))[0] == 403
        await scrape(ops.token)
        status, text = await scrape(ops.token)
    assert status == 200
    assert 'penstock_http_requests_total{method="GET",route="/metrics",status="403"} 2.0' in text
    assert 'penstock_http_requests_total{method="GET",route="/metrics",status="200"} 1.0' in text
    assert f'penstock_build_info{{durability="os",version="{penstock.__version__}"}} 1.0' in text
    assert 'penstock_jobs{state="RUNNING"} 0.0' in text


@at_home
async def test_a_stream_can_not_begin_where_there_is_nothing(house: House) -> None:
    async with aiohttp.ClientSession(house.engine.url) as session:
        for last in ("x", "-1", "9" * 60, "1-1"):
            headers = {"Authorization": f"Bearer {house.token}", "Last-Event-ID": last}
            async with session.get("/v1/stream", headers=headers) as response:
                assert response.status == 422
                assert (await response.json())["field"] == "after"
