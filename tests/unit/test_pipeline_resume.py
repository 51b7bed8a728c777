"""Runs that go on after their process died, lost its claim, or its store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct
from tests.support.rows import every
from tests.unit.pipeline_jobs import on_virtual_time
from tests.unit.pipeline_runs import Place, stage_of, statuses, turns

from penstock.core.errors import StoreFailed, Superseded
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.testing.aio import run_async
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.records import ItemOutcome, PipelineRecord
from penstock.workloads.pipeline.storage.memory import MemoryPipelineStore
from penstock.workloads.pipeline.storage.sqlite.store import SqlitePipelineStore
from penstock.workloads.pipeline.store import Claim, Save, Saved

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

    async def letters() -> Any:
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


class TakenOver:
    """A store whose n-th write is the last that the run gets: then another has the job."""

    left: int | None = None
    written = 0

    async def save(self: Any, save: Save) -> Saved:
        saved: Saved = await super().save(save)  # type: ignore[misc]
        self.written += 1
        if self.written == self.left:
            held = await self.get(save.job_id)
            claim = Claim(job_id=save.job_id, owner="thief", now=save.at, fence=held.fence + 1)
            await self.claim(claim)
        return saved


class InMemory(TakenOver, MemoryPipelineStore):
    def __init__(self, writes: int | None = None) -> None:
        super().__init__()
        self.left = writes


class OnDisk(TakenOver, SqlitePipelineStore):
    def __init__(self, path: Path, writes: int | None = None) -> None:
        super().__init__(path)
        self.left = writes


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
    store = InMemory()
    place, one = Place(store=store, page=page, backlog=2), _pipeline(Journal())
    ended = await place.run(one)
    return await _essence(place, ended, one), store.written


@on_virtual_time
async def test_whatever_the_last_write_was_the_next_run_comes_to_the_same_end() -> None:
    expected, writes = await _undisturbed(page=2)
    assert writes > 20
    for last in range(1, writes):
        place, before, after = Place(store=InMemory(last), page=2, backlog=2), Journal(), Journal()
        one = _pipeline(before)
        with pytest.raises(Superseded):
            await place.run(one)
        await turns()
        done = await _ok_items(place, one)
        again = _pipeline(after)
        ended = await (await place.claimed(again)).run()
        assert await _essence(place, ended, again) == expected, f"after write {last}"
        assert not done & set(after.calls), f"after write {last}"
        assert len(set(after.calls)) == len(after.calls)
        assert ended.resumes >= 1


@run_async
async def test_a_store_on_disk_comes_to_the_same_end(tmp_path: Path) -> None:
    expected: Any = None
    for last in (None, 3, 6, 9, 12):
        store = OnDisk(tmp_path / f"{last}.db", last)
        place, one = Place(store=store, page=2, backlog=2), _pipeline(Journal())
        if last is None:
            ended = await place.run(one)
            expected = await _essence(place, ended, one)
        else:
            with pytest.raises(Superseded):
                await place.run(one)
            done, after = await _ok_items(place, one), Journal()
            ended = await (await place.claimed(_pipeline(after))).run()
            assert await _essence(place, ended, one) == expected, f"after write {last}"
            assert not done & set(after.calls)
        await store.close()


@on_virtual_time
async def test_a_run_that_was_taken_over_writes_nothing_more() -> None:
    store = InMemory(4)
    place, journal = Place(store=store), Journal()
    one = _pipeline(journal)
    with pytest.raises(Superseded):
        await place.run(one)
    held = await store.get("job")
    calls = len(journal.calls)
    await asyncio.sleep(10)
    assert await store.get("job") == held
    assert len(journal.calls) == calls  # and nothing of it runs on
    assert held is not None
    assert held.status is _S.RUNNING


# -- a store that fails -----------------------------------------------------------


class Failing(MemoryPipelineStore):
    """Refuses to write between two writes of its own count."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self.clock, self.until, self.refused = clock, 0.0, 0
        self.fail_at: int | None = None
        self.outage = 0.0
        self.written = 0

    async def save(self, save: Save) -> Saved:
        if self.written == self.fail_at:
            self.until, self.fail_at = self.clock() + self.outage, None
        if self.clock() < self.until:
            self.refused += 1
            raise StoreFailed("the disk is on fire")
        self.written += 1
        return await super().save(save)


@every("write", range(12))
@on_virtual_time
async def test_a_store_that_fails_for_a_while_loses_nothing(write: int) -> None:
    expected, _ = await _undisturbed(page=500)
    store = Failing(asyncio.get_running_loop().time)
    store.fail_at, store.outage = write, 10.0
    place, journal = Place(store=store, backlog=2), Journal()
    one = _pipeline(journal)
    ended = await place.run(one)
    assert store.refused > 3
    assert await _essence(place, ended, one) == expected
    assert len(set(journal.calls)) == len(journal.calls)
    assert place.ear.heard("the disk is on fire")


@on_virtual_time
async def test_a_store_that_stays_away_ends_the_run_and_leaves_the_job_for_a_resume() -> None:
    expected, _ = await _undisturbed(page=500)
    store = Failing(asyncio.get_running_loop().time)
    store.fail_at, store.outage = 4, 1000.0
    place, journal = Place(store=store), Journal()
    one = _pipeline(journal)
    with pytest.raises(StoreFailed):
        await place.run(one)
    assert place.clock.monotonic() < 40
    left = await store.get("job")
    assert left is not None
    assert left.status is _S.RUNNING
    await asyncio.sleep(1000)
    again = _pipeline(Journal())
    ended = await (await place.claimed(again)).run()
    assert await _essence(place, ended, again) == expected


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
    one = _versions(journal, *names)
    await place.create(one)
    orchestrator = await place.claimed(one)
    running = asyncio.ensure_future(orchestrator.run())
    await asyncio.sleep(1)
    assert journal.calls[-1] == ("stop", "")
    place.lost = running  # type: ignore[attr-defined]


async def _gone_on(place: Place, *names: str, **options: Any) -> tuple[Any, list[str]]:
    journal = Journal()
    journal.calls.append(("again", ""))
    one = _versions(journal, *names, **options)
    ended = await (await place.claimed(one)).run()
    place.lost.cancel()  # type: ignore[attr-defined]
    await asyncio.wait((place.lost,))  # type: ignore[attr-defined]
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


@on_virtual_time
async def test_a_changed_pipeline_may_restart() -> None:
    place = Place()
    await _left_in(place, "a", "b", "stop")
    ended, ran = await _gone_on(place, "b", "stop", "c", on_change="restart")
    assert ended.status is _S.COMPLETED
    assert ran == ["b", "stop", "c"]
    assert place.ear.heard("the pipeline was changed")


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
