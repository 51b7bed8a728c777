"""Recurring jobs: when they are submitted, what becomes of missed times, and of trouble."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tests.support.ledgers import MemoryLedger

from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.control.gateway import Gateway
from penstock.control.guard import Guard, Uploads
from penstock.control.open_jobs import OpenJobs
from penstock.control.schedules import MOST_MISSED, ScheduleRunner, ScheduleService, due_times
from penstock.control.workers import Pool, Roster
from penstock.core.calendar import Calendar
from penstock.core.errors import (
    InvalidRequest,
    NotFound,
    NotPermitted,
    PenstockError,
    StoreFailed,
    TooMany,
)
from penstock.core.job import Job, JobRequest, Unique
from penstock.lifecycles.canonical import JobEvent
from penstock.ports.engine_api import Caller, CatchUp, KeyRole, Schedule
from penstock.ports.store import JobQuery
from penstock.testing.aio import run_async
from penstock.testing.clock import VirtualClock
from penstock.testing.samples import a_request, failed, move, succeeded

NOON = 1_767_268_800.0
"""2026-01-01T12:00:00Z"""
HOUR = 3600.0
_E = JobEvent


class FlakyStore(MemoryLedger):
    """Refuses to remember as often as it is told to."""

    refusals = 0

    async def remember(self, name: str, value: bytes) -> None:
        if self.refusals:
            self.refusals -= 1
            raise StoreFailed("the disk is full")
        await super().remember(name, value)


class Engine:
    """A runner with a real gateway, and a clock that stands still."""

    def __init__(self, store: FlakyStore | None = None, clock: VirtualClock | None = None) -> None:
        self.store, self.clock = store or FlakyStore(), clock or VirtualClock(NOON)
        open_jobs = OpenJobs(Roster({"p": Pool("p", topics=("job.test*",))}), self.clock.now)
        self.gateway = Gateway(self.store, MemoryBlobs(), open_jobs, self.clock)
        self.submitted: list[JobRequest] = []
        self.trouble: list[PenstockError | Exception] = []
        self.runner = ScheduleRunner(self.store, self.submit, self.clock)

    @property
    def api(self) -> ScheduleService:
        return self.api_of("ada")

    def api_of(self, principal: str) -> ScheduleService:
        guard = Guard(Caller(principal, frozenset(KeyRole)), self.store, self.clock)
        return ScheduleService(self.runner, guard, Uploads(self.store, self.clock, None))

    async def submit(self, requests: Sequence[JobRequest]) -> list[Job]:
        self.submitted += requests
        if self.trouble:
            raise self.trouble.pop(0)
        return await self.gateway.submit(requests)

    async def put(self, name: str = "s", cron: str = "0 * * * *", **fields: Any) -> None:
        request = fields.pop("request", a_request("", topic="job.test"))
        await self.api.put(Schedule(name=name, cron=cron, request=request, **fields))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        await self.runner.restore()
        service = asyncio.ensure_future(self.runner.run())
        await settle()
        try:
            yield
        finally:
            service.cancel()
            await asyncio.gather(service, return_exceptions=True)

    async def later(self, seconds: float) -> None:
        """Let time pass, and everybody who is woken by it act."""
        end = self.clock.monotonic() + seconds
        while (left := end - self.clock.monotonic()) > 0:
            wake = self.clock.next_wake()
            self.clock.advance(left if wake is None else min(left, max(wake, 0.001)))
            await settle()

    async def jobs(self) -> list[Job]:
        found = await self.store.find(JobQuery(limit=100_000))
        return sorted(found, key=lambda job: job.seq)

    async def fired(self) -> list[str]:
        """The times, without the day, for which there are jobs."""
        keys = [job.request.idempotency_key or "by hand" for job in await self.jobs()]
        return [key.removeprefix("schedule:s:2026-01-") for key in keys]

    def restarted(self) -> Engine:
        return Engine(self.store, self.clock)

    async def end(self, job_id: str, **fields: Any) -> None:
        events = (_E.SCHEDULE, _E.DISPATCH, _E.START)
        changes = [move(job_id, event) for event in events]
        done = fields.pop("done", move(job_id, _E.SUCCEED, result=succeeded(job_id)))
        assert all(answer.moved for answer in await self.store.apply([*changes, done]))


async def settle() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


# -- firing -------------------------------------------------------------------------


@run_async
async def test_it_submits_its_job_at_each_of_its_times() -> None:
    engine = Engine()
    await engine.put(request=a_request("", labels={"k": "v"}), tenant="acme")
    async with engine.running():
        await engine.later(HOUR - 1)
        assert await engine.jobs() == []
        await engine.later(1)
        (job,) = await engine.jobs()
        await engine.later(2 * HOUR)
    assert job.request.job_id
    assert job.request.idempotency_key == "schedule:s:2026-01-01T13:00:00Z"
    assert (job.request.schedule, job.request.principal) == ("s", "ada")
    assert (job.request.tenant, job.request.labels) == ("acme", {"k": "v"})
    assert await engine.fired() == ["01T13:00:00Z", "01T14:00:00Z", "01T15:00:00Z"]


@run_async
async def test_its_view_tells_what_was_and_what_comes() -> None:
    engine = Engine()
    await engine.put()
    fresh = await engine.api.get("s")
    assert (fresh.next_at, fresh.last_at, fresh.last_job_id) == (NOON + HOUR, None, None)
    async with engine.running():
        await engine.later(HOUR + 5)
    view = await engine.api.get("s")
    (job,) = await engine.jobs()
    assert (view.last_at, view.last_job_id, view.fired) == (NOON + HOUR, job.job_id, 1)
    assert (view.next_at, view.problem) == (NOON + 2 * HOUR, "")


@run_async
async def test_with_nothing_to_fire_it_sleeps_until_something_changes() -> None:
    engine = Engine()
    async with engine.running():
        assert engine.clock.next_wake() is None
        await engine.put(cron="0 0 1 1 *")
        await settle()
        assert engine.clock.next_wake() == 60.0  # a look at the clock, which may be set
        await engine.put(cron="*/20 * * * * *")
        await settle()
        assert engine.clock.next_wake() == 20.0
        await engine.api.pause("s")
        await settle()
        assert engine.clock.next_wake() is None


@run_async
async def test_two_tenants_schedules_of_one_name_are_two() -> None:
    engine = Engine()
    await engine.put(tenant="acme")
    await engine.put(tenant="umbrella", cron="30 * * * *")
    async with engine.running():
        await engine.later(HOUR)
    assert [job.request.tenant for job in await engine.jobs()] == ["umbrella", "acme"]
    await engine.api.delete("s", "acme")
    assert [view.schedule.tenant for view in await engine.api.list()] == ["umbrella"]


@run_async
async def test_changing_it_keeps_its_past_and_changes_what_comes() -> None:
    engine = Engine()
    await engine.put()
    async with engine.running():
        await engine.later(HOUR)
        await engine.put(cron="30 * * * *", request=a_request("", topic="job.test.other"))
        await engine.later(HOUR)
    assert await engine.fired() == ["01T13:00:00Z", "01T13:30:00Z"]
    assert (await engine.jobs())[-1].request.topic == "job.test.other"
    assert (await engine.api.get("s")).fired == 2


@run_async
async def test_a_paused_one_fires_nothing_and_owes_nothing_for_the_pause() -> None:
    engine = Engine()
    await engine.put(catch_up=CatchUp.ALL)
    async with engine.running():
        await engine.api.pause("s")
        assert (await engine.api.get("s")).next_at is None
        await engine.later(5 * HOUR)
        await engine.api.pause("s", paused=False)
        await engine.later(HOUR)
    assert await engine.fired() == ["01T18:00:00Z"]


@run_async
async def test_a_pause_survives_a_restart() -> None:
    engine = Engine()
    await engine.put(catch_up=CatchUp.ALL)
    await engine.api.pause("s")
    engine = engine.restarted()
    async with engine.running():
        await engine.later(5 * HOUR)
    assert await engine.fired() == []


@run_async
async def test_firing_by_hand_is_besides_its_times_and_in_the_name_of_who_did() -> None:
    engine = Engine()
    await engine.put()
    one = await engine.api_of("bob").fire("s")
    two = await engine.api_of("bob").fire("s")
    assert one.job_id != two.job_id
    assert (one.request.principal, one.request.schedule) == ("bob", "s")
    async with engine.running():
        await engine.later(HOUR)
    assert await engine.fired() == ["by hand", "by hand", "01T13:00:00Z"]
    assert (await engine.jobs())[-1].request.principal == "ada"


@run_async
async def test_firing_by_hand_tells_why_it_was_refused() -> None:
    engine = Engine()
    await engine.put(request=a_request("", topic="job.unknown"))
    with pytest.raises(InvalidRequest, match="serves"):
        await engine.api_of("bob").fire("s")


@run_async
async def test_what_was_deleted_stays_deleted() -> None:
    engine = Engine()
    await engine.put()
    async with engine.running():
        await engine.api.delete("s")
        await engine.later(2 * HOUR)
    assert await engine.fired() == []
    assert await engine.store.recall_all("schedule/") == {}
    with pytest.raises(NotFound, match="'s'"):
        (await engine.api.get("s"))
    for missing in (engine.api.delete, engine.api.pause):
        with pytest.raises(NotFound, match="'s'"):
            await missing("s")


@run_async
async def test_one_deleted_while_it_fires_does_not_come_back() -> None:
    engine = Engine()
    reached, gate = asyncio.Event(), asyncio.Event()
    submit = engine.submit

    async def slow(requests: Sequence[JobRequest]) -> list[Job]:
        reached.set()
        await gate.wait()
        return await submit(requests)

    engine.runner = ScheduleRunner(engine.store, slow, engine.clock)
    await engine.put(catch_up=CatchUp.ALL)
    async with engine.running():
        engine.clock.advance(3 * HOUR)
        await reached.wait()
        deleting = asyncio.ensure_future(engine.api.delete("s"))
        await settle()
        gate.set()
        await deleting
        await engine.later(2 * HOUR)
    assert await engine.store.recall_all("schedule/") == {}
    assert await engine.fired() == ["01T13:00:00Z"]


@run_async
async def test_one_deleted_while_its_missed_times_are_left_out_does_not_come_back() -> None:
    engine = Engine()
    await engine.put(catch_up=CatchUp.SKIP)
    forget, gate = engine.store.forget, asyncio.Event()

    async def slow(name: str) -> bool:
        await gate.wait()
        return await forget(name)

    engine.store.forget = slow  # type: ignore[method-assign]
    async with engine.running():
        deleting = asyncio.ensure_future(engine.api.delete("s"))
        await settle()
        engine.clock.advance(3.5 * HOUR)
        await settle()
        gate.set()
        await deleting
        await settle()
    assert await engine.store.recall_all("schedule/") == {}


# -- no time twice ------------------------------------------------------------------


@run_async
async def test_a_crash_between_submitting_and_remembering_fires_no_time_twice() -> None:
    engine = Engine()
    await engine.put()
    async with engine.running():
        engine.store.refusals = 1_000_000
        await engine.later(HOUR)
        assert "disk is full" in (await engine.api.get("s")).problem
    engine.store.refusals = 0
    engine = engine.restarted()
    async with engine.running():
        await engine.later(60)
    assert await engine.fired() == ["01T13:00:00Z"]
    view = await engine.api.get("s")
    assert (view.fired, view.problem) == (1, "")


@run_async
async def test_what_was_submitted_before_a_change_is_not_submitted_again_after_it() -> None:
    engine = Engine()
    await engine.put()
    async with engine.running():
        engine.store.refusals = 1_000_000
        await engine.later(HOUR)
    engine.store.refusals = 0
    engine = engine.restarted()
    await engine.runner.restore()
    await engine.put(request=a_request("", topic="job.test.other"))
    async with engine.running():
        await engine.later(60)
    (job,) = await engine.jobs()
    assert job.request.topic == "job.test"
    view = await engine.api.get("s")
    assert (view.last_job_id, view.problem) == (job.job_id, "")


@run_async
async def test_a_clock_that_is_set_back_repeats_nothing() -> None:
    engine = Engine()
    await engine.put()
    async with engine.running():
        await engine.later(2 * HOUR)
        engine.clock.jump(-2 * HOUR)
        await engine.later(2 * HOUR)
        assert await engine.fired() == ["01T13:00:00Z", "01T14:00:00Z"]
        assert len(engine.submitted) == 2
        await engine.later(HOUR)
    assert (await engine.fired())[2:] == ["01T15:00:00Z"]


@run_async
async def test_a_clock_that_was_far_ahead_is_told_and_a_pause_mends_it() -> None:
    engine = Engine()
    engine.clock.jump(10_000 * HOUR)
    await engine.put()
    engine.clock.jump(-10_000 * HOUR)
    assert "set back" in (await engine.api.get("s")).problem
    await engine.api.pause("s")
    view = await engine.api.pause("s", paused=False)
    assert (view.next_at, view.problem) == (NOON + HOUR, "")


# -- missed times -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("catch_up", "made_up"),
    [
        (CatchUp.SKIP, []),
        (CatchUp.LAST, ["01T15:00:00Z"]),
        (CatchUp.ALL, ["01T13:00:00Z", "01T14:00:00Z", "01T15:00:00Z"]),
    ],
)
@run_async
async def test_what_was_missed_while_no_engine_ran(catch_up: CatchUp, made_up: list[str]) -> None:
    engine = Engine()
    await engine.put(catch_up=catch_up)
    engine.clock.advance(3.5 * HOUR)
    engine = engine.restarted()
    async with engine.running():
        assert await engine.fired() == made_up
        await engine.later(HOUR)
    assert await engine.fired() == [*made_up, "01T16:00:00Z"]
    engine = engine.restarted()
    async with engine.running():
        await engine.later(60)
    assert await engine.fired() == [*made_up, "01T16:00:00Z"]


@pytest.mark.parametrize(
    ("catch_up", "made_up"),
    [
        (CatchUp.SKIP, []),
        (CatchUp.LAST, ["01T14:00:00Z"]),
        (CatchUp.ALL, ["01T13:00:00Z", "01T14:00:00Z"]),
    ],
)
@run_async
async def test_a_clock_that_is_set_forward_is_as_a_time_without_an_engine(
    catch_up: CatchUp, made_up: list[str]
) -> None:
    engine = Engine()
    await engine.put(catch_up=catch_up)
    async with engine.running():
        engine.clock.jump(2.5 * HOUR)
        await engine.later(60)
    assert await engine.fired() == made_up


@run_async
async def test_being_a_little_late_is_not_missing() -> None:
    engine = Engine()
    await engine.put(cron="*/10 * * * * *", catch_up=CatchUp.SKIP)
    async with engine.running():
        engine.clock.jump(25)
        await engine.later(10)
    assert await engine.fired() == [f"01T12:00:{second}0Z" for second in (1, 2, 3)]


@run_async
async def test_no_more_than_a_thousand_are_made_up_for_and_that_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine()
    await engine.put(cron="* * * * * *", catch_up=CatchUp.ALL)
    engine.clock.advance(40_000)
    engine = engine.restarted()
    with caplog.at_level(logging.WARNING):
        async with engine.running():
            for _ in range(200):
                await settle()
            jobs = await engine.jobs()
            problem = (await engine.api.get("s")).problem
    assert len(jobs) == MOST_MISSED
    keys = [job.request.idempotency_key or "" for job in jobs]
    assert keys == sorted(set(keys))
    assert keys[-1] == "schedule:s:2026-01-01T23:06:40Z"
    assert "more than 1000" in problem
    assert "oldest were dropped" in caplog.text


@run_async
async def test_making_up_for_much_keeps_nobody_else_waiting() -> None:
    engine = Engine()
    await engine.put("a", cron="* * * * * *", catch_up=CatchUp.ALL)
    engine.clock.advance(900)
    await engine.put("b", cron="0 * * * *", catch_up=CatchUp.ALL)
    engine.clock.advance(HOUR)
    engine = engine.restarted()
    async with engine.running():
        for _ in range(200):
            await settle()
    names = [job.request.schedule for job in await engine.jobs()]
    assert names.index("b") < 100
    assert len(names) > 900


# -- overlap ------------------------------------------------------------------------


@run_async
async def test_without_overlap_a_time_is_skipped_while_the_job_before_goes_on() -> None:
    engine = Engine()
    await engine.put(overlap=False)
    async with engine.running():
        await engine.later(2 * HOUR)
        assert await engine.fired() == ["01T13:00:00Z"]
        view = await engine.api.get("s")
        assert view.skipped == 1
        assert f"job {view.last_job_id}" in view.problem
        await engine.end((await engine.jobs())[0].job_id)
        await engine.later(HOUR)
    assert await engine.fired() == ["01T13:00:00Z", "01T15:00:00Z"]
    assert (await engine.api.get("s")).problem == ""


@run_async
async def test_a_retry_of_the_job_before_is_the_job_before() -> None:
    engine = Engine()
    await engine.put(overlap=False)
    async with engine.running():
        await engine.later(HOUR)
        (first,) = await engine.jobs()
        await engine.end(
            first.job_id, done=move(first.job_id, _E.FAIL, result=failed(first.job_id))
        )
        retried = await engine.gateway.retry(first.job_id)
        await engine.later(HOUR)
        assert retried.job_id in (await engine.api.get("s")).problem
        await engine.end(retried.job_id)
        await engine.later(HOUR)
    view = await engine.api.get("s")
    assert (view.fired, view.skipped) == (2, 1)


@run_async
async def test_a_job_that_has_its_unique_key_takes_the_place_of_a_firing() -> None:
    engine = Engine()
    (holder,) = await engine.gateway.submit([a_request("holder", unique=Unique("only"))])
    await engine.put(request=a_request("", unique=Unique("only")))
    async with engine.running():
        await engine.later(HOUR)
    assert [job.job_id for job in await engine.jobs()] == [holder.job_id]
    view = await engine.api.get("s")
    assert (view.fired, view.skipped) == (0, 1)
    assert "holder" in view.problem


# -- trouble ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [TooMany("the queue is full", retry_after=20.0), StoreFailed("the disk is full")],
)
@run_async
async def test_what_can_be_mended_by_waiting_is_tried_again(error: PenstockError) -> None:
    engine = Engine()
    await engine.put(catch_up=CatchUp.SKIP)
    engine.trouble = [error, error, error]
    async with engine.running():
        await engine.later(HOUR)
        assert await engine.fired() == []
        assert error.message in (await engine.api.get("s")).problem
        await engine.later(70)
    assert await engine.fired() == ["01T13:00:00Z"]
    assert (await engine.api.get("s")).problem == ""


@run_async
async def test_the_hint_of_when_to_try_again_is_heeded() -> None:
    engine = Engine()
    await engine.put()
    engine.trouble = [TooMany("the queue is full", retry_after=200.0)]
    async with engine.running():
        await engine.later(HOUR + 199)
        assert len(engine.submitted) == 1
        await engine.later(1)
    assert await engine.fired() == ["01T13:00:00Z"]


@run_async
async def test_what_waiting_does_not_mend_waits_for_the_next_time() -> None:
    engine = Engine()
    await engine.put()
    engine.trouble = [NotPermitted("no such topics for you")]
    async with engine.running():
        await engine.later(1.5 * HOUR)
        assert len(engine.submitted) == 1
        problem = (await engine.api.get("s")).problem
        assert problem == "refused for 2026-01-01T13:00:00Z: no such topics for you"
        await engine.later(HOUR)
    assert await engine.fired() == ["01T14:00:00Z"]


@run_async
async def test_a_topic_that_nobody_serves_is_tried_until_the_next_time_takes_over() -> None:
    engine = Engine()
    await engine.put(request=a_request("", topic="job.unknown"))
    async with engine.running():
        await engine.later(HOUR + 30)
        assert "job.unknown" in (await engine.api.get("s")).problem
        assert 2 <= len(engine.submitted) <= 6
        await engine.put(request=a_request("", topic="job.test"))
        await settle()
    assert await engine.fired() == ["01T13:00:00Z"]


@run_async
async def test_one_bad_schedule_does_not_stop_the_others(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = Engine()
    await engine.put("bad")
    await engine.put("s")
    engine.trouble = [ZeroDivisionError("a bug")]
    async with engine.running():
        await engine.later(HOUR)
        assert await engine.fired() == ["01T13:00:00Z"]
        assert "a bug" in (await engine.api.get("bad")).problem
        assert "Traceback" in caplog.text
        await engine.later(60)
    assert len(await engine.jobs()) == 2


@run_async
async def test_stored_schedules_that_can_not_be_read_harm_no_other() -> None:
    engine = Engine()
    await engine.put()
    facts = await engine.store.recall_all("schedule/")
    (fact,) = facts.values()
    await engine.store.remember("schedule/default/broken", b"{")
    mars = fact.replace(b'"s"', b'"mars"').replace(b'"UTC"', b'"Mars/Base"')
    await engine.store.remember("schedule/default/mars", mars)
    engine = engine.restarted()
    async with engine.running():
        await engine.later(HOUR)
    views = {view.schedule.name: view for view in await engine.api.list()}
    assert set(views) == {"s", "mars"}
    assert "Mars/Base" in views["mars"].problem
    assert views["mars"].next_at is None
    assert await engine.fired() == ["01T13:00:00Z"]


# -- bad input ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"name": ""}, "name"),
        ({"name": "a/b"}, "name"),
        ({"tenant": "a b"}, "tenant"),
        ({"cron": "61 * * * *"}, "cron"),
        ({"timezone": "Nowhere"}, "timezone"),
        ({"request": a_request("", topic="nope")}, "request.topic"),
        ({"request": a_request("", labels={"": "x"})}, "request.labels key ''"),
        ({"request": a_request("", timeout=-1.0)}, "request.timeout"),
        ({"request": a_request("", deadline=NOON + 1)}, "request.deadline"),
        ({"request": a_request("", run_at=NOON + 1)}, "request.run_at"),
        ({"request": a_request("", idempotency_key="k")}, "request.idempotency_key"),
    ],
)
@run_async
async def test_a_wrong_schedule_is_refused_by_field(fields: dict[str, Any], field: str) -> None:
    engine = Engine()
    with pytest.raises(InvalidRequest) as refused:
        await engine.put(**fields)
    assert refused.value.field == field
    assert await engine.api.list() == []


@run_async
async def test_a_change_that_was_not_stored_did_not_happen() -> None:
    engine = Engine()
    await engine.put()
    engine.store.refusals = 1
    with pytest.raises(StoreFailed):
        await engine.put(cron="30 * * * *")
    assert (await engine.api.get("s")).schedule.cron == "0 * * * *"


@run_async
async def test_the_inputs_of_jobs_to_come_are_known_to_who_prunes() -> None:
    engine = Engine()
    await engine.put(request=a_request("", context_ptr="penstock://blob"))
    assert [one.context_ptr for one in engine.runner.requests()] == ["penstock://blob"]


# -- owed, purely -------------------------------------------------------------------


def test_a_refused_time_is_missed_as_soon_as_a_newer_one_came() -> None:
    hourly = Calendar("0 * * * *")
    one, two = NOON + HOUR, NOON + 2 * HOUR
    alone = due_times(hourly, CatchUp.SKIP, NOON, one + 900, punctual=one + 840, tried=one)
    assert alone is not None
    assert alone.times == [one]
    overtaken = due_times(hourly, CatchUp.SKIP, NOON, two, punctual=two - 60, tried=one)
    assert overtaken is not None
    assert overtaken.times == [two]
