"""What a run tells: events, progress, metrics, summary, alerts, hooks; and what it shares."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from msgspec import Struct
from tests.support.pipeline.pipeline_jobs import on_virtual_time
from tests.support.pipeline.pipeline_runs import Place, stage_of
from tests.support.rows import every

from penstock.lifecycles.canonical import JobEvent
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.testing.aio import run_async
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.records import PipelineEventKind, trace_of
from penstock.workloads.pipeline.summary import count_below

_K = PipelineEventKind


class Config(Struct):
    numbers: tuple[int, ...] = (1, 2, 3)


def _steps(count: int, **options: Any) -> Definition:
    one = Definition("steps", **options)
    for index in range(count):

        async def step(results: Any) -> int:
            return 1

        one.step(name=f"s{index}")(step)
    return one


# -- writes -----------------------------------------------------------------------


@on_virtual_time
async def test_six_steps_cost_six_checkpoints() -> None:
    place = Place()
    await place.run(_steps(6))
    assert len(place.engine.messages) == 6


@pytest.mark.seed("002", "2.1")
@on_virtual_time
async def test_the_end_of_a_stage_is_written_before_the_next_one_begins() -> None:
    place, seen = Place(), []
    one = Definition("one")

    @one.step()
    async def first(results: Any) -> int:
        return 1

    @one.step()
    async def second(results: Any, ctx: Any) -> int:
        record = await place.record(ctx.job_id)
        seen.append((str(record.stages[0].status), record.current_stage))
        return 2

    await place.run(one)
    assert seen == [("completed", "second")]


@on_virtual_time
async def test_items_that_end_while_a_write_is_under_way_go_together_into_the_next() -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers", concurrency=10)
    async def quick(number: int) -> int:
        await asyncio.sleep(0.1 * (number % 10))
        return number

    place = Place()
    place.engine.before_message = lambda rows: asyncio.sleep(1.0)
    await place.run(one, {"numbers": list(range(60))})
    sizes = [sum(row.name == "item/quick/0" for row in rows) for rows in place.engine.messages]
    assert sum(sizes) == 60
    assert sum(size > 0 for size in sizes) <= 10


@on_virtual_time
async def test_one_write_is_under_way_at_a_time() -> None:
    inside = most = 0

    async def slow(rows: Any) -> None:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.3)
        inside -= 1

    one = Definition("one", config=Config)

    @one.map(over="numbers", concurrency=10)
    async def quick(number: int, ctx: Any) -> int:
        ctx.emit({"number": number})
        await asyncio.sleep(0.1)
        return number

    place = Place()
    place.engine.before_message = slow
    await place.run(one, {"numbers": list(range(50))})
    assert most == 1


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
        *(_K.STAGE_COMPLETE, _K.STAGE_COMPLETE, _K.JOB_COMPLETE),
    ]
    assert events[0].data == {"pipeline": "one", "stages": ["slow", "never"]}
    assert (events[-3].data["stage"], events[-3].data["ok"]) == ("slow", 3)
    assert (events[-2].data["stage"], events[-2].data["reason"]) == ("never", "disabled")
    assert events[-1].data["status"] == "COMPLETED"
    entries = {entry.n: entry for entry in await place.engine.history("job")}
    ids = [event.id or 0 for event in events]
    assert [event.at for event in events] == [entries[number].at for number in ids]
    assert ids == sorted(set(ids))


@on_virtual_time
async def test_events_of_any_number_and_key_come_through() -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers", key=lambda number: f"100% of {number}", concurrency=1)
    async def loud(number: int, ctx: Any) -> int:
        for part in range(150):
            ctx.emit({"part": part})
        return number

    place = Place()
    ended = await place.run(one)
    assert ended.status is PipelineJobStatus.COMPLETED
    own = [event.data for event in await place.events() if event.kind is _K.CUSTOM]
    assert own == [
        {"stage": "loud", "key": f"100% of {number}", "data": {"part": part}}
        for number in (1, 2, 3)
        for part in range(150)
    ]


@on_virtual_time
async def test_a_note_that_is_no_event_of_the_run_is_passed_over() -> None:
    place = Place()
    await place.run(_steps(1))
    before = await place.events()
    job = place.engine.jobs["job"]
    for note in ("emit", "emit s0/ {", "emit s0/", "stage_start", "stage_start gone", "hello"):
        place.engine._enter(job, JobEvent.NOTE, job.state, note)
    assert await place.events() == before


@on_virtual_time
async def test_a_stage_that_runs_has_a_rate_and_an_eta() -> None:
    one, seen = Definition("one", config=Config), []

    @one.map(over="numbers", concurrency=1)
    async def slow(number: int, ctx: Any) -> int:
        await asyncio.sleep(1.0)
        seen.append(stage_of(await place.record(), "slow"))
        return number

    place = Place()
    ended = await place.run(one, {"numbers": [1, 2, 3, 4]})
    third = seen[2]
    assert (third.total, third.done) == (4, 2)
    assert (third.rate, third.eta) == (pytest.approx(1.0), pytest.approx(2.0))
    assert stage_of(ended, "slow").eta is None


@on_virtual_time
async def test_progress_is_told_at_most_so_often() -> None:
    one = Definition("one", config=Config)

    @one.map(over="numbers", concurrency=1)
    async def quick(number: int) -> int:
        await asyncio.sleep(0.01)
        return number

    place = Place(progress_every=1.0)
    await place.run(one, {"numbers": list(range(300))})
    told = [text for _, text in place.attempt.progressed if text.startswith("quick: ")]
    assert 2 <= len(told) <= 4
    assert told[0].endswith(" of 300")


@on_virtual_time
async def test_a_long_call_that_reports_progress_is_heard() -> None:
    one = Definition("one")

    @one.step()
    async def long(results: Any, ctx: Any) -> int:
        for part in range(10):
            await asyncio.sleep(20)
            ctx.progress(part / 10, "on and on")
        return 1

    place = Place()
    await place.run(one)
    told = [fraction for fraction, text in place.attempt.progressed if text == "on and on"]
    assert told == [part / 10 for part in range(10)]


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
        record = await place.record(ctx.job_id)
        assert record.summary is not None
        seen.append((record.summary.finished_at, record.summary.stages["first"]["stories"]))
        await asyncio.sleep(5)
        return 2

    ended = await place.run(one)
    assert seen == [(None, 7)]
    assert ended.summary is not None
    assert ended.summary.finished_at == ended.finished_at is not None
    assert ended.summary.duration_ms == pytest.approx(5000)
    assert ended.summary.stages["second"]["status"] == "completed"


@pytest.mark.seed("002", "7.15")
@on_virtual_time
async def test_alerts_are_evaluated_on_the_final_record_and_told_after_it_is_written() -> None:
    place, told = Place(), []

    async def on_alert(record: Any, alert: Any) -> None:
        told.append((alert.code, place.engine.rows[record.id]["run", 0].outcome))

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


def _hooked(told: list[Any]) -> Definition:
    def on_end(record: Any) -> None:
        told.append((record.status, record.finished_at is not None, record.cancel_effective))

    return _steps(3, on_end=on_end)


@every(
    "last, calls",
    [(1, 1), (2, 1), (3, 2), (4, 1), (5, 1)],  # 3: it was lost while it called them
)
@on_virtual_time
async def test_hooks_are_called_once_unless_the_worker_is_lost_meanwhile(
    last: int, calls: int
) -> None:
    told: list[Any] = []
    place, one = Place(), _hooked(told)
    await place.create(one)
    if await place.crash_after(last, one):
        await place.go_on(one)
    assert (await place.record()).status is PipelineJobStatus.COMPLETED
    assert (await place.result())["output"] == 1
    assert told == [(PipelineJobStatus.COMPLETED, True, None)] * calls


@on_virtual_time
async def test_a_run_whose_end_is_durable_is_not_run_again_and_its_job_ends_the_same() -> None:
    place, told = Place(), []
    one = Definition("one", config=Config, on_end=lambda record: told.append(record.status))

    @one.map(over="numbers")
    async def some(number: int) -> int:
        told.append(number)
        return 6 // (number - 1)

    @one.step()
    async def total(results: Any) -> int:
        return sum([number async for number in results])

    await place.create(one)
    reached = place.engine.rows.setdefault("job", {})
    last = 0
    while ("run", 0) not in reached or not reached["run", 0].outcome:
        last += 1
        reached.clear()
        place.engine.jobs.clear()
        await place.create(one)
        told.clear()
        assert await place.crash_after(last, one)
    assert told == [1, 2, 3, PipelineJobStatus.PARTIAL]
    ended = await place.go_on(one)
    assert told == [1, 2, 3, PipelineJobStatus.PARTIAL, PipelineJobStatus.PARTIAL]
    assert ended.status is PipelineJobStatus.PARTIAL
    assert (await place.result())["output"] == 9


@on_virtual_time
async def test_hooks_of_a_cancelled_run_see_that_it_was_cancelled() -> None:
    told: list[Any] = []

    def on_end(record: Any) -> None:
        told.append((record.status, record.cancel_requested, record.cancel_effective))

    one = Definition("one", on_end=on_end)

    @one.step()
    async def long(results: Any) -> None:
        await asyncio.sleep(100)

    attempt = await Place().begin(one)
    await asyncio.sleep(1)
    attempt.cancel_run()
    ended = await attempt.task
    assert ended.status is PipelineJobStatus.CANCELLED
    assert told == [(PipelineJobStatus.CANCELLED, True, True)]


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


@on_virtual_time
async def test_errors_that_are_long_and_many_are_cut() -> None:
    one = Definition("one")

    async def source(ctx: Any) -> list[int]:
        for _ in range(1000):
            ctx.error("x" * 1000)
        return [1]

    @one.map(over=source)
    async def careful(number: int, ctx: Any) -> str:
        for _ in range(1000):
            ctx.error("x" * 1000)
        return "done"

    place = Place()
    ended = await place.run(one)
    assert ended.status is PipelineJobStatus.PARTIAL
    (item,) = await place.items("careful")
    assert 300 <= len(item.error) <= 2000
    assert await place.outputs("careful") == ["done"]


@on_virtual_time
async def test_a_source_that_counts_too_much_fails_its_stage() -> None:
    one = Definition("one")

    async def source(ctx: Any) -> list[int]:
        for number in range(10_000):
            ctx.metric(f"metric number {number}")
        return [1]

    @one.map(over=source)
    async def some(number: int) -> int:
        return number

    ended = await Place().run(one)
    assert stage_of(ended, "some").status == "failed"
    assert [error.code for error in ended.errors] == ["REPORT_TOO_LARGE"]


@pytest.mark.parametrize(
    "report",
    [
        lambda ctx: ctx.metric("share", float("nan")),
        lambda ctx: ctx.metric("thing", object()),
        lambda ctx: ctx.emit({"thing": object()}),
        lambda ctx: ctx.emit({"half": "\ud800"}),
        lambda ctx: ctx.results("nothing"),
        lambda ctx: ctx.emit({"text": "x" * 4000}),
        lambda ctx: [ctx.metric(f"metric number {n}") for n in range(1000)],
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
    await place.run(one, None, "c", tenant="another")
    assert await place.outputs("count", "c") == [1]


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
    assert seen == [("job", trace_of("job"), "one", "who", "n7", 1)]
