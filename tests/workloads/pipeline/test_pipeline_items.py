"""One item after the other, and so many at once: bounds, retries, time limits, breakers."""

from __future__ import annotations

import asyncio
import threading
from itertools import pairwise
from typing import Any

import pytest
from msgspec import Struct
from tests.support.pipeline.pipeline_jobs import on_virtual_time
from tests.support.pipeline.pipeline_runs import Place, stage_of, statuses

from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.core.errors import StoreFailed
from penstock.core.job import Retry
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.executor import CancelToken
from penstock.testing.aio import run_async
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.items import ItemRunner
from penstock.workloads.pipeline.records import BreakerState, ErrorClass, ItemOutcome, StageStatus
from penstock.workloads.pipeline.rows import listed_items

_S = PipelineJobStatus


class Config(Struct):
    numbers: tuple[int, ...] = (1, 2, 3)
    width: int = 4


class Crowd:
    """Counts how many are in it at once."""

    def __init__(self) -> None:
        self.now = self.most = self.came = 0

    async def stay(self, seconds: float) -> None:
        self.enter()
        await asyncio.sleep(seconds)
        self.now -= 1

    def enter(self) -> None:
        self.came += 1
        self.now += 1
        self.most = max(self.most, self.now)


# -- bounds -----------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 5, 20])
@on_virtual_time
async def test_as_many_items_run_at_once_as_the_stage_says_and_never_more(width: int) -> None:
    one, crowd = Definition("one", config=Config), Crowd()

    @one.map(over="numbers", concurrency=width)
    async def busy(number: int) -> None:
        await crowd.stay(1.0 + number % 3)

    await Place(page=7).run(one, {"numbers": list(range(40))})
    assert (crowd.most, crowd.came, crowd.now) == (width, 40, 0)


@on_virtual_time
async def test_the_bound_may_be_a_field_of_the_config() -> None:
    one, crowd = Definition("one", config=Config), Crowd()

    @one.map(over="numbers", concurrency="width")
    async def busy(number: int) -> None:
        await crowd.stay(1.0)

    await Place().run(one, {"numbers": list(range(20)), "width": 3})
    assert crowd.most == 3


@run_async
async def test_threads_are_bounded_too() -> None:
    one, lock = Definition("one", config=Config), threading.Lock()
    crowd, together = Crowd(), threading.Barrier(3)

    @one.map(over="numbers", concurrency=3)
    def busy(number: int) -> None:
        with lock:
            crowd.enter()
        together.wait(10)
        with lock:
            crowd.now -= 1

    ended = await Place().run(one, {"numbers": list(range(9))})
    assert ended.status is _S.COMPLETED
    assert crowd.most == 3


@on_virtual_time
async def test_calls_keep_to_the_rate_of_their_stage() -> None:
    one, at = Definition("one", config=Config), []

    @one.map(over="numbers", concurrency=5, rate=2.0)
    async def paced(number: int, ctx: Any) -> None:
        at.append(ctx.now())

    await Place().run(one, {"numbers": list(range(6))})
    gaps = [round(after - before, 3) for before, after in pairwise(at)]
    assert gaps == [0.5] * 5


@on_virtual_time
async def test_memory_holds_no_more_than_a_page_and_a_backlog() -> None:
    one = Definition("one")
    given = 0

    async def many() -> Any:
        nonlocal given
        for number in range(1000):
            given += 1
            yield number

    @one.map(over=many)
    async def same(number: int) -> int:
        return number

    place = Place(page=50, backlog=20)
    ended = await place.run(one)
    assert stage_of(ended, "same").ok == given == 1000
    sizes = []
    for rows in place.engine.messages:
        listed = [item for row in rows if row.name == "list/same/0" for item in listed_items(row)]
        sizes.append(len(listed) + len([row for row in rows if row.name == "item/same/0"]))
    assert max(sizes) <= 50
    assert sum(sizes) == 2000
    assert place.engine.read_rows < 2000  # pages of the list are not read over and over


# -- sources ----------------------------------------------------------------------


def _plain(config: Any, ctx: Any) -> list[int]:
    ctx.metric("asked")
    return [1, 2]


def _generator(config: Any) -> Any:
    yield from (1, 2)


