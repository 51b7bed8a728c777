"""Stages whose items are jobs of their own: the same outcome as where they are not."""

from __future__ import annotations

import asyncio
import threading
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
    with app_of(words("2", waits=False)).run(tmp_path, timeouts__lost_grace=0.1) as ps:
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


# -- whose they are ---------------------------------------------------------------


def test_children_have_the_tenant_and_the_rights_of_their_run(tmp_path: Path) -> None:
    pipeline = penstock.Pipeline("far", config=Config)

    @pipeline.map(over="names", distributed=True)
    async def one(name: str) -> str:
        return name

    rules = tmp_path / "rules.toml"
    rules.write_text(
        """
        default = "allow"

        [[rules]]
        id = "not-secret"
        topics = ["job.pipeline.far.one"]
        labels = { class = "secret" }
        decision = "deny"
        reason = "it stays here"
        """
    )
    with app_of(pipeline).run(tmp_path / "data", rules=str(rules)) as ps:
        options = {"priority": penstock.Priority.INTERACTIVE, "risk_tags": ("pii",)}
        run = ps.submit("job.pipeline.far", {}, tenant="acme", labels={"class": "open"}, **options)
        run.result(timeout=20)
        mine = run.refresh().request
        for child in ps.jobs(workflow_id=run.job_id):
            theirs = child.record.request
            for field in ("tenant", "principal", "priority", "risk_tags", "labels", "env"):
                assert getattr(theirs, field) == getattr(mine, field), field
            assert (theirs.parent_job_id, theirs.child_of) == (run.job_id, run.job_id)
        denied = ps.submit("job.pipeline.far", {}, tenant="acme", labels={"class": "secret"})
        assert denied.wait(timeout=20).state is penstock.JobState.FAILED
        items = ps.pipelines.items(denied.job_id, "one")
        assert {(item.error_class, item.attempts) for item in items} == {(ErrorClass.PERMANENT, 1)}
        assert all("it stays here" in item.error for item in items)


def test_a_stage_out_of_time_ends_its_own_children_and_no_others(tmp_path: Path) -> None:
    going, open_ = threading.Event(), threading.Event()

    def hanging(name: str, stage_timeout: float | None) -> penstock.Pipeline:
        pipeline = penstock.Pipeline(name, config=Config, cancel_grace=1.0)

        @pipeline.map(over="names", stage_timeout=stage_timeout, distributed=True)
        async def one(item: str) -> str:
            if name == "patient":
                going.set()
            while not (name == "patient" and open_.is_set()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return item

        @pipeline.step()
        async def two() -> str:
            return "went on"

        return pipeline

    with app_of(hanging("patient", None), hanging("hasty", 0.3)).run(tmp_path) as ps:
        other = ps.pipelines.start("patient")
        assert going.wait(20)
        run = ps.pipelines.start("hasty")
        ps.get(run.id).wait(timeout=20)
        record = ps.pipelines.get(run.id)
        assert [stage.status.value for stage in record.stages] == ["failed", "completed"]
        assert not record.cancel_requested
        for child in ps.jobs(workflow_id=run.id):
            assert child.wait(timeout=20).state is penstock.JobState.CANCELLED
        open_.set()
        assert ps.get(other.id).result(timeout=20)["output"] == "went on"
        theirs = [child.record.state for child in ps.jobs(workflow_id=other.id)]
        assert theirs == [penstock.JobState.SUCCEEDED] * 3


def test_only_the_children_that_failed_are_run_again(tmp_path: Path) -> None:
    broken, calls = [True], []
    pipeline = penstock.Pipeline("mend", config=Config)

    @pipeline.map(over="names", distributed=True)
    async def one(name: str) -> str:
        calls.append(name)
        if name == "b" and broken:
            raise ValueError("not yet")
        return name

    @pipeline.step()
    async def two(results: Any) -> Any:
        return await results.list()

    with app_of(pipeline).run(tmp_path) as ps:
        run = ps.pipelines.start("mend")
        assert ps.get(run.id).result(timeout=20)["output"] == ["a", "c"]
        broken.clear()
        calls.clear()
        again = ps.pipelines.retry_failed(run.id)
        assert ps.get(again.id).result(timeout=20)["output"] == ["a", "b", "c"]
        assert calls == ["b"]
        assert [child.record.request.step_index for child in ps.jobs(workflow_id=again.id)] == [1]
        assert len(ps.jobs(workflow_id=run.id)) == 3


def test_a_worker_with_one_slot_runs_a_run_and_its_children(tmp_path: Path) -> None:
    pipeline = penstock.Pipeline("narrow", config=Config, single_flight=False)
    at_once, most = [0], [0]

    @pipeline.map(over="names", concurrency=3, distributed=True)
    async def one(name: str) -> str:
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        await asyncio.sleep(0.01)
        at_once[0] -= 1
        return name

    @pipeline.step(distributed=True)
    async def two(results: Any) -> Any:
        return await results.list()

    with app_of(pipeline).run(tmp_path, concurrency=1) as ps:
        runs = [ps.pipelines.start("narrow") for _ in range(3)]
        for run in runs:
            assert ps.get(run.id).result(timeout=20)["output"] == ["a", "b", "c"]
    assert most == [1]


def test_a_child_that_was_lost_with_its_engine_is_found_again_and_none_runs_twice(
    tmp_path: Path,
) -> None:
    calls: list[str] = []
    hangs, reached = [True], threading.Event()
    pipeline = penstock.Pipeline("far", config=Config)

    @pipeline.map(over="names", concurrency=1, distributed=True)
    async def one(name: str) -> str:
        calls.append(name)
        if name == "b" and hangs:
            reached.set()
            await asyncio.sleep(3600)
        return name

    with app_of(pipeline).run(tmp_path, timeouts__lost_grace=0.1) as ps:
        run = ps.pipelines.start("far")
        assert reached.wait(20)
    hangs.clear()
    with app_of(pipeline).run(tmp_path, timeouts__lost_grace=0.1) as ps:
        assert ps.get(run.id).wait(timeout=20).state is penstock.JobState.SUCCEEDED
        assert calls == ["a", "b", "b", "c"]
        assert len(ps.jobs(workflow_id=run.id)) == 3


def test_events_of_one_item_that_emits_a_lot_arrive_in_order(tmp_path: Path) -> None:
    pipeline = penstock.Pipeline("loud", config=Config)

    @pipeline.step()
    async def here(ctx: Any) -> None:
        for n in range(350):
            ctx.emit({"n": n})

    @pipeline.step(distributed=True)
    async def far(ctx: Any) -> None:
        for n in range(350):
            ctx.emit({"n": n})

    with app_of(pipeline).run(tmp_path) as ps:
        run = ps.pipelines.start("loud")
        assert ps.get(run.id).wait(timeout=20).state is penstock.JobState.SUCCEEDED
        said = [e.data for e in ps.pipelines.stream(run.id) if e.kind is PipelineEventKind.CUSTOM]
        told = {
            name: [o["data"]["n"] for o in said if o["stage"] == name] for name in ("here", "far")
        }
        assert told == {"here": list(range(350)), "far": list(range(350))}
