"""What a run tells: events, progress, metrics, summary, alerts, hooks; and what it shares."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from msgspec import Struct
from tests.unit.pipeline_jobs import on_virtual_time
from tests.unit.pipeline_runs import Place, stage_of

from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.testing.aio import run_async
from penstock.workloads.pipeline.summary import count_below
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.records import PipelineEventKind
from penstock.workloads.pipeline.storage.memory import MemoryPipelineStore
from penstock.workloads.pipeline.store import Save, Saved

_K = PipelineEventKind


class Config(Struct):
    numbers: tuple[int, ...] = (1, 2, 3)


class Counting(MemoryPipelineStore):
    def __init__(self) -> None:
        super().__init__()
        self.saves: list[Save] = []

    async def save(self, save: Save) -> Saved:
        self.saves.append(save)
        return await super().save(save)


def _steps(count: int, **options: Any) -> Definition:
    one = Definition("steps", **options)
    for index in range(count):

        async def step(results: Any) -> int:
            return 1

        one.step(name=f"s{index}")(step)
    return one


# -- writes -----------------------------------------------------------------------


@on_virtual_time
async def test_six_steps_cost_seven_writes() -> None:
    place = Place(store=Counting())
    await place.run(_steps(6))
    assert len(place.store.saves) == 7


@on_virtual_time
async def test_the_end_of_a_stage_is_written_before_the_next_one_begins() -> None:
    place, seen = Place(), []
    one = Definition("one")

    @one.step()
    async def first(results: Any) -> int:
        return 1

    @one.step()
    async def second(results: Any, ctx: Any) -> int:
        record = await place.store.get(ctx.job_id)
        seen.append((str(record.stages[0].status), record.current_stage))
        return 2

    await place.run(one)
    assert seen == [("completed", "second")]


@on_virtual_time
async def test_items_that_end_while_a_write_is_under_way_go_together_into_the_next() -> None:
    class Slow(Counting):
        async def save(self, save: Save) -> Saved:
            await asyncio.sleep(1.0)
            return await super().save(save)

    one = Definition("one", config=Config)

    @one.map(over="numbers", concurrency=10)
    async def quick(number: int) -> int:
        await asyncio.sleep(0.1 * (number % 10))
        return number

    place = Place(store=Slow())
    await place.run(one, {"numbers": list(range(60))})
    sizes = [sum(len(group.items) for group in save.ended) for save in place.store.saves]
    assert sum(sizes) == 60
    assert sum(size > 0 for size in sizes) <= 10


@on_virtual_time
async def test_one_write_is_under_way_at_a_time() -> None:
    class Watched(Counting):
        inside = most = 0

        async def save(self, save: Save) -> Saved:
            self.inside += 1
            self.most = max(self.most, self.inside)
            await asyncio.sleep(0.3)
            self.inside -= 1
            return await super().save(save)

    one = Definition("one", config=Config)

    @one.map(over="numbers", concurrency=10)
    async def quick(number: int, ctx: Any) -> int:
        ctx.emit({"number": number})
        await asyncio.sleep(0.1)
        return number

    place = Place(store=Watched(), lease=1.0)
    await place.run(one, {"numbers": list(range(50))})
    assert place.store.most == 1


@on_virtual_time
async def test_a_lease_is_renewed_while_nothing_happens() -> None:
    one = Definition("one")

    @one.step()
    async def long(results: Any) -> int:
        await asyncio.sleep(100)
        return 1

    place = Place(store=Counting(), lease=30.0)
    began = place.clock.now()
    await place.run(one)
    leases = [round(save.lease_until - began) for save in place.store.saves[1:-1]]
    assert leases[:9] == [40, 50, 60, 70, 80, 90, 100, 110, 120]


# -- events -----------------------------------------------------------------------


@on_virtual_time
async def test_events_tell_the_whole_story_in_order() -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers", concurrency=1)
    async def slow(number: int, ctx: Any) -> int:
        ctx.emit({"at": number})
        await asyncio.sleep(1.0)
        return number

    @one.step(enabled=lambda config: False)
    async def never(results: Any) -> int:
        return 1

    place = Place()
    await place.run(one)
    events = await place.events()
    own = [event.data for event in events if event.kind is _K.CUSTOM]
    assert own == [
        {"stage": "slow", "key": str(index), "data": {"at": index + 1}} for index in range(3)
    ]
    assert [event.kind for event in events if event.kind is not _K.CUSTOM] == [
        *(_K.JOB_START, _K.STAGE_START),
        *[_K.STAGE_PROGRESS] * 3,
        *(_K.STAGE_COMPLETE, _K.STAGE_COMPLETE, _K.JOB_COMPLETE),
    ]
    progress = [event.data for event in events if event.kind is _K.STAGE_PROGRESS]
    assert [(one["done"], one["total"]) for one in progress] == [(1, 3), (2, 3), (3, 3)]
    assert progress[0]["rate"] == pytest.approx(1.0)
    assert progress[0]["eta"] == pytest.approx(2.0)
    assert (events[-2].data["stage"], events[-2].data["reason"]) == ("never", "disabled")
    assert events[-1].data["status"] == "COMPLETED"
    assert [event.id for event in events] == sorted(event.id for event in events)


@on_virtual_time
async def test_progress_is_told_at_most_so_often() -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers", concurrency=1)
    async def quick(number: int) -> int:
        await asyncio.sleep(0.01)
        return number

    place = Place(progress_every=1.0)
    await place.run(one, {"numbers": list(range(300))})
    told = [event for event in await place.events() if event.kind is _K.STAGE_PROGRESS]
    assert 3 <= len(told) <= 4


@on_virtual_time
async def test_a_long_call_that_reports_progress_is_written_down_as_alive() -> None:
    one = Definition("one")

    @one.step()
    async def long(results: Any, ctx: Any) -> int:
        for part in range(10):
            await asyncio.sleep(20)
            ctx.progress(part / 10, "on and on")
        return 1

    place = Place(heartbeat=30.0)
    await place.run(one)
    told = [event.data for event in await place.events() if event.kind is _K.STAGE_PROGRESS]
    assert len(told) >= 5
    assert told[0]["message"] == "on and on"


@on_virtual_time
async def test_whoever_listens_hears_how_far_the_job_is() -> None:
    place = Place()
    await place.run(_steps(4))
    assert place.attempt.fractions == sorted(place.attempt.fractions, key=lambda one: one or 0)
    assert (place.attempt.fractions[0], place.attempt.fractions[-1]) == (0.0, 1.0)


# -- summary, alerts, hooks -------------------------------------------------------


@on_virtual_time
async def test_the_summary_is_made_after_its_stage_and_closed_at_the_end() -> None:
    place, seen = Place(), []
    one = Definition("one", summary_after="first")

    @one.step()
    async def first(results: Any, ctx: Any) -> int:
        ctx.metric("stories", 7, set=True)
        return 1

    @one.step()
    async def second(results: Any, ctx: Any) -> int:
        record = await place.store.get(ctx.job_id)
        seen.append((record.summary.finished_at, record.summary.stages["first"]["stories"]))
        await asyncio.sleep(5)
        return 2

    ended = await place.run(one)
    assert seen == [(None, 7)]
    assert ended.summary is not None
    assert ended.summary.finished_at == ended.finished_at
    assert ended.summary.duration_ms == pytest.approx(5000)
    assert ended.summary.stages["second"]["status"] == "completed"


@on_virtual_time
async def test_alerts_are_evaluated_on_the_final_record_and_told_after_it_is_written() -> None:
    place, told = Place(), []

    async def on_alert(record: Any, alert: Any) -> None:
        held = await place.store.get(record.id)
        told.append((alert.code, held.status))

    def on_end(record: Any) -> None:
        told.append(("end", record.status))
        raise RuntimeError("the hook is broken")

    rule = count_below("few", "s0.stories", 10)
    ended = await place.run(_steps(1, alerts=[rule], on_alert=on_alert, on_end=on_end))
    done = PipelineJobStatus.COMPLETED
    assert told == [("few", done), ("end", done)]
    assert [alert.code for alert in ended.alerts] == ["few"]
    assert ended.summary is not None
    assert ended.summary.alerts == ("few",)
    assert ended.status is done
    assert place.attempt.heard("the hook is broken")


@on_virtual_time
async def test_metrics_add_up_over_items_and_may_be_set() -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers")
    async def count(number: int, ctx: Any) -> int:
        ctx.metric("items")
        ctx.metric("sum", number)
        ctx.metric("model", "small", set=True)
        ctx.metric("limit", 5, set=True)
        return number

    ended = await Place().run(one)
    assert stage_of(ended, "count").metrics == {
        "items": 3,
        "sum": 6,
        "model": "small",
        "limit": 5,
    }


@pytest.mark.parametrize(
    "report",
    [
        lambda ctx: ctx.metric("share", float("nan")),
        lambda ctx: ctx.metric("thing", object()),
        lambda ctx: ctx.emit({"thing": object()}),
        lambda ctx: ctx.emit({"half": "\ud800"}),
        lambda ctx: ctx.results("nothing"),
    ],
)
@on_virtual_time
async def test_a_report_that_cant_be_stored_fails_its_item_and_not_the_run(report: Any) -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers")
    async def odd(number: int, ctx: Any) -> int:
        if number == 2:
            report(ctx)
        ctx.progress(float("nan"), "half a character: \ud800")
        return number

    place = Place()
    ended = await place.run(one)
    assert (stage_of(ended, "odd").ok, stage_of(ended, "odd").failed) == (2, 1)
    for event in await place.events():
        msgspec.json.encode(event)


# -- what runs and items share ----------------------------------------------------


@on_virtual_time
async def test_a_pipeline_remembers_from_run_to_run() -> None:
    one = Definition("one")

    @one.step()
    async def count(results: Any, ctx: Any) -> int:
        before = await ctx.recall("runs") or 0
        await ctx.remember("runs", before + 1)
        return before + 1  # type: ignore[no-any-return]

    place = Place()
    await place.run(one, None, "a")
    await place.run(one, None, "b")
    assert await place.outputs("count", "b") == [2]
    assert await place.store.recall("one/runs") == b"2"


@run_async
async def test_plain_functions_remember_without_await_and_share_resources() -> None:
    made: list[Any] = []

    class Client:
        closed = False

        async def aclose(self) -> None:
            self.closed = True

    def client() -> Client:
        made.append(Client())
        return made[-1]  # type: ignore[no-any-return]

    one = Definition("one", config=Config, resources={"client": client})

    @one.map(over="numbers")
    def use(number: int, ctx: Any) -> int:
        ctx.remember(f"n{number}", number)
        ctx.emit({"from": "a thread"})
        assert ctx.resource("client") is made[0]
        return ctx.recall(f"n{number}")  # type: ignore[no-any-return]

    place = Place()
    await place.run(one)
    assert await place.outputs("use") == [1, 2, 3]
    assert (len(made), made[0].closed) == (1, True)
    told = [event.data for event in await place.events() if event.kind is _K.CUSTOM]
    assert len(told) == 3


@on_virtual_time
async def test_an_unknown_resource_names_those_there_are() -> None:
    one = Definition("one", resources={"client": object})

    @one.step()
    async def use(results: Any, ctx: Any) -> None:
        ctx.resource("cleint")

    ended = await Place().run(one)
    assert "no resource 'cleint'" in stage_of(ended, "use").errors[0]


@on_virtual_time
async def test_a_context_knows_its_job() -> None:
    one, seen = Definition("one", config=Config), []

    @one.map(over="numbers", key=lambda number: f"n{number}")
    async def who(number: int, ctx: Any) -> None:
        seen.append((ctx.job_id, ctx.trace_id, ctx.pipeline, ctx.stage, ctx.key, ctx.attempt))
        assert ctx.config.numbers == (7,)
        assert not ctx.cancelled()
        assert ctx.now() == 1_700_000_000.0

    await Place().run(one, {"numbers": [7]})
    assert seen == [("job", "trace-job", "one", "who", "n7", 1)]