async def _coroutine(config: Any, ctx: Any) -> list[int]:
    return [1, 2]


async def _async_generator(ctx: Any) -> Any:
    for number in (1, 2):
        yield number


@pytest.mark.parametrize("source", [_plain, _generator, _coroutine, _async_generator])
@run_async
async def test_items_come_from_any_kind_of_function(source: Any) -> None:
    one = Definition("one", config=Config)

    @one.map(over=source)
    async def same(number: int) -> int:
        return number

    place = Place()
    ended = await place.run(one)
    assert await place.outputs("same") == [1, 2]
    assert stage_of(ended, "same").metrics == ({"asked": 1} if source is _plain else {})


def _raises(config: Any) -> Any:
    yield 1
    raise OSError("the list is gone")


async def _no_list(config: Any) -> Any:
    return 5


@pytest.mark.seed("002", "7.16", "8.10")
@pytest.mark.parametrize(
    ("source", "key", "code", "message"),
    [
        (_raises, None, "OSError", "the list is gone"),
        (_no_list, None, "WRONG_TYPE", "gave int, which is not a list of items"),
        (_coroutine, lambda number: 1 // 0, "ZeroDivisionError", "its key function failed"),
    ],
)
@run_async
async def test_a_source_that_fails_fails_its_stage_and_the_next_ones_go_on(
    source: Any, key: Any, code: str, message: str
) -> None:
    one = Definition("one", config=Config)

    @one.map(over=source, key=key)
    async def same(number: int) -> int:
        return number

    @one.step()
    async def after(results: Any) -> int:
        return 1

    ended = await Place().run(one)
    stage = stage_of(ended, "same")
    assert stage.status is StageStatus.FAILED
    assert message in stage.reason
    assert [error.code for error in ended.errors] == [code]
    assert statuses(ended)["after"] == "completed"


@on_virtual_time
async def test_a_listed_value_that_cant_be_stored_fails_as_an_item() -> None:
    one = Definition("one")

    async def odd() -> Any:
        for value in (1, object(), 3):
            yield value

    @one.map(over=odd)
    async def same(number: int) -> int:
        return number

    place = Place()
    ended = await place.run(one)
    items = await place.items("same")
    assert [item.error_code for item in items] == ["", "RESULT_NOT_STORABLE", ""]
    assert (stage_of(ended, "same").ok, stage_of(ended, "same").failed) == (2, 1)


# -- retries ----------------------------------------------------------------------


def _flaky(failures: int, error: Exception, **options: Any) -> tuple[Definition, list[float]]:
    one, at = Definition("one", config=Config), []

    @one.map(over="numbers", **options)
    async def flaky(number: int, ctx: Any) -> int:
        at.append(ctx.now())
        ctx.metric("tries")
        if ctx.attempt <= failures:
            raise error
        return ctx.attempt  # type: ignore[no-any-return]

    return one, at


@on_virtual_time
async def test_a_transient_failure_is_tried_again_after_a_growing_while() -> None:
    one, at = _flaky(2, ConnectionError("reset"), retry=Retry(3, delay=1.0, jitter=0.0))
    place = Place()
    ended = await place.run(one, {"numbers": [1]})
    (item,) = await place.items("flaky")
    assert (item.outcome, item.attempts) == (ItemOutcome.OK, 3)
    assert [round(t - at[0], 3) for t in at] == [0.0, 1.0, 3.0]
    assert stage_of(ended, "flaky").metrics == {"tries": 1}  # only of the attempt that counts


@on_virtual_time
async def test_what_keeps_failing_ends_with_its_last_error() -> None:
    one, at = _flaky(9, ConnectionError("reset"), retry=Retry(2, delay=1.0))
    place = Place()
    await place.run(one, {"numbers": [1]})
    (item,) = await place.items("flaky")
    assert (item.outcome, item.attempts, item.error) == (ItemOutcome.FAILED, 3, "reset")
    assert (item.error_class, item.error_code) == (ErrorClass.TRANSIENT, "ConnectionError")
    assert len(at) == 3


@on_virtual_time
async def test_a_permanent_failure_is_not_tried_again() -> None:
    one, at = _flaky(9, ValueError("never"), retry=3)
    await Place().run(one, {"numbers": [1]})
    assert len(at) == 1


@on_virtual_time
async def test_a_blob_that_cant_be_written_is_worth_another_try() -> None:
    class Flaky(MemoryBlobs):
        tried = 0

        async def put(self, data: bytes, media_type: str = "application/json") -> str:
            self.tried += 1
            if self.tried == 1:
                raise StoreFailed("the disk is busy")
            return await super().put(data, media_type)

    one = Definition("one")

    @one.step(retry=Retry(1, delay=1.0))
    async def large(results: Any) -> str:
        return "x" * 1000

    place = Place(blobs=Flaky(inline_limit=0), inline_limit=10)
    ended = await place.run(one)
    (item,) = await place.items("large")
    assert (ended.status, item.attempts) == (_S.COMPLETED, 2)


@on_virtual_time
async def test_an_error_text_is_bounded() -> None:
    one, _ = _flaky(9, ValueError("x" * 100_000))
    place = Place()
    ended = await place.run(one, {"numbers": [1]})
    (item,) = await place.items("flaky")
    assert 100 < len(item.error) <= 2000
    assert len(stage_of(ended, "flaky").errors[0]) <= 300


# -- time -------------------------------------------------------------------------


@on_virtual_time
async def test_a_call_that_never_ends_is_cancelled_when_its_time_is_up() -> None:
    one, stopped = Definition("one", config=Config), []

    @one.map(over="numbers", timeout=5.0, concurrency=3)
    async def stuck(number: int, ctx: Any) -> int:
        try:
            if number == 2:
                await asyncio.Event().wait()
            return number
        except asyncio.CancelledError:
            stopped.append(number)
            raise

    place = Place()
    began = place.clock.now()
    ended = await place.run(one)
    items = await place.items("stuck")
    assert [item.error_class for item in items] == [None, ErrorClass.TIMEOUT, None]
    assert items[1].error == "it took longer than 5 s"
    assert items[1].duration_ms == pytest.approx(5000)
    assert stopped == [2]
    assert place.clock.now() - began == pytest.approx(5.0)
    assert ended.abandoned_items == ()


@on_virtual_time
async def test_a_timeout_is_tried_again_where_the_stage_says_so() -> None:
    one = Definition("one")

    @one.step(timeout=1.0, retry=1)
    async def slow_at_first(results: Any, ctx: Any) -> int:
        await asyncio.sleep(10 if ctx.attempt == 1 else 0)
        assert ctx.remaining() == pytest.approx(1.0)
        return 1

    place = Place()
    ended = await place.run(one)
    assert ended.status is _S.COMPLETED
    assert (await place.items("slow_at_first"))[0].attempts == 2


@on_virtual_time
async def test_an_async_call_that_will_not_stop_is_left_and_reported() -> None:
    one, release = Definition("one"), asyncio.Event()

    @one.step(timeout=1.0)
    async def stubborn(results: Any) -> int:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return 1

    place = Place(kill_grace=2.0)
    began = place.clock.now()
    ended = await place.run(one)
    assert ended.abandoned_items == ("stubborn/",)
    assert place.clock.now() - began == pytest.approx(3.0)
    release.set()


@run_async
async def test_a_thread_that_ran_out_of_time_is_told_and_left_and_reported() -> None:
    one, told, release = Definition("one", config=Config), threading.Event(), threading.Event()

    @one.map(over="numbers", timeout=0.5)
    def stuck(number: int, ctx: Any) -> int:
        if number == 2:
            ctx.cancel.wait(10)
            told.set()
            release.wait(10)
        return number

    place = Place()
    ended = await place.run(one)
    items = await place.items("stuck")
    assert [item.outcome for item in items] == [
        *(ItemOutcome.OK, ItemOutcome.FAILED, ItemOutcome.OK)
    ]
    assert items[1].error_class is ErrorClass.TIMEOUT
    assert ended.abandoned_items == ("stuck/1",)
    assert place.attempt.heard("is left to itself")
    assert told.wait(10)
    release.set()


@run_async
async def test_a_call_for_which_no_thread_becomes_free_in_time_never_begins() -> None:
    one, release, begun = Definition("one", config=Config), threading.Event(), []

    @one.map(over="numbers", timeout=0.05, concurrency=1)
    def stuck(number: int, ctx: Any) -> int:
        begun.append(number)
        release.wait(10)
        return number

    place = Place(threads=1)
    await place.run(one, {"numbers": [1, 2]})
    assert begun == [1]
    assert "no thread was free" in (await place.items("stuck"))[1].error
    release.set()


# -- breakers ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when_open", "outcome", "calls"),
    [("fail", ItemOutcome.FAILED, 2), ("skip", ItemOutcome.SKIPPED, 2)],
)
@on_virtual_time
async def test_items_behind_an_open_breaker_are_not_run(
    when_open: str, outcome: ItemOutcome, calls: int
) -> None:
    one, begun = Definition("one", config=Config, breakers={"feeds": {"threshold": 2}}), []

    @one.map(over="numbers", concurrency=1, breaker="feeds", when_open=when_open)
    async def fetch(number: int) -> int:
        begun.append(number)
        raise ConnectionError("refused")

    place = Place()
    ended = await place.run(one, {"numbers": [1, 2, 3, 4]})
    items = await place.items("fetch")
    assert len(begun) == calls
    assert [item.outcome for item in items[2:]] == [outcome] * 2
    assert items[3].error_code == "BREAKER_OPEN"
    assert stage_of(ended, "fetch").status is StageStatus.FAILED
    (breaker,) = await place.reader.breakers()
    assert (breaker.name, breaker.state) == ("feeds", BreakerState.OPEN)


