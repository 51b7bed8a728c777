"""Runs that go on after their process died, or another attempt took over."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace
from tests.support.pipeline.pipeline_jobs import on_virtual_time
from tests.support.pipeline.pipeline_runs import Place, reasons, stage_of, statuses, turns

from penstock.core.errors import StoreFailed
from penstock.lifecycles.canonical import JobState
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.executor import Interrupted
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.records import ItemOutcome, PipelineRecord

_S = PipelineJobStatus


class Config(Struct):
    numbers: tuple[int, ...] = (1, 2, 3, 4, 5)


class Journal:
    """What was called, by the run that called it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    async def note(self, ctx: Any) -> None:
        self.calls.append((ctx.stage, ctx.key))
        await asyncio.sleep(0)


def _pipeline(journal: Journal, **options: Any) -> Definition:
    one = Definition("one", config=Config, **options)

    async def letters(ctx: Any) -> Any:
        ctx.metric("asked", set=True)
        for letter in "abc":
            yield letter

    @one.map(over="numbers", concurrency=2)
    async def first(number: int, ctx: Any) -> list[int]:
        await journal.note(ctx)
        ctx.metric("seen")
        if number == 4:
            raise ValueError("four")
        return [number, number * 10]

    @one.map(over=first, concurrency=3, key=lambda number: f"n{number % 4}")
    async def second(number: int, ctx: Any) -> int:
        await journal.note(ctx)
        return number + 1

    @one.map(over=letters)
    async def spelled(letter: str, ctx: Any) -> str:
        await journal.note(ctx)
        return letter.upper()

    @one.step(of=second)
    async def total(results: Any, ctx: Any) -> int:
        await journal.note(ctx)
        return sum([number async for number in results])

    return one


async def _ok_items(place: Place, pipeline: Definition) -> set[tuple[str, str]]:
    return {
        (stage, item.key)
        for stage in pipeline.stages
        for item in await place.items(stage)
        if item.outcome is not ItemOutcome.PENDING
    }


async def _essence(place: Place, record: PipelineRecord, pipeline: Definition) -> Any:
    """What must be the same however often it was interrupted."""
    return (
        record.status,
        {
            stage.name: (stage.status, stage.total, stage.ok, stage.failed, stage.metrics)
            for stage in record.stages
        },
        {
            name: [(item.key, item.outcome, item.output, item.error) for item in found]
            for name in pipeline.stages
            for found in [await place.items(name)]
        },
        [(error.stage, error.message) for error in record.errors],
    )


async def _undisturbed(page: int) -> tuple[Any, int]:
    place, one = Place(page=page, backlog=2), _pipeline(Journal())
    ended = await place.run(one)
    return await _essence(place, ended, one), len(place.engine.messages)


@pytest.mark.seed("002", "8.15")
@on_virtual_time
async def test_whatever_the_last_write_was_the_next_attempt_comes_to_the_same_end() -> None:
    expected, writes = await _undisturbed(page=2)
    assert writes > 15
    for last in range(1, writes):
        place, before, after = Place(page=2, backlog=2), Journal(), Journal()
        one = _pipeline(before)
        await place.create(one)
        assert await place.crash_after(last, one)
        done = await _ok_items(place, one)
        again = _pipeline(after)
        ended = await place.go_on(again)
        assert await _essence(place, ended, again) == expected, f"after write {last}"
        assert not done & set(after.calls), f"after write {last}"
        assert len(set(after.calls)) == len(after.calls)
        assert ended.attempt == 3


@on_virtual_time
async def test_the_output_of_a_run_is_that_of_its_last_good_step_whichever_attempt_ran_it() -> None:
    one = Definition("one", config=Config)

    @one.step()
    async def answer() -> int:
        return 42

    @one.step(counts=False)
    async def broken() -> int:
        raise ValueError("no")

    @one.map(over="numbers")
    async def rest(number: int) -> int:
        return number

    undisturbed = Place(page=2, backlog=1)
    await undisturbed.run(one)
    assert (await undisturbed.result())["output"] == 42
    for last in range(1, len(undisturbed.engine.messages)):
        place = Place(page=2, backlog=1)
        await place.create(one)
        assert await place.crash_after(last, one)
        await place.go_on(one)
        assert (await place.result())["output"] == 42, f"after write {last}"


