"""Pipelines under the engine: a run is a canonical job and the rows that it checkpoints."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.waiting import eventually

import penstock
from penstock.adapters.sqlite.store import SqliteBackend
from penstock.app.offline import offline
from penstock.config import load
from penstock.core.errors import StoreFull
from penstock.core.ledger import Checkpoint
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.store import AuditQuery
from penstock.testing.aio import run_async
from penstock.workloads.pipeline.records import STALE_MESSAGE, PipelineEventKind


class Config(msgspec.Struct, frozen=True, kw_only=True):
    names: tuple[str, ...] = ("a", "b", "c")
    loud: bool = False
    times: int = 1


def words(**options: Any) -> penstock.Pipeline:
    """Three stages: a map over the config, a map over that, and a step."""
    pipeline = penstock.Pipeline("words", config=Config, **options)

    @pipeline.map(concurrency=2)
    async def fetch(name: str, ctx: Any) -> str:
        if name == "bad":
            raise ValueError("there is no such word")
        return name * ctx.config.times

    @pipeline.map(over=fetch)
    def upper(name: str, ctx: Any) -> str:
        return name.upper()

    @pipeline.step(enabled="loud")
    async def shout(results: Any, ctx: Any) -> str:
        return "".join([name async for name in results]) + "!"

    return pipeline


def app_of(*pipelines: penstock.Pipeline) -> penstock.App:
    app = penstock.App()
    app.add(*pipelines)
    return app


def test_a_run_is_a_canonical_job_whose_result_tells_what_came_of_it(tmp_path: Path) -> None:
    with app_of(words()).run(tmp_path) as ps:
        run = ps.pipelines.start("words", {"loud": True})
        job = ps.get(run.id)
        result = job.result(timeout=20)
        assert job.refresh().state is penstock.JobState.SUCCEEDED
        assert job.record.request.topic == "job.pipeline.words"
        assert result["status"] == "COMPLETED"
        assert result["output"] == "ABC!"
        record = ps.pipelines.get(run.id)
        assert record.status is PipelineJobStatus.COMPLETED
        assert record.trace_id == run.trace_id
        assert len(record.trace_id) == 36
        assert record.config == {"names": ["a", "b", "c"], "loud": True, "times": 1}
        assert [stage.status for stage in record.stages] == ["completed"] * 3


def test_a_failed_item_makes_the_run_partial_and_is_listed(tmp_path: Path) -> None:
    with app_of(words()).run(tmp_path) as ps:
        run = ps.pipelines.start("words", {"names": ["a", "bad", "c"]})
        job = ps.get(run.id)
        job.result(timeout=20)
        record = job.refresh()
        assert record.state is penstock.JobState.SUCCEEDED
        assert record.result is not None
        assert record.result.error_code == "PARTIAL"
        assert ps.pipelines.get(run.id).status is PipelineJobStatus.PARTIAL
        failed = ps.pipelines.items(run.id, "fetch", outcomes=(penstock.ItemOutcome.FAILED,))
        assert [(item.seq, item.error_code) for item in failed] == [(1, "ValueError")]
        assert failed[0].error_class == "permanent"


def test_a_run_in_which_all_fails_fails_its_job(tmp_path: Path) -> None:
    with app_of(words()).run(tmp_path) as ps:
        run = ps.pipelines.start("words", {"names": ["bad"]})
        with pytest.raises(penstock.JobFailed, match="no such word"):
            ps.get(run.id).result(timeout=20)
        assert ps.pipelines.get(run.id).status is PipelineJobStatus.FAILED


def test_a_wrong_config_names_its_field_and_stores_nothing(tmp_path: Path) -> None:
    with app_of(words()).run(tmp_path) as ps:
        for config, field in (
            ({"times": "x"}, "config.times"),
            ({"nmaes": []}, "config.nmaes"),
            ({"names": [1]}, "config.names"),
        ):
            with pytest.raises(penstock.InvalidRequest) as caught:
                ps.pipelines.start("words", config)
            assert caught.value.field.startswith(field)
        assert ps.jobs() == []
        assert ps.pipelines.runs(penstock.RunQuery()) == []


def test_a_job_submitted_by_its_topic_is_checked_and_run_as_well(tmp_path: Path) -> None:
    with app_of(words()).run(tmp_path) as ps:
        with pytest.raises(penstock.InvalidRequest, match=r"config\.times"):
            ps.submit("job.pipeline.words", {"times": "x"})
        job = ps.submit("job.pipeline.words", {"loud": True, "times": 2})
        assert job.result(timeout=20)["output"] == "AABBCC!"


def test_an_unknown_pipeline_is_not_found_and_a_near_name_is_told(tmp_path: Path) -> None:
    with app_of(words()).run(tmp_path) as ps:
        with pytest.raises(penstock.NotFound, match="did you mean words"):
            ps.pipelines.start("word")
        with pytest.raises(penstock.NotFound, match="no stage 'fetsch'"):
            run = ps.pipelines.start("words")
            ps.get(run.id).result(timeout=20)
            ps.pipelines.items(run.id, "fetsch")


class Gate:
    """A stage that waits until it is let go."""

    def __init__(self, **options: Any) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.pipeline = pipeline = penstock.Pipeline("gate", **options)

        @pipeline.step()
        async def wait(ctx: Any) -> str:
            self.reached.set()
            while not self.open.is_set():  # noqa: ASYNC110 - another thread opens it
                await asyncio.sleep(0.005)
            return "through"

        @pipeline.step()
        async def after(ctx: Any) -> str:
            return "done"


@pytest.mark.seed("002", "7.18")
def test_a_second_start_of_a_single_flight_pipeline_is_refused_with_the_job_s_id(
    tmp_path: Path,
) -> None:
    gate = Gate()
    with app_of(gate.pipeline).run(tmp_path) as ps:
        first = ps.pipelines.start("gate")
        with pytest.raises(penstock.PipelineBusy) as caught:
            ps.pipelines.start("gate")
        assert caught.value.running == first.id
        assert len(ps.jobs()) == 1
        gate.open.set()
        ps.get(first.id).result(timeout=20)
        second = ps.pipelines.start("gate")
        assert ps.get(second.id).result(timeout=20)["output"] == "done"


def test_the_same_key_starts_one_run(tmp_path: Path) -> None:
    gate = Gate()
    with app_of(gate.pipeline).run(tmp_path) as ps:
        first = ps.pipelines.start("gate", idempotency_key="today")
        assert ps.pipelines.start("gate", idempotency_key="today").id == first.id
        gate.open.set()
        ps.get(first.id).result(timeout=20)
        assert ps.pipelines.start("gate", idempotency_key="today").id == first.id


def test_a_cancelled_run_has_stopped_and_the_answer_says_so(tmp_path: Path) -> None:
    gate = Gate(cancel_grace=1)
    with app_of(gate.pipeline).run(tmp_path) as ps:
        run = ps.pipelines.start("gate")
        assert gate.reached.wait(20)
        answer = ps.pipelines.cancel(run.id)
        assert (answer.accepted, answer.status) == (True, PipelineJobStatus.CANCELLED)
        record = ps.pipelines.get(run.id)
        assert record.cancel_requested
        assert record.cancel_effective
        assert record.finished_at is not None
        assert record.abandoned_items == ()
        assert ps.get(run.id).record.state is penstock.JobState.CANCELLED
        again = ps.pipelines.cancel(run.id)
        assert (again.accepted, again.status) == (False, PipelineJobStatus.CANCELLED)


def test_a_plain_cancel_of_the_job_cancels_the_run(tmp_path: Path) -> None:
    gate = Gate(cancel_grace=1)
    with app_of(gate.pipeline).run(tmp_path) as ps:
        run = ps.pipelines.start("gate")
        assert gate.reached.wait(20)
        assert ps.get(run.id).cancel().ended
        assert ps.pipelines.get(run.id).status is PipelineJobStatus.CANCELLED


@pytest.mark.seed("002", "1.3", "7.6", "8.4")
def test_a_run_that_is_cancelled_before_it_starts_never_runs(tmp_path: Path) -> None:
    gate = Gate()
    app = app_of(gate.pipeline)
    with app.run(tmp_path) as ps:
        ps.pause_pool("default")
        run = ps.pipelines.start("gate")
        answer = ps.pipelines.cancel(run.id)
        assert (answer.accepted, answer.status) == (True, PipelineJobStatus.CANCELLED)
        record = ps.pipelines.get(run.id)
        assert record.finished_at is not None
        assert record.started_at is None
        assert not gate.reached.is_set()


def test_retry_failed_runs_what_failed_and_what_depends_on_it(tmp_path: Path) -> None:
    calls: list[str] = []
    broken = True
    pipeline = penstock.Pipeline("mend")

    @pipeline.map(over=lambda config, ctx: ["a", "b", "c"])
    async def first(name: str, ctx: Any) -> str:
        calls.append(f"first {name}")
        if name == "b" and broken:
            raise ValueError("not yet")
        return name

    @pipeline.map(over=first)
    async def second(name: str, ctx: Any) -> str:
        calls.append(f"second {name}")
        return name.upper()

    @pipeline.step()
    async def last(results: Any, ctx: Any) -> str:
        calls.append("last")
        return "".join([name async for name in results])

    with app_of(pipeline).run(tmp_path) as ps:
        run = ps.pipelines.start("mend")
        with pytest.raises(penstock.PenstockError):
            ps.pipelines.retry_failed(run.id)
        assert ps.get(run.id).result(timeout=20)["output"] == "AC"
        calls.clear()
        broken = False
        retried = ps.pipelines.retry_failed(run.id)
        assert retried.retry_of == run.id
        assert ps.get(retried.id).result(timeout=20) == {
            "status": "COMPLETED",
            "output": "ABC",
            "stages": {
                "first": {"status": "completed", "total": 3, "ok": 3, "failed": 0},
                "second": {"status": "completed", "total": 3, "ok": 3, "failed": 0},
                "last": {"status": "completed", "total": 1, "ok": 1, "failed": 0},
            },
            "errors": [],
            "alerts": [],
        }
        assert calls == ["first b", "second b", "last"]
        with pytest.raises(penstock.InvalidRequest, match="nothing failed"):
            ps.pipelines.retry_failed(retried.id)


@pytest.mark.seed("002", "7.19")
def test_events_tell_every_stage_and_can_be_resumed(tmp_path: Path) -> None:
    with app_of(words()).run(tmp_path) as ps:
        run = ps.pipelines.start("words")
        live = list(ps.pipelines.stream(run.id))
        events = [event for event in live if event.kind is not PipelineEventKind.STAGE_PROGRESS]
        kinds = [event.kind for event in events]
        assert kinds[-1] is PipelineEventKind.JOB_COMPLETE
        told = [
            (event.kind.value, event.data.get("stage") or event.data.get("name"))
            for event in events
            if event.kind in (PipelineEventKind.STAGE_START, PipelineEventKind.STAGE_COMPLETE)
        ]
        assert told[:4] == [
            ("stage_start", "fetch"),
            ("stage_complete", "fetch"),
            ("stage_start", "upper"),
            ("stage_complete", "upper"),
        ]
        ids = [event.id or 0 for event in events]
        assert ids == sorted(set(ids))
        rest = list(ps.pipelines.stream(run.id, after=ids[2]))
        assert rest == events[3:]


def test_an_engine_that_is_stopped_leaves_a_run_to_the_next_one(tmp_path: Path) -> None:
    calls: list[str] = []
    gate = Gate()
    pipeline = penstock.Pipeline("slow")

    @pipeline.step()
    async def one(ctx: Any) -> int:
        calls.append("one")
        return 1

    @pipeline.step()
    async def two(ctx: Any) -> int:
        calls.append("two")
        gate.reached.set()
        while not gate.open.is_set():  # noqa: ASYNC110 - another thread opens it
            await asyncio.sleep(0.005)
        return 2

    app = app_of(pipeline)
    with app.run(tmp_path, timeouts__lost_grace=0.1) as ps:
        run = ps.pipelines.start("slow")
        assert gate.reached.wait(20)
    gate.open.set()
    with app.run(tmp_path, timeouts__lost_grace=0.1) as ps:
        assert ps.get(run.id).result(timeout=20)["output"] == 2
        assert calls == ["one", "two", "two"]
        assert ps.pipelines.get(run.id).attempt == 2
        assert ps.verify().mismatches == ()


def test_distributed_items_are_child_jobs_in_order(tmp_path: Path) -> None:
    pipeline = penstock.Pipeline("far")

    @pipeline.map(over=lambda config, ctx: [3, 1, 2], distributed=True)
    async def double(n: int, ctx: Any) -> int:
        if n == 1:
            raise ValueError("one is no good")
        ctx.metric("seen", n)
        return n * 2

    @pipeline.step()
    async def together(results: Any, ctx: Any) -> list[int]:
        return [n async for n in results]

    with app_of(pipeline).run(tmp_path) as ps:
        run = ps.pipelines.start("far")
        assert ps.get(run.id).result(timeout=20)["output"] == [6, 4]
        children = ps.jobs(workflow_id=run.id)
        assert [child.record.request.step_index for child in children] == [0, 1, 2]
        assert {child.record.request.parent_job_id for child in children} == {run.id}
        assert {child.record.request.topic for child in children} == {"job.pipeline.far.double"}
        assert [child.record.state.value for child in children] == [
            "SUCCEEDED",
            "FAILED",
            "SUCCEEDED",
        ]
        stage = ps.pipelines.get(run.id).stage("double")
        assert stage is not None
        assert stage.metrics == {"seen": 5}
        items = ps.pipelines.items(run.id, "double")
        assert [item.outcome.value for item in items] == ["ok", "failed", "ok"]


def test_a_cancelled_run_cancels_its_child_jobs(tmp_path: Path) -> None:
    started = threading.Event()
    pipeline = penstock.Pipeline("far", cancel_grace=1)

    @pipeline.map(over=lambda config, ctx: range(3), distributed=True)
    async def forever(n: int, ctx: Any) -> None:
        started.set()
        await asyncio.sleep(3600)

    with app_of(pipeline).run(tmp_path) as ps:
        run = ps.pipelines.start("far")
        assert started.wait(20)
        assert ps.pipelines.cancel(run.id).status is PipelineJobStatus.CANCELLED
        for child in ps.jobs(workflow_id=run.id):
            child.wait(timeout=20)
            assert child.refresh().state is penstock.JobState.CANCELLED


def test_a_run_over_its_time_limit_is_failed_in_the_seed_s_words(tmp_path: Path) -> None:
    gate = Gate(timeout=0.3, cancel_grace=0.2)
    with app_of(gate.pipeline).run(tmp_path) as ps:
        run = ps.pipelines.start("gate")
        with pytest.raises(penstock.JobTimedOut):
            ps.get(run.id).result(timeout=20)
        record = ps.pipelines.get(run.id)
        assert record.status is PipelineJobStatus.FAILED
        assert any(
            STALE_MESSAGE in error.message or "0.3 s" in error.message for error in record.errors
        )


def test_a_pipeline_alone_in_a_script_starts_an_engine_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_DATA_DIR", str(tmp_path / "data"))
    pipeline = words()
    try:

        async def main() -> Any:
            job = await pipeline.start(Config(loud=True))
            return await job

        assert asyncio.run(main())["output"] == "ABC!"
        assert pipeline.run(Config()).status is PipelineJobStatus.COMPLETED
    finally:
        pipeline.close()


def test_runs_can_be_listed_by_pipeline_and_status(tmp_path: Path) -> None:
    with app_of(words(single_flight=False)).run(tmp_path) as ps:
        runs = [ps.pipelines.start("words", {"names": names}) for names in (["a"], ["bad", "a"])]
        for run in runs:
            ps.get(run.id).wait(timeout=20)
        found = ps.pipelines.runs(penstock.RunQuery(pipeline="words"))
        assert [run.id for run in found] == [runs[1].id, runs[0].id]
        partial = penstock.RunQuery(statuses=(PipelineJobStatus.PARTIAL,))
        assert [run.id for run in ps.pipelines.runs(partial)] == [runs[1].id]


def test_a_pipeline_that_waits_says_why(tmp_path: Path) -> None:
    with app_of(words()).run(tmp_path) as ps:
        ps.pause_pool("default")
        run = ps.pipelines.start("words")
        assert "paused" in ps.get(run.id).why()
        assert ps.pipelines.get(run.id).status is PipelineJobStatus.PENDING
        ps.resume_pool("default")
        ps.get(run.id).result(timeout=20)


def test_definitions_can_be_listed_and_shown(tmp_path: Path) -> None:
    with app_of(words()).run(tmp_path) as ps:
        assert [info.name for info in ps.pipelines.list()] == ["words"]
        info = ps.pipelines.show("words")
        assert [stage.name for stage in info.stages] == ["fetch", "upper", "shout"]
        assert info.stages[0].over == "config:names"
        assert info.stages[1].over == "stage:fetch"


@run_async
async def test_runs_are_read_without_an_engine_and_nothing_is_written(tmp_path: Path) -> None:
    async with app_of(words()).run(tmp_path) as ps:
        run = await ps.pipelines.astart("words")
        await (await ps.aget(run.id)).aresult(timeout=20)
        told = [event async for event in ps.pipelines.astream(run.id)]
    settings = load(flags={"data_dir": str(tmp_path)})
    before = settings.database.read_bytes()
    async with offline(settings) as api:
        assert (await api.pipelines.get(run.id)).status is PipelineJobStatus.COMPLETED
        assert [each.id for each in await api.pipelines.runs(penstock.RunQuery())] == [run.id]
        assert len(await api.pipelines.items(run.id, "fetch")) == 3
        assert [info.name for info in await api.pipelines.list()] == ["words"]
        assert [event async for event in api.pipelines.stream(run.id)] == told
    assert settings.database.read_bytes() == before
    assert not (tmp_path / "pipelines.db").exists()


def test_large_outputs_are_blobs_that_live_as_long_as_their_run(tmp_path: Path) -> None:
    pipeline = penstock.Pipeline("large")

    @pipeline.map(over=lambda config, ctx: [1, 2])
    async def make(n: int, ctx: Any) -> str:
        return str(n) * 100_000

    @pipeline.step()
    async def sizes(results: Any, ctx: Any) -> list[int]:
        return [len(text) async for text in results]

    with app_of(pipeline).run(tmp_path) as ps:
        run = ps.pipelines.start("large")
        assert ps.get(run.id).result(timeout=20)["output"] == [100_000, 100_000]
        pointers = [item.output for item in ps.pipelines.items(run.id, "make")]
        assert all(pointer.startswith("blob:") for pointer in pointers)
        age(tmp_path / "blobs")
        assert ps.prune(3600).blobs == 0
        assert blob_of(ps, pointers[0]) == b'"' + b"1" * 100_000 + b'"'
        assert ps.prune(0.0).jobs == 1
        assert ps.pipelines.runs(penstock.RunQuery()) == []
        age(tmp_path / "blobs")
        ps.prune(0.0)
        with pytest.raises(penstock.PenstockError):
            blob_of(ps, pointers[0])


def blob_of(ps: penstock.Client, pointer: str) -> bytes:
    return ps._engine.portal.run(ps.api.get_blob(pointer))


def age(folder: Path) -> None:
    """Let every file there be a day old."""
    for path in folder.rglob("*"):
        if path.is_file():
            os.utime(path, (0, 0))


def failing(ps: penstock.Client) -> tuple[list[str], list[bool]]:
    """What the store is asked to checkpoint fails as long as there is something in the second."""
    store = ps._engine.portal.run(_store_of(ps))
    begin = store.begin
    refused: list[str] = []
    full: list[bool] = []

    def refuse(changes: Any, *rest: Any, **named: Any) -> Any:
        if full and any(isinstance(change, Checkpoint) for change in changes):
            refused.append("no space left")
            failed = asyncio.get_running_loop().create_future()
            failed.set_exception(StoreFull("no space left"))
            return failed
        return begin(changes, *rest, **named)

    store.begin = refuse
    return refused, full


async def _store_of(ps: penstock.Client) -> Any:
    return ps.api._store  # type: ignore[attr-defined]


def test_a_run_whose_rows_cannot_be_written_waits_and_goes_on_when_they_can_again(
    tmp_path: Path,
) -> None:
    gate, calls = Gate(), []
    pipeline = penstock.Pipeline("patient")

    @pipeline.step()
    async def first(ctx: Any) -> int:
        calls.append("first")
        gate.reached.set()
        while not gate.open.is_set():  # noqa: ASYNC110 - another thread opens it
            await asyncio.sleep(0.005)
        return 1

    @pipeline.step()
    async def second(ctx: Any) -> int:
        calls.append("second")
        return 2

    with app_of(pipeline).run(tmp_path) as ps:
        refused, full = failing(ps)
        run = ps.pipelines.start("patient")
        assert gate.reached.wait(20)
        full.append(True)
        gate.open.set()
        eventually(lambda: len(refused) >= 2, "it is tried again")
        assert calls == ["first"]  # its end is not durable yet
        assert ps.pipelines.get(run.id).status is PipelineJobStatus.RUNNING
        full.clear()
        assert ps.get(run.id).result(timeout=20)["output"] == 2
        assert calls == ["first", "second"]
        assert ps.pipelines.get(run.id).attempt == 1
        assert ps.verify().mismatches == ()


def test_a_record_says_what_started_the_run(tmp_path: Path) -> None:
    with app_of(words()).run(tmp_path) as ps:
        request = ps.request("job.pipeline.words")
        ps.schedules.put(penstock.Schedule(name="daily", cron="@daily", request=request))
        fired = ps.schedules.fire("daily")
        ps.get(fired.job_id).result(timeout=20)
        run = ps.pipelines.start("words", {"names": ["a", "bad"]})
        ps.get(run.id).wait(timeout=20)
        again = ps.pipelines.retry_failed(run.id)
        ps.get(again.id).wait(timeout=20)
        ids = (fired.job_id, run.id, again.id)
        triggers = [ps.pipelines.get(job_id).trigger for job_id in ids]
        assert triggers == ["schedule", "manual", "retry"]


def test_six_steps_that_do_nothing_cost_at_most_eight_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = penstock.Pipeline("six", single_flight=False)
    for n in range(6):

        async def nothing() -> None:
            pass

        pipeline.step(name=f"step{n}")(nothing)
    commits: list[Any] = []
    write = SqliteBackend.write

    async def counting(self: SqliteBackend, commit: Any, *rest: Any) -> None:
        commits.append(commit)
        await write(self, commit, *rest)

    monkeypatch.setattr(SqliteBackend, "write", counting)
    # However busy the machine: a start that is told late, and audit entries, go with a commit.
    monkeypatch.setattr("penstock.control.ledger._EXTRAS_DELAY", 5.0)
    monkeypatch.setattr("penstock.worker.attempt._START_DELAY", 5.0)
    with app_of(pipeline).run(tmp_path) as ps:
        for _ in range(3):
            commits.clear()
            run = ps.pipelines.start("six")
            assert ps.get(run.id).wait(timeout=20).state is penstock.JobState.SUCCEEDED
            ps.audit.read(AuditQuery())  # nothing is left to be written
            told = [[str(stride.path) for stride in commit.strides] for commit in commits]
            assert len(commits) <= 8, told