@on_virtual_time
async def test_an_item_waits_for_an_open_breaker_and_then_runs() -> None:
    one = Definition("one", config=Config, breakers={"feeds": {"threshold": 1, "cooldown": 30}})
    at: list[float] = []

    @one.map(over="numbers", concurrency=1, breaker="feeds")
    async def fetch(number: int, ctx: Any) -> int:
        at.append(ctx.now())
        if number == 1:
            raise ConnectionError("refused")
        return number

    ended = await Place().run(one)
    assert (stage_of(ended, "fetch").ok, stage_of(ended, "fetch").failed) == (2, 1)
    assert at[1] - at[0] == pytest.approx(30, abs=1.1)


@pytest.mark.seed("002", "7.4")
@on_virtual_time
async def test_a_stage_whose_items_were_all_kept_out_is_skipped_and_counts() -> None:
    one = Definition("one", config=Config, breakers={"feeds": {"threshold": 1, "cooldown": 900}})

    @one.step(breaker="feeds")
    async def breaks(results: Any) -> int:
        raise ConnectionError("refused")

    @one.map(over="numbers", breaker="feeds", when_open="skip")
    async def fetch(number: int) -> int:
        return number

    ended = await Place().run(one)
    stage = stage_of(ended, "fetch")
    assert (stage.status, stage.reason, stage.counted) == (
        *(StageStatus.SKIPPED, "breaker_open"),
        True,
    )


