"""Jobs that stages of a pipeline submit: children of the run, in its tenant."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.support.waiting import eventually

import penstock


def made(mode: str, *, distributed: bool = False) -> penstock.App:
    app = penstock.App()

    @app.job("job.square")
    def square(n: int) -> int:
        return n * n

    pipeline = penstock.Pipeline("squares")

    async def asquared(n: int) -> int:
        return await (await square.asubmit(n)).aresult()

    def squared(n: int) -> int:
        return square.submit(n).result()

    pipeline.map(over=lambda config: [1, 2, 3], distributed=distributed)(
        asquared if mode == "async" else squared
    )

    @pipeline.step()
    def total(results: Any) -> int:
        return sum(results)

    app.add(pipeline)
    return app


@pytest.mark.timeout(60)
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("mode", ["async", "thread"])
def test_a_stage_submits_children_and_a_worker_with_one_slot_runs_them(
    tmp_path: Path, mode: str, distributed: bool
) -> None:
    app = made(mode, distributed=distributed)
    with app.run(tmp_path, concurrency=1) as ps:
        record = ps.pipelines.start("squares", {}, tenant="t1")
        result = ps.get(record.id).result()
        squares = ps.jobs(topic="job.square")
    assert result["output"] == 14
    assert len(squares) == 3
    assert {job.record.request.tenant for job in squares} == {"t1"}
    parents = {job.record.request.child_of for job in squares}
    if distributed:
        assert record.id not in parents
    else:
        assert parents == {record.id}


def test_what_equal_items_submit_is_run_for_each(tmp_path: Path) -> None:
    app = penstock.App()

    @app.job("job.one")
    def one() -> int:
        return 1

    pipeline = penstock.Pipeline("ones")

    @pipeline.map(over=lambda config: ["a", "b"])
    async def each(name: str) -> int:
        return await (await one.asubmit()).aresult()

    app.add(pipeline)
    with app.run(tmp_path, concurrency=1) as ps:
        record = ps.pipelines.start("ones", {})
        ps.get(record.id).result()
        assert len(ps.jobs(child_of=record.id)) == 2


def test_children_of_a_cancelled_run_end_with_it(tmp_path: Path) -> None:
    app = penstock.App()

    @app.job("job.long")
    async def long() -> None:
        await asyncio.sleep(3600)

    pipeline = penstock.Pipeline("waits")

    @pipeline.step()
    async def wait() -> None:
        await (await long.asubmit()).aresult()

    app.add(pipeline)
    with app.run(tmp_path) as ps:
        record = ps.pipelines.start("waits", {})
        eventually(
            lambda: ps.jobs(child_of=record.id, states=(penstock.JobState.RUNNING,)),
            "the child runs",
        )
        answer = ps.pipelines.cancel(record.id)
        (child,) = ps.jobs(child_of=record.id)
        assert answer.status is penstock.PipelineJobStatus.CANCELLED
        assert child.wait().state is penstock.JobState.CANCELLED