@on_virtual_time
async def test_a_run_that_loses_its_worker_again_and_again_comes_to_the_same_end() -> None:
    expected, _ = await _undisturbed(page=2)
    for every in (8, 11):
        place, one = Place(page=2, backlog=2), _pipeline(Journal())
        await place.create(one)
        while await place.crash_after(every, one):
            pass
        assert await _essence(place, await place.record(), one) == expected


@on_virtual_time
async def test_an_attempt_that_was_taken_over_writes_nothing_more() -> None:
    place, journal = Place(), Journal()
    one = _pipeline(journal)
    await place.create(one)
    assert await place.crash_after(4, one)
    held, rows = await place.record(), dict(place.engine.rows["job"])
    calls = len(journal.calls)
    await asyncio.sleep(10)
    assert place.engine.rows["job"] == rows
    assert len(journal.calls) == calls  # and nothing of it runs on
    assert held.status is _S.RUNNING


# -- an engine that is away -------------------------------------------------------


@on_virtual_time
async def test_an_engine_that_is_away_for_a_while_is_waited_for() -> None:
    expected, writes = await _undisturbed(page=500)
    for away in range(writes):
        place, journal = Place(backlog=2), Journal()
        one = _pipeline(journal)

        async def wait(rows: Any, place: Place = place, away: int = away) -> None:
            if len(place.engine.messages) == away:
                await asyncio.sleep(600)

        place.engine.before_message = wait
        ended = await place.run(one)
        assert await _essence(place, ended, one) == expected
        assert len(set(journal.calls)) == len(journal.calls)


@on_virtual_time
async def test_a_row_that_the_engine_refuses_ends_the_attempt() -> None:
    place, journal = Place(), Journal()

    async def refuse(rows: Any) -> None:
        if len(place.engine.messages) == 4:
            raise StoreFailed("the job has too many rows")

    place.engine.before_message = refuse
    with pytest.raises(StoreFailed):
        await place.run(_pipeline(journal))
    calls = len(journal.calls)
    await asyncio.sleep(10)
    assert len(journal.calls) == calls


# -- a stage that was being listed ------------------------------------------------


@on_virtual_time
async def test_a_stage_cut_off_while_it_was_listed_is_listed_anew_and_no_old_item_is_seen() -> None:
    listed, calls = ["a", "b", "c", "d", "e"], []
    one = Definition("one")

    async def letters(ctx: Any) -> Any:
        ctx.metric("letters", len(listed))
        for letter in listed:
            yield letter
            if listed[0] == "a":
                await asyncio.sleep(1)

    @one.map(over=letters, key=str)
    async def spelled(letter: str) -> str:
        calls.append(letter)
        return letter.upper()

    @one.step()
    async def word(results: Any) -> str:
        return "".join([letter async for letter in results])

    place = Place(page=2)
    attempt = await place.begin(one)
    await asyncio.sleep(4.5)
    assert stage_of(await place.record(), "spelled").total == 4
    await place.crash(attempt)
    listed[:] = ["x", "y", "z"]
    ended = await place.go_on(one)
    assert calls == ["x", "y", "z"]
    stage = stage_of(ended, "spelled")
    assert (stage.total, stage.ok, stage.metrics) == (3, 3, {"letters": 3})
    assert [item.key for item in await place.items("spelled")] == ["x", "y", "z"]
    assert await place.outputs("word") == ["XYZ"]
    assert {name for name, _ in place.engine.rows["job"]} >= {"list/spelled/0", "list/spelled/1"}


@on_virtual_time
async def test_a_long_list_cut_off_within_a_checkpoint_leaves_nothing_behind() -> None:
    # Inputs that are blobs have rows of their own, so a page is more than one message.
    listed = [f"{number}-" + "x" * 100 for number in range(300)]
    one = Definition("one")

    async def large() -> Any:
        for text in listed:
            yield text

    @one.map(over=large)
    async def length(text: str) -> int:
        return len(text)

    place = Place(inline_limit=50)
    place.blobs.inline_limit = 0
    await place.create(one)
    assert await place.crash_after(1, one)
    listed[:] = ["y"] * 10
    ended = await place.go_on(one)
    assert (stage_of(ended, "length").total, stage_of(ended, "length").ok) == (10, 10)
    assert await place.outputs("length") == [1] * 10