# -- one item by itself -----------------------------------------------------------


@on_virtual_time
async def test_an_item_runs_alone_with_the_results_that_are_there() -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers")
    async def first(number: int) -> int:
        return number

    @one.map(over=first)
    async def second(number: int, ctx: Any) -> int:
        ctx.metric("read")
        return number + ctx.results("first").count  # type: ignore[no-any-return]

    place = Place()
    record = await place.run(one)
    runner = ItemRunner(place.scope(one, record))
    runner.scope.output_counts["first"] = 3
    item = (await place.items("second"))[0]
    ended, report = await runner.perform(one.stages["second"], item, CancelToken())
    await runner.close()
    assert ended.outcome is ItemOutcome.OK
    assert report is not None
    assert report.added == {"read": 1}


@on_virtual_time
async def test_an_item_of_a_cancelled_runner_is_not_begun() -> None:
    one, begun = Definition("one", config=Config), []

    @one.map(over="numbers")
    async def first(number: int) -> int:
        begun.append(number)
        return number

    place, token = Place(), CancelToken()
    record = await place.run(one)
    begun.clear()
    token.request("enough")
    runner = ItemRunner(place.scope(one, record))
    item = (await place.items("first"))[0]
    ended, _ = await runner.perform(one.stages["first"], item, token)
    await runner.close()
    assert (ended.error_class, ended.attempts, begun) == (ErrorClass.CANCELLED, 0, [])
