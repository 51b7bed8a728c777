"""Runs that are ended from outside: cancelled, given up, interrupted, or out of time."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace
from tests.support.pipeline.pipeline_jobs import on_virtual_time
from tests.support.pipeline.pipeline_runs import Place, reasons, stage_of, statuses, turns, within
from tests.support.waiting import soon

from penstock.core.job import Cancelled, Retry
from penstock.lifecycles.canonical import JobState
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.executor import Interrupted
from penstock.testing.aio import run_async
from penstock.testing.clock import LoopClock
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.records import (
    STALE_MESSAGE,
    ErrorClass,
    ItemOutcome,
    ItemRecord,
    PipelineEventKind,
    StageStatus,
)
from penstock.workloads.pipeline.stage_run import Stop

_S = PipelineJobStatus


def never() -> tuple[Stop, str]:
    """For runs whose tasks nobody cancels."""
    raise AssertionError


class Config(Struct):
    numbers: tuple[int, ...] = (1, 2, 3, 4, 5, 6)


def _slow(seconds: float = 10.0, **options: Any) -> tuple[Definition, list[Any]]:
    """Two items at once, each of which takes its time, and a step that follows."""
    one, seen = Definition("slow", config=Config, **options), []

    @one.map(over="numbers", concurrency=2)
    async def slow(number: int, ctx: Any) -> int:
        seen.append(("begun", number))
        try:
            await asyncio.sleep(seconds)
            seen.append(("ended", number))
            return number
        except asyncio.CancelledError:
            seen.append(("cancelled", number))
            raise

    @one.step()
    async def after(results: Any) -> int:
        seen.append(("after", 0))
        return 1

    return one, seen


# -- cancel -----------------------------------------------------------------------


@pytest.mark.seed("002", "4.3", "7.9")
@on_virtual_time
async def test_async_items_are_cancelled_a_moment_after_they_were_asked() -> None:
    place = Place()
    one, seen = _slow(cancel_grace=4.0)
    attempt = await place.begin(one)
    await asyncio.sleep(15)  # two have ended, two run
    asked = place.clock.now()
    attempt.cancel_run()
    ended = await attempt.task
    assert place.clock.now() - asked == pytest.approx(0.25)
    assert ended.status is _S.CANCELLED
    assert [number for what, number in seen if what == "begun"] == [1, 2, 3, 4]
    assert [number for what, number in seen if what == "cancelled"] == [3, 4]
    items = await place.items("slow")
    assert [item.outcome for item in items] == [
        *[ItemOutcome.OK] * 2,
        *[ItemOutcome.FAILED] * 2,
        *[ItemOutcome.PENDING] * 2,
    ]
    assert items[2].error_class is ErrorClass.CANCELLED
    assert statuses(ended) == {"slow": "partial", "after": "skipped"}
    assert reasons(ended) == {"slow": "cancelled", "after": "cancelled"}
    assert [(e.stage, e.message, e.code) for e in ended.errors] == [("slow", "enough", "CANCELLED")]
    assert ended.summary is not None
    assert ended.summary.status is _S.CANCELLED
    assert ended.abandoned_items == ()


@on_virtual_time
async def test_an_item_that_finishes_within_that_moment_is_kept() -> None:
    place = Place()
    one, seen = _slow(cancel_grace=4.0)
    attempt = await place.begin(one)
    await asyncio.sleep(9.9)
    attempt.cancel_run()
    ended = await attempt.task
    assert stage_of(ended, "slow").ok == 2
    assert ("cancelled", 1) not in seen
    assert ended.status is _S.CANCELLED


@pytest.mark.seed("002", "7.9")
@on_virtual_time
async def test_an_item_that_looks_at_its_token_stops_by_itself() -> None:
    one = Definition("one", cancel_grace=60.0)

    @one.step()
    async def polite(results: Any, ctx: Any) -> int:
        while True:
            ctx.check()
            await asyncio.sleep(1)

    place = Place()
    attempt = await place.begin(one)
    await asyncio.sleep(5)
    asked = place.clock.now()
    attempt.cancel_run()
    ended = await attempt.task
    assert place.clock.now() - asked <= 1.0
    assert ended.status is _S.CANCELLED
    assert (await place.items("polite"))[0].error == "enough"


@on_virtual_time
async def test_a_stop_before_the_run_ends_it_before_its_first_stage() -> None:
    place = Place()
    one, seen = _slow()
    await place.create(one)
    orchestrator = await place.orchestrator(one)
    orchestrator.stop(Stop.CANCEL, "never mind")
    ended = await orchestrator.run(never)
    assert (ended.status, seen) == (_S.CANCELLED, [])
    assert statuses(ended) == {"slow": "skipped", "after": "skipped"}


@pytest.mark.seed("002", "7.7")
@run_async
async def test_threads_are_told_and_waited_for() -> None:
    one, begun = Definition("one", config=Config, cancel_grace=20.0), threading.Event()

    @one.map(over="numbers", concurrency=1)
    def polite(number: int, ctx: Any) -> int:
        begun.set()
        assert ctx.cancel.wait(20)
        raise Cancelled(ctx.cancel.reason)

    place = Place()
    attempt = await place.begin(one)
    await soon(begun.is_set)
    attempt.cancel_run()
    ended = await within(10, attempt.task)
    assert ended.status is _S.CANCELLED
    assert ended.abandoned_items == ()
    items = await place.items("polite")
    assert (items[0].error_class, items[1].outcome) == (
        ErrorClass.CANCELLED,
        ItemOutcome.PENDING,
    )


@pytest.mark.seed("002", "7.7")
@run_async
async def test_a_thread_that_does_not_stop_is_abandoned_and_the_record_says_which() -> None:
    one, begun = Definition("one", config=Config, cancel_grace=0.05), threading.Event()
    release = threading.Event()

    @one.map(over="numbers", key=lambda number: f"n{number}", concurrency=1)
    def deaf(number: int, ctx: Any) -> int:
        begun.set()
        release.wait(20)
        return number

    place = Place()
    attempt = await place.begin(one)
    await soon(begun.is_set)
    attempt.cancel_run()
    ended = await within(10, attempt.task)
    assert ended.status is _S.CANCELLED
    assert ended.abandoned_items == ("deaf/n1",)
    release.set()
    await asyncio.sleep(0.05)
    assert await place.record() == ended  # what it gave comes too late


def _deaf(release: asyncio.Event, timeout: float | None = None, **options: Any) -> Definition:
    one = Definition("one", **options)

    @one.step(timeout=timeout)
    async def deaf(results: Any) -> int:
        while not release.is_set():
            with suppress(asyncio.CancelledError):
                await release.wait()
        return 1

    return one


@pytest.mark.parametrize("timeout", [None, 1000.0])
@on_virtual_time
async def test_an_async_item_that_does_not_stop_is_abandoned(timeout: float | None) -> None:
    place, release = Place(), asyncio.Event()
    attempt = await place.begin(_deaf(release, timeout, cancel_grace=4.0))
    await asyncio.sleep(1)
    asked = place.clock.now()
    attempt.cancel_run()
    ended = await attempt.task
    assert place.clock.now() - asked == pytest.approx(4.0)
    assert (ended.status, ended.abandoned_items) == (_S.CANCELLED, ("deaf/",))
    release.set()
    await turns()


@on_virtual_time
async def test_an_item_that_waits_for_its_next_try_stops_at_once() -> None:
    one = Definition("one")

    @one.step(retry=Retry(5, delay=1000, jitter=0.0, max_delay=1000))
    async def failing(results: Any) -> int:
        raise ConnectionError("no")

    place = Place()
    attempt = await place.begin(one)
    await asyncio.sleep(5)
    asked = place.clock.now()
    attempt.cancel_run()
    ended = await attempt.task
    assert place.clock.now() == pytest.approx(asked)
    assert ended.status is _S.CANCELLED
    (item,) = await place.items("failing")
    assert (item.attempts, item.error_class) == (1, ErrorClass.CANCELLED)


@on_virtual_time
async def test_a_source_that_is_being_asked_is_cancelled() -> None:
    one, stopped = Definition("one"), []

    async def endless() -> Any:
        try:
            while True:
                await asyncio.sleep(1)
                yield 1
        finally:
            stopped.append(True)

    @one.map(over=endless)
    async def same(number: int) -> int:
        return number

    place = Place(page=3)
    attempt = await place.begin(one)
    await asyncio.sleep(10)
    attempt.cancel_run()
    ended = await attempt.task
    await turns()
    assert (ended.status, stopped) == (_S.CANCELLED, [True])
    assert stage_of(ended, "same").listed is False


# -- the others -------------------------------------------------------------------


@on_virtual_time
async def test_a_run_that_is_given_up_fails_with_the_reason() -> None:
    place = Place()
    one, _ = _slow()
    attempt = await place.begin(one)
    await asyncio.sleep(15)
    attempt.stop(JobState.TIMEOUT, STALE_MESSAGE)
    ended = await attempt.task
    assert ended.status is _S.FAILED
    assert ended.errors[-1].message == STALE_MESSAGE
    assert ended.summary is not None
    assert (await place.events())[-1].kind is PipelineEventKind.JOB_COMPLETE


@on_virtual_time
async def test_an_interrupted_run_stays_running_and_is_gone_on_with() -> None:
    place = Place()
    one, seen = _slow()
    attempt = await place.begin(one)
    await asyncio.sleep(15)
    attempt.stop(JobState.FAILED, "the worker stops")
    with pytest.raises(Interrupted):
        await attempt.task
    assert (await place.record()).status is _S.RUNNING
    assert [item.outcome for item in await place.items("slow")] == [
        *[ItemOutcome.OK] * 2,
        *[ItemOutcome.PENDING] * 4,
    ]
    seen.clear()
    ended = await place.go_on(one)
    assert ended.status is _S.COMPLETED
    assert [number for what, number in seen if what == "begun"] == [3, 4, 5, 6]


@on_virtual_time
async def test_a_stage_out_of_time_ends_with_what_it_has() -> None:
    one, cancelled = Definition("one", config=Config), []

    @one.map(over="numbers", concurrency=2, stage_timeout=15.0)
    async def slow(number: int) -> int:
        try:
            await asyncio.sleep(10)
        except asyncio.CancelledError:
            cancelled.append(number)
            raise
        return number

    @one.step()
    async def after(results: Any) -> int:
        return results.count  # type: ignore[no-any-return]

    place = Place(page=2)
    began = place.clock.now()
    ended = await place.run(one)
    assert place.clock.now() - began == pytest.approx(15.0)
    assert cancelled == [3, 4]
    items = await place.items("slow")
    assert [item.error_class for item in items] == [None] * 2 + [ErrorClass.TIMEOUT] * 4
    assert "took longer than 15 s" in items[5].error
    stage = stage_of(ended, "slow")
    assert (stage.status, stage.ok, stage.failed, stage.done) == (StageStatus.PARTIAL, 2, 4, 6)
    assert await place.outputs("after") == [2]


@on_virtual_time
async def test_a_run_that_gets_nowhere_is_found_out() -> None:
    one = Definition("one", stale_after=100.0)

    @one.step()
    async def hangs(results: Any) -> int:
        await asyncio.Event().wait()
        return 1

    place = Place()
    began = place.clock.now()
    ended = await place.run(one)
    assert ended.status is _S.FAILED
    assert [error.message for error in ended.errors] == [STALE_MESSAGE]
    assert 100 < place.clock.now() - began <= 160


@pytest.mark.parametrize("timeout", [None, 1000.0])
@on_virtual_time
async def test_a_long_call_that_reports_or_has_a_longer_limit_is_let_be(
    timeout: float | None,
) -> None:
    one = Definition("one", stale_after=100.0)

    @one.step(timeout=timeout)
    async def long(results: Any, ctx: Any) -> int:
        for _ in range(20):
            await asyncio.sleep(40)
            if timeout is None:
                ctx.progress(0.5, "still here")
        return 1

    place = Place()
    ended = await place.run(one)
    assert ended.status is _S.COMPLETED


@on_virtual_time
async def test_a_job_may_have_a_limit_of_its_own() -> None:
    place = Place()
    one, _ = _slow(timeout=12.0)
    ended = await place.run(one)
    assert ended.status is _S.FAILED
    assert "longer than its 12 s" in ended.errors[-1].message


@pytest.mark.parametrize("jump", [7200.0, -7200.0])
@on_virtual_time
async def test_a_jobs_limit_does_not_depend_on_who_sets_the_clock(jump: float) -> None:
    one, clock = Definition("one", timeout=100.0), LoopClock(asyncio.get_running_loop())

    @one.step()
    async def long(results: Any, ctx: Any) -> None:
        await asyncio.sleep(10)
        clock.jump(jump)
        await asyncio.sleep(80 if jump > 0 else 200)

    ended = await Place(clock=clock).run(one)
    assert ended.status is (_S.COMPLETED if jump > 0 else _S.FAILED)


# -- distributed -----------------------------------------------------------------------


class Elsewhere:
    """Stands for workers that run items as jobs of their own."""

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds, self.stopped = seconds, asyncio.Event()
        self.ran: list[Any] = []

    async def run(
        self, stage: Any, record: Any, item: ItemRecord, output_counts: Any
    ) -> tuple[ItemRecord, None]:
        sleep = asyncio.ensure_future(asyncio.sleep(self.seconds))
        stop = asyncio.ensure_future(self.stopped.wait())
        await asyncio.wait((sleep, stop), return_when=asyncio.FIRST_COMPLETED)
        sleep.cancel()
        stop.cancel()
        self.ran.append(item.key)
        if self.stopped.is_set():
            ended = replace(item, outcome=ItemOutcome.FAILED, error_class=ErrorClass.CANCELLED)
        else:
            ended = replace(item, outcome=ItemOutcome.OK, output=item.input, output_count=1)
        return replace(ended, attempts=1), None

    async def stop(self, stage: Any, reason: str) -> None:
        self.stopped.set()


def _distributed() -> Definition:
    one = Definition("one", config=Config)

    @one.map(over="numbers", concurrency=3, distributed=True)
    async def far(number: int) -> int:
        raise AssertionError("it runs elsewhere")

    @one.map(over=far)
    async def near(number: int) -> int:
        return number

    return one


@on_virtual_time
async def test_items_of_a_distributed_stage_run_elsewhere_so_many_at_once() -> None:
    place, one, elsewhere = Place(), _distributed(), Elsewhere()
    await place.create(one)
    began = place.clock.now()
    ended = await (await place.orchestrator(one, distributed=elsewhere)).run(never)
    assert ended.status is _S.COMPLETED
    assert place.clock.now() - began == pytest.approx(2.0)
    assert await place.outputs("near") == [1, 2, 3, 4, 5, 6]


@on_virtual_time
async def test_a_cancel_stops_what_runs_elsewhere() -> None:
    place, one, elsewhere = Place(), _distributed(), Elsewhere(1000)
    await place.create(one)
    orchestrator = await place.orchestrator(one, distributed=elsewhere)
    running = asyncio.ensure_future(orchestrator.run(never))
    await asyncio.sleep(5)
    asked = place.clock.now()
    orchestrator.stop(Stop.CANCEL, "enough")
    ended = await running
    assert ended.status is _S.CANCELLED
    assert place.clock.now() == pytest.approx(asked)
    assert elsewhere.ran == ["0", "1", "2"]