@on_virtual_time
async def test_counters_after_a_resume_are_those_of_the_items() -> None:
    place, journal = Place(backlog=1), Journal()
    one = _pipeline(journal)
    await place.create(one)
    assert await place.crash_after(3, one)
    rows = place.engine.rows["job"]
    # Whatever the counters say that were written last, the items say how far it is.
    row = rows["stage", 0]
    wrong = row.output.replace('"metrics":{"seen":', '"metrics":{"seen":9')
    assert wrong != row.output
    rows["stage", 0] = replace(row, output=wrong)
    ended = await place.go_on(_pipeline(Journal()))
    first = stage_of(ended, "first")
    assert (first.total, first.done, first.ok, first.failed) == (5, 5, 4, 1)
    assert first.metrics == {"seen": 5}


# -- stopped while it is taken up -------------------------------------------------


@pytest.mark.parametrize("how", [JobState.FAILED, JobState.CANCELLED])
@on_virtual_time
async def test_a_stage_that_was_begun_keeps_its_items_when_the_next_attempt_is_stopped_at_once(
    how: JobState,
) -> None:
    place, journal = Place(backlog=1), Journal()
    one = _pipeline(journal)
    await place.create(one)
    assert await place.crash_after(3, one)
    done = len(await _ok_items(place, one))
    assert 0 < done < 5
    stopped: list[bool] = []

    async def stop(rows: Any) -> None:
        if not stopped:
            stopped.append(True)
            place.attempt.stop(how, "stopped")
            await turns()

    place.engine.before_message = stop
    calls = len(journal.calls)
    attempt = place.next_attempt(one)
    if how is JobState.FAILED:
        with pytest.raises(Interrupted):
            await attempt.task
        assert len(await _ok_items(place, one)) == done
        expected, _ = await _undisturbed(page=500)
        ended = await place.go_on(one)
        assert await _essence(place, ended, one) == expected
        again = journal.calls[calls:]
        assert len(set(again)) == len(again)
    else:
        first = stage_of(await attempt.task, "first")
        assert (str(first.status), first.done) == ("partial", done)
        assert len(journal.calls) == calls


# -- a pipeline that was changed --------------------------------------------------


def _versions(journal: Journal, *names: str, version: str = "", **options: Any) -> Definition:
    one = Definition("one", config=Config, **options)
    for name in names:

        async def stage(results: Any, ctx: Any) -> str:
            await journal.note(ctx)
            if ctx.stage == "stop" and not journal.calls.count(("again", "")):
                await asyncio.Event().wait()
            return str(ctx.stage)

        one.step(name=name, version=version if name == "b" else "")(stage)
    return one


async def _left_in(place: Place, *names: str) -> None:
    """A run that was lost while its stage `stop` ran."""
    journal = Journal()
    attempt = await place.begin(_versions(journal, *names))
    await asyncio.sleep(1)
    assert journal.calls[-1] == ("stop", "")
    await place.crash(attempt)


async def _gone_on(place: Place, *names: str, **options: Any) -> tuple[Any, list[str]]:
    journal = Journal()
    journal.calls.append(("again", ""))
    ended = await place.go_on(_versions(journal, *names, **options))
    return ended, [stage for stage, _ in journal.calls[1:]]


@on_virtual_time
async def test_stages_that_were_not_begun_may_be_changed() -> None:
    place = Place()
    await _left_in(place, "a", "stop", "x", "z")
    ended, ran = await _gone_on(place, "a", "stop", "z", "y")
    assert ended.status is _S.COMPLETED
    assert ran == ["stop", "z", "y"]
    assert statuses(ended)["x"] == "skipped"
    assert stage_of(ended, "x").reason == "removed"


