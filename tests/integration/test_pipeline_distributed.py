"""Stages whose items are jobs of their own: the same outcome as where they are not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

import penstock
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.workloads.pipeline.records import ErrorClass, PipelineEventKind


class Config(msgspec.Struct, frozen=True, kw_only=True):
    names: tuple[str, ...] = ("a", "b", "c")


def app_of(*pipelines: penstock.Pipeline) -> penstock.App:
    app = penstock.App()
    app.add(*pipelines)
    return app


both = pytest.mark.parametrize("distributed", [False, True], ids=["here", "distributed"])


@both
def test_a_stage_that_takes_too_long_ends_and_its_run_goes_on(
    tmp_path: Path, distributed: bool
) -> None:
    pipeline = penstock.Pipeline("slow", config=Config, cancel_grace=1.0)

    @pipeline.map(over="names", concurrency=3, stage_timeout=1.0, distributed=distributed)
    async def slow(name: str) -> str:
        await asyncio.sleep(0 if name == "a" else 3600)
        return name

    @pipeline.map(over="names", distributed=True)
    async def after(name: str) -> str:
        return name

    with app_of(pipeline).run(tmp_path) as ps:
        run = ps.pipelines.start("slow")
        assert ps.get(run.id).wait(timeout=20).state is penstock.JobState.SUCCEEDED
        record = ps.pipelines.get(run.id)
        assert record.status is PipelineJobStatus.PARTIAL
        assert [(stage.name, stage.ok, stage.failed) for stage in record.stages] == [
            ("slow", 1, 2),
            ("after", 3, 0),
        ]
        items = ps.pipelines.items(run.id, "slow")
        assert [item.error_class for item in items] == [None, *[ErrorClass.TIMEOUT] * 2]
        for child in ps.jobs(workflow_id=run.id, topic="*.slow"):
            child.wait(timeout=20)  # none is left running


@both
def test_what_an_item_reports_is_the_same_wherever_it_runs(
    tmp_path: Path, distributed: bool
) -> None:
    pipeline = penstock.Pipeline("report", config=Config)

    @pipeline.map(over="names", concurrency=1, distributed=distributed, retry=1)
    async def one(name: str, ctx: Any) -> str:
        ctx.metric("seen", 2)
        ctx.metric("latest", 7, set=True)
        ctx.metric("name", name)
        ctx.emit({"hello": name})
        if name == "a":
            raise ValueError("never any good")
        if name == "b":
            raise ConnectionError("not now")
        return name

    with app_of(pipeline).run(tmp_path) as ps:
        run = ps.pipelines.start("report")
        ps.get(run.id).wait(timeout=20)
        (stage,) = ps.pipelines.get(run.id).stages
        assert stage.metrics == {"seen": 6, "latest": 7, "name": "c"}
        assert [
            (item.error_class, item.error_code, item.error, item.attempts)
            for item in ps.pipelines.items(run.id, "one")
        ] == [
            (ErrorClass.PERMANENT, "ValueError", "never any good", 1),
            (ErrorClass.TRANSIENT, "ConnectionError", "not now", 2),
            (None, "", "", 1),
        ]
        said = [e.data for e in ps.pipelines.stream(run.id) if e.kind is PipelineEventKind.CUSTOM]
        assert [(one["stage"], one["key"], one["data"]["hello"]) for one in said] == [
            ("one", "0", "a"),
            ("one", "1", "b"),
            ("one", "1", "b"),
            ("one", "2", "c"),
        ]


@both
def test_a_changed_pipeline_that_starts_over_runs_its_new_code(
    tmp_path: Path, distributed: bool
) -> None:
    def words(version: str, waits: bool) -> penstock.Pipeline:
        pipeline = penstock.Pipeline("words", config=Config, on_change="restart")

        @pipeline.map(over="names", distributed=distributed, version=version)
        async def one(name: str) -> str:
            return name + version

        @pipeline.step()
        async def two(results: Any) -> Any:
            if waits:
                await asyncio.sleep(3600)
            return await results.list()

        return pipeline

    async def begin() -> str:
        async with app_of(words("1", waits=True)).run(tmp_path) as ps:
            run = await ps.pipelines.astart("words")
            async for event in ps.pipelines.astream(run.id):
                if event.data.get("stage") == "two":
                    return run.id
        raise AssertionError

    job_id = asyncio.run(begin())
    with app_of(words("2", waits=False)).run(tmp_path, lost_grace=0.1) as ps:
        assert ps.get(job_id).result(timeout=20)["output"] == ["a2", "b2", "c2"]


def test_items_know_how_much_earlier_stages_gave(tmp_path: Path) -> None:
    pipeline = penstock.Pipeline("count", config=Config)

    @pipeline.map(over="names")
    async def first(name: str) -> list[str]:
        return [name, name]

    @pipeline.map(over="names", distributed=True)
    async def second(name: str, ctx: Any) -> list[int]:
        return [ctx.results("first").count]

    @pipeline.step(of=second, distributed=True)
    async def third(results: Any, ctx: Any) -> list[int]:
        return [n async for n in results] + [ctx.results("first").count]

    with app_of(pipeline).run(tmp_path) as ps:
        run = ps.pipelines.start("count")
        assert ps.get(run.id).result(timeout=20)["output"] == [6, 6, 6, 6]
