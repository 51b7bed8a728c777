"""Runs that end without whoever ran them: as complete as others, and told of once."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from tests.support.waiting import eventually

import penstock
from penstock.core.job import JobRequest, JobResult
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.testing.samples import a_job
from penstock.workloads.pipeline.records import (
    STALE_MESSAGE,
    PipelineEventKind,
    PipelineRecord,
    StageStatus,
    first_stages,
)
from penstock.workloads.pipeline.rows import RunState, fold
from penstock.workloads.pipeline.summary import ended

ALERTS = [ended("pipeline_failed", "FAILED"), ended("pipeline_cancelled", "CANCELLED")]


class Held:
    """A pipeline whose first stage waits for ever, and what its hooks were told."""

    def __init__(self, **options: Any) -> None:
        self.begun = threading.Event()
        self.ends: list[tuple[str, str]] = []
        self.alerts: list[tuple[str, str]] = []
        self.told = threading.Event()
        self.pipeline = pipeline = penstock.Pipeline(
            "held",
            single_flight=False,
            cancel_grace=0.1,
            alerts=ALERTS,
            on_end=self._on_end,
            on_alert=lambda record, alert: self.alerts.append((record.id, alert.code)),
            **options,
        )

        @pipeline.map(over=lambda config, ctx: ["quick", "slow"], concurrency=1)
        async def first(item: str) -> str:
            if item == "slow":
                self.begun.set()
                await asyncio.sleep(3600)
            return item

        @pipeline.step()
        async def second() -> None:
            pass

    def _on_end(self, record: PipelineRecord) -> None:
        self.ends.append((record.id, record.status.value))
        self.told.set()


def app_of(*pipelines: penstock.Pipeline) -> penstock.App:
    app = penstock.App()
    app.add(*pipelines)
    return app


def stages_of(record: PipelineRecord) -> list[tuple[str, str]]:
    return [(stage.name, stage.status.value) for stage in record.stages]


def check_complete(record: PipelineRecord, status: PipelineJobStatus, alert: str) -> None:
    assert record.status is status
    assert all(stage.is_final for stage in record.stages)
    assert record.summary is not None
    assert record.summary.status is status
    assert record.summary.finished_at == record.finished_at
    assert set(record.summary.stages) == {"first", "second"}
    assert [one.code for one in record.alerts] == [alert]
    assert record.summary.alerts == (alert,)
    assert len(record.errors) == 1


def test_a_run_cancelled_before_it_began_ends_complete_and_is_told_of_once(tmp_path: Path) -> None:
    held = Held()
    with app_of(held.pipeline).run(tmp_path, concurrency=1) as ps:
        ps.pipelines.start("held")
        assert held.begun.wait(20)
        waiting = ps.pipelines.start("held")
        assert ps.pipelines.cancel(waiting.id).status is PipelineJobStatus.CANCELLED
        record = ps.pipelines.get(waiting.id)
        check_complete(record, PipelineJobStatus.CANCELLED, "pipeline_cancelled")
        assert stages_of(record) == [("first", "skipped"), ("second", "skipped")]
        assert held.told.wait(20)
        (last,) = ps.pipelines.stream(waiting.id)
        assert last.kind is PipelineEventKind.JOB_COMPLETE
        assert last.data["alerts"] == ["pipeline_cancelled"]
        assert held.ends == [(waiting.id, "CANCELLED")]
        assert held.alerts == [(waiting.id, "pipeline_cancelled")]


def test_a_run_whose_job_failed_unbegun_fails_with_an_alert(tmp_path: Path) -> None:
    held = Held()
    with app_of(held.pipeline).run(tmp_path) as ps:
        uri = ps._engine.portal.run(ps.api.put_blob(b"{" + b" " * 20_000))  # no config
        request = JobRequest(job_id="", topic="job.pipeline.held", context_ptr=uri)
        (job,) = ps._engine.portal.run(ps.api.submit([request]))
        assert held.told.wait(20)
        record = ps.pipelines.get(job.job_id)
        check_complete(record, PipelineJobStatus.FAILED, "pipeline_failed")
        assert held.alerts == [(job.job_id, "pipeline_failed")]
        assert held.ends == [(job.job_id, "FAILED")]


def test_a_running_run_whose_worker_is_gone_is_cancelled_with_all_its_stages(
    tmp_path: Path,
) -> None:
    held = Held()
    with app_of(held.pipeline).run(tmp_path) as ps:
        run = ps.pipelines.start("held")
        assert held.begun.wait(20)
    with penstock.App().run(
        tmp_path, timeouts__lost_grace=0.1
    ) as ps:  # nobody here can go on with it
        ps.pipelines.cancel(run.id, reason="enough", timeout=20)
        record = ps.pipelines.get(run.id)
        check_complete(record, PipelineJobStatus.CANCELLED, "pipeline_cancelled")
        assert stages_of(record) == [("first", "partial"), ("second", "skipped")]
        assert [event.kind for event in ps.pipelines.stream(run.id)][-1] == "job_complete"
    assert held.ends == []


def test_a_run_that_a_rule_denies_ends_complete_and_is_told_of_once(tmp_path: Path) -> None:
    held = Held()
    rules = tmp_path / "rules.toml"
    rules.write_text(
        """
        default = "allow"

        [[rules]]
        id = "no-runs"
        topics = ["job.pipeline.held"]
        decision = "deny"
        reason = "not on Sundays"
        """
    )
    with app_of(held.pipeline).run(tmp_path / "data", rules=str(rules)) as ps:
        run = ps.pipelines.start("held")
        assert ps.get(run.id).wait(timeout=20).state is penstock.JobState.DENIED
        record = ps.pipelines.get(run.id)
        check_complete(record, PipelineJobStatus.FAILED, "pipeline_failed")
        assert "not on Sundays" in record.errors[0].message
        assert stages_of(record) == [("first", "skipped"), ("second", "skipped")]
        assert held.told.wait(20)
        assert held.ends == [(run.id, "FAILED")]
        assert held.alerts == [(run.id, "pipeline_failed")]


def test_a_run_that_no_worker_takes_before_its_deadline_ends_complete(tmp_path: Path) -> None:
    held = Held()
    with app_of(held.pipeline).run(tmp_path) as ps:
        ps.pause_pool("default")
        run = ps.submit("job.pipeline.held", {}, deadline=time.time() + 0.3)
        assert run.wait(timeout=20).state is penstock.JobState.CANCELLED
        record = ps.pipelines.get(run.job_id)
        check_complete(record, PipelineJobStatus.CANCELLED, "pipeline_cancelled")
        assert "deadline" in record.errors[0].message
        assert held.told.wait(20)
        assert held.ends == [(run.job_id, "CANCELLED")]


def test_hooks_of_a_run_that_ended_where_its_code_is_unknown_are_called_by_the_next_engine(
    tmp_path: Path,
) -> None:
    held = Held()
    with app_of(held.pipeline).run(tmp_path) as ps:
        run = ps.submit("job.pipeline.held", {}, deadline=time.time() + 2)
        assert held.begun.wait(20)
    with penstock.App().run(tmp_path, timeouts__lost_grace=0.1) as ps:
        assert ps.get(run.job_id).wait(timeout=20).state is penstock.JobState.CANCELLED
        record = ps.pipelines.get(run.job_id)
        check_complete(record, PipelineJobStatus.CANCELLED, "pipeline_cancelled")
        assert stages_of(record) == [("first", "partial"), ("second", "skipped")]
        assert record.stages[0].ok == 1
    assert held.ends == []
    for _ in range(2):
        with app_of(held.pipeline).run(tmp_path, timeouts__lost_grace=0.1):
            assert held.told.wait(20)
    assert held.ends == [(run.job_id, "CANCELLED")]
    assert held.alerts == [(run.job_id, "pipeline_cancelled")]


def test_hooks_that_were_called_are_not_called_by_the_next_engine(tmp_path: Path) -> None:
    held = Held()
    with app_of(held.pipeline).run(tmp_path, concurrency=1) as ps:
        runs = [ps.pipelines.start("held") for _ in range(2)]
        assert held.begun.wait(20)
        ps.pipelines.cancel(runs[1].id)  # while it waits: nobody ran it
        ps.pipelines.cancel(runs[0].id)  # its runner ends it
        eventually(lambda: len(held.ends) == 2, "both are told of")
    with app_of(held.pipeline).run(tmp_path) as ps:
        last = ps.pipelines.start("held")
        ps.pipelines.cancel(last.id)
        eventually(lambda: (last.id, "CANCELLED") in held.ends, "the next one is told of")
    assert Counter(held.ends) == Counter({(run.id, "CANCELLED"): 1 for run in (*runs, last)})
    assert Counter(held.alerts) == Counter(
        {(run.id, "pipeline_cancelled"): 1 for run in (*runs, last)}
    )


def test_a_hook_that_fails_changes_nothing_of_the_run_and_is_not_called_again(
    tmp_path: Path,
) -> None:
    calls: list[str] = []

    def fails(record: PipelineRecord) -> None:
        calls.append(record.id)
        raise RuntimeError("the mail server is down")

    pipeline = penstock.Pipeline("fine", on_end=fails)

    @pipeline.step()
    async def only() -> str:
        return "done"

    with app_of(pipeline).run(tmp_path) as ps:
        run = ps.pipelines.start("fine")
        assert ps.get(run.id).result(timeout=20)["output"] == "done"
    with app_of(pipeline).run(tmp_path) as ps:
        ps.pause_pool("default")
        waiting = ps.pipelines.start("fine")
        ps.pipelines.cancel(waiting.id)
        eventually(lambda: len(calls) == 2, "the second is told of")
        assert ps.pipelines.get(waiting.id).status is PipelineJobStatus.CANCELLED
    assert calls == [run.id, waiting.id]


def test_a_run_whose_job_timed_out_with_its_worker_lost_is_stale_with_all_its_stages() -> None:
    result = JobResult(job_id="a", status=penstock.JobState.TIMEOUT, error_code="WORKER_LOST")
    job = replace(a_job("a", penstock.JobState.TIMEOUT), result=result)
    info = Held().pipeline.info()
    first, second = first_stages(info.stages)
    began = replace(first, status=StageStatus.RUNNING, started_at=1.0, total=2, done=1, ok=1)
    record = fold(job, {}, info, RunState(current_stage="first"), (began, second))
    check_complete(record, PipelineJobStatus.FAILED, "pipeline_failed")
    assert record.errors[0].message == STALE_MESSAGE
    assert stages_of(record) == [("first", "partial"), ("second", "skipped")]
