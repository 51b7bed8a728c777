"""Retrying what failed: what succeeded before is taken over, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import Struct
from msgspec.structs import replace
from tests.support.pipeline.pipeline_jobs import on_virtual_time
from tests.support.pipeline.pipeline_runs import Place, reasons, stage_of, statuses

from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.workloads.pipeline.definition import Definition

_S = PipelineJobStatus


class Config(Struct):
    numbers: tuple[int, ...] = (1, 2, 3)
    enable_last: bool = True


class World:
    """What stages meet outside: it may be broken, and it notes who came."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.bad: set[Any] = set()
        self.asked = 0
        self.listed = ["a", "b"]
        self.factor = 10

    def came(self) -> list[str]:
        calls, self.calls = self.calls, []
        return calls


def _pipeline(world: World, version: str = "") -> Definition:
    one = Definition("one", config=Config)

    async def letters() -> Any:
        world.asked += 1
        for letter in world.listed:
            yield letter

    @one.map(over="numbers", version=version)
    async def first(number: int, ctx: Any) -> int:
        world.calls.append(f"first {number}")
        ctx.metric("counted")
        if number in world.bad:
            raise ValueError("bad")
        return number * world.factor

    @one.map(over=first)
    async def second(number: int) -> int:
        world.calls.append(f"second {number}")
        return number + 1

    @one.map(over=letters)
    async def spelled(letter: str) -> str:
        world.calls.append(f"spelled {letter}")
        if letter in world.bad:
            raise ValueError("bad")
        return letter.upper()

    @one.step(of=second)
    async def total(results: Any, ctx: Any) -> int:
        world.calls.append("total")
        ctx.metric("summed")
        return sum([number async for number in results])

    @one.step(enabled="enable_last")
    async def last(results: Any, ctx: Any) -> str:
        world.calls.append("last")
        if "last" in world.bad:
            raise ValueError("bad")
        if "complain" in world.bad:
            ctx.error("not quite")
        return "done"

    return one


async def _again(place: Place, one: Definition, **config: Any) -> Any:
    return await place.run(one, config or None, "again", parent_job_id="job")


@on_virtual_time
async def test_only_what_failed_and_what_depends_on_it_is_run_again() -> None:
    place, world = Place(), World()
    world.bad = {2, "a"}
    one = _pipeline(world)
    assert (await place.run(one)).status is _S.PARTIAL
    world.came()
    world.bad = set()
    ended = await _again(place, one)
    assert ended.status is _S.COMPLETED
    assert world.came() == ["first 2", "second 20", "spelled a", "total", "last"]
    assert await place.outputs("second", "again") == [11, 21, 31]
    assert await place.outputs("total", "again") == [63]
    first = stage_of(ended, "first")
    assert (first.ok, first.reused) == (3, 2)
    assert [item.reused for item in await place.items("first", "again")] == [True, False, True]
    assert ended.summary is not None
    assert ended.summary.trigger == "retry"


@on_virtual_time
async def test_where_a_stage_goes_over_is_copied_and_not_asked_again() -> None:
    place, world = Place(page=1), World()
    world.bad = {"a"}
    one = _pipeline(world)
    await place.run(one)
    world.bad, world.listed = set(), ["something", "else"]
    await _again(place, one)
    assert world.asked == 1
    assert await place.outputs("spelled", "again") == ["A", "B"]


@on_virtual_time
async def test_a_step_is_taken_over_only_if_all_before_it_was() -> None:
    place, world = Place(), World()
    world.bad = {"last"}
    one = _pipeline(world)
    await place.run(one)
    world.came()
    world.bad = set()
    ended = await _again(place, one)
    assert world.came() == ["last"]
    total = stage_of(ended, "total")
    assert (total.reused, total.metrics) == (1, {"summed": 1})
    assert await place.outputs("total", "again") == [63]
    assert ended.status is _S.COMPLETED


@on_virtual_time
async def test_an_item_whose_input_changed_is_run_again() -> None:
    place, world = Place(), World()
    world.bad = {2}
    one = _pipeline(world)
    await place.run(one)
    world.came()
    world.bad, world.factor = set(), 100
    await _again(place, one)
    assert world.came() == ["first 2", "second 200", "total", "last"]
    assert await place.outputs("second", "again") == [11, 201, 31]


@on_virtual_time
async def test_a_stage_of_another_version_is_run_as_a_whole() -> None:
    place, world = Place(), World()
    world.bad = {"a"}
    await place.run(_pipeline(world))
    world.came()
    world.bad = set()
    await _again(place, _pipeline(world, version="2"))
    assert world.came()[:3] == ["first 1", "first 2", "first 3"]


@on_virtual_time
async def test_a_step_that_complained_is_run_again() -> None:
    place, world = Place(), World()
    world.bad = {"complain"}
    one = _pipeline(world)
    assert (await place.run(one)).status is _S.PARTIAL
    world.came()
    world.bad = set()
    ended = await _again(place, one)
    assert (ended.status, world.came()) == (_S.COMPLETED, ["last"])


@on_virtual_time
async def test_flags_are_looked_at_as_usual() -> None:
    place, world = Place(), World()
    world.bad = {"a"}
    one = _pipeline(world)
    await place.run(one)
    world.came()
    ended = await _again(place, one, enable_last=False)
    assert "last" not in world.came()
    assert (statuses(ended)["last"], reasons(ended)["last"]) == ("skipped", "disabled")


@on_virtual_time
async def test_metrics_go_on_from_those_of_the_run_before() -> None:
    place, world = Place(), World()
    world.bad = {2}
    one = _pipeline(world)
    before = await place.run(one)
    world.bad = set()
    ended = await _again(place, one)
    assert stage_of(before, "first").metrics == {"counted": 3}
    assert stage_of(ended, "first").metrics == {"counted": 4}  # one of them was counted twice
    assert stage_of(ended, "first").total == 3


@on_virtual_time
async def test_a_run_that_was_forgotten_is_simply_run_again() -> None:
    place, world = Place(), World()
    ended = await place.run(_pipeline(world), None, "again", parent_job_id="gone")
    assert ended.status is _S.COMPLETED
    assert stage_of(ended, "first").reused == 0


@pytest.mark.parametrize("stranger", [{"tenant": "another"}, {"topic": "job.pipeline.another"}])
@on_virtual_time
async def test_nothing_is_taken_over_from_a_strangers_run(stranger: dict[str, str]) -> None:
    place, world = Place(), World()
    one = _pipeline(world)
    await place.run(one)
    job = place.engine.jobs["job"]
    place.engine.jobs["job"] = replace(job, request=replace(job.request, **stranger))
    world.came()
    ended = await _again(place, one)
    assert (ended.status, ended.retry_of) == (_S.COMPLETED, None)
    assert stage_of(ended, "first").reused == 0
    assert "first 1" in world.came()


@on_virtual_time
async def test_a_retry_that_lost_its_worker_counts_what_it_took_over_once() -> None:
    place, world = Place(), World()
    world.bad = {2}
    one = _pipeline(world)
    await place.run(one)
    world.bad = set()
    undisturbed = stage_of(await _again(place, one), "first")
    for last in range(1, 12):
        job_id = f"again-{last}"
        await place.create(one, None, job_id, parent_job_id="job")
        await place.crash_after(last, one, job_id)
        first = stage_of(await place.go_on(one, job_id), "first")
        assert (first.ok, first.reused) == (3, 2)
        assert first.metrics == undisturbed.metrics == {"counted": 4}