@pytest.mark.parametrize(
    ("names", "options", "blamed"),
    [
        (("stop", "z"), {}, "a"),
        (("b", "a", "stop"), {}, "a"),
        (("a", "new", "b", "stop"), {}, "b"),
        (("a", "b", "stop"), {"version": "2"}, "b"),
        (("a", "b"), {}, "stop"),
    ],
)
@on_virtual_time
async def test_a_stage_that_was_begun_must_still_be_there_as_it_was(
    names: tuple[str, ...], options: dict[str, Any], blamed: str
) -> None:
    place = Place()
    await _left_in(place, "a", "b", "stop")
    ended, ran = await _gone_on(place, *names, **options)
    assert ended.status is _S.FAILED
    assert [(error.stage, error.code) for error in ended.errors] == [(blamed, "DEFINITION_CHANGED")]
    assert ran == []
    assert statuses(ended) == {"a": "completed", "b": "completed", "stop": "failed"}
    assert reasons(ended)["stop"] == "the run failed"


@on_virtual_time
async def test_a_changed_pipeline_may_restart() -> None:
    place = Place()
    await _left_in(place, "a", "b", "stop")
    ended, ran = await _gone_on(place, "b", "stop", "c", on_change="restart")
    assert ended.status is _S.COMPLETED
    assert ran == ["b", "stop", "c"]
    assert place.attempt.heard("the pipeline was changed")


@on_virtual_time
async def test_a_changed_pipeline_may_refuse() -> None:
    place = Place()
    await _left_in(place, "a", "stop")
    ended, ran = await _gone_on(place, "a", "stop", "c", on_change="refuse")
    assert (ended.status, ran) == (_S.FAILED, [])
    assert ended.errors[0].code == "DEFINITION_CHANGED"


@on_virtual_time
async def test_an_unchanged_pipeline_goes_on_whatever_its_policy() -> None:
    place = Place()
    await _left_in(place, "a", "stop", "c")
    ended, ran = await _gone_on(place, "a", "stop", "c", on_change="refuse")
    assert (ended.status, ran) == (_S.COMPLETED, ["stop", "c"])


class Letters(Struct):
    letters: tuple[str, ...] = ("a", "b")


def _letters(calls: list[str], *names: str, stuck: str = "", **options: Any) -> Definition:
    """Stages that map over letters; the last letter of the one that is stuck never ends."""
    one = Definition("one", config=Letters, **options)
    for name in names:

        async def stage(letter: str, ctx: Any) -> str:
            calls.append(f"{ctx.stage} {letter}")
            if ctx.stage == stuck and letter == "b":
                await asyncio.Event().wait()
            return f"{names[0]} before {ctx.stage}"

        one.map(over="letters", name=name, key=str, concurrency=1)(stage)
    return one


async def _lost_in(place: Place, stuck: str, *names: str, **options: Any) -> list[str]:
    """An attempt that is lost while one of its stages is stuck; what it called."""
    calls: list[str] = []
    attempt = place.next_attempt(_letters(calls, *names, stuck=stuck, **options))
    await asyncio.sleep(1)
    await place.crash(attempt)
    return calls


@pytest.mark.parametrize("stuck", ["new", "first"])
@on_virtual_time
async def test_a_restart_that_is_lost_as_well_never_sees_what_was_done_before_it(
    stuck: str,
) -> None:
    place = Place(page=1)
    calls: list[str] = []
    await place.create(_letters([], "first", "second"))
    assert await _lost_in(place, "second", "first", "second") == [
        *("first a", "first b", "second a", "second b")
    ]
    again = {"on_change": "restart"}
    begun = await _lost_in(place, stuck, "new", "first", "second", **again)
    ended = await place.go_on(_letters(calls, "new", "first", "second", **again))
    assert ended.status is _S.COMPLETED
    assert begun[-1] == calls[0] == f"{stuck} b"  # the one that was lost is run again
    assert begun[:-1] + calls == [
        f"{stage} {letter}" for stage in ("new", "first", "second") for letter in "ab"
    ]
    assert await place.outputs("first") == ["new before first"] * 2
    assert await place.outputs("second") == ["new before second"] * 2


@on_virtual_time
async def test_a_removed_stage_may_come_back() -> None:
    place = Place()
    await _left_in(place, "a", "stop", "x")
    journal = Journal()
    attempt = place.next_attempt(_versions(journal, "a", "stop", "y"))
    await asyncio.sleep(1)
    await place.crash(attempt)
    ended, ran = await _gone_on(place, "a", "stop", "y", "x")
    assert (ended.status, ran) == (_S.COMPLETED, ["stop", "y", "x"])
