"""Runs of pipelines whose worker, or engine, is killed, stopped or drained."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
from tests.support.chaos.cluster import Cluster, cluster, kill
from tests.support.waiting import eventually

import penstock
from penstock.workloads.pipeline.records import PipelineRecord


def calls(c: Cluster) -> list[str]:
    file = c.folder / "calls"
    return (
        [line.rpartition(" ")[0] for line in file.read_text().splitlines()] if file.exists() else []
    )


def join(c: Cluster, name: str, *words: str) -> object:
    process = c.start("worker", "--app", "staged:app", "--id", name, *words)
    eventually(
        lambda: any(w["worker_id"] == name and w["status"] == "ready" for w in c.workers()),
        f"{name} joins",
    )
    return process


def written(ps: penstock.Client, run: str, stage: str) -> set[int]:
    """Items whose end is committed."""
    items = ps.pipelines.items(run, stage, outcomes=(penstock.ItemOutcome.OK,), limit=1000)
    return {item.seq for item in items}


@pytest.mark.seed("002", "8.15")
def test_a_run_whose_worker_is_killed_goes_on_at_another_and_repeats_nothing_that_was_written(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold") as c:
        c.up("--no-worker")
        first = join(c, "first")
        with c.client() as ps:
            run = ps.pipelines.start("walk", {"n": 30, "pause": 0.02})
            eventually(lambda: len(calls(c)) >= 12, "a dozen items have run")
            os.kill(first.pid, signal.SIGSTOP)  # type: ignore[attr-defined]
            done = written(ps, run.id, "first")
            before = Counter(calls(c))
            kill(first)  # type: ignore[arg-type]
            join(c, "second")
            assert ps.get(run.id).result(timeout=60)["output"] == sum(n * n for n in range(30))
            record = ps.pipelines.get(run.id)
            assert record.attempt == 2
            assert record.worker_id == "second"
        after = Counter(calls(c))
        assert done
        assert all(after[f"first {n}"] == before[f"first {n}"] == 1 for n in done)
        assert all(after[f"first {n}"] in (1, 2) for n in range(30))
        c.check_history()


def test_a_worker_that_was_taken_for_lost_can_write_nothing_when_it_comes_back(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold") as c:
        c.up("--no-worker")
        first = join(c, "first")
        with c.client() as ps:
            run = ps.pipelines.start("walk", {"n": 30, "pause": 0.02})
            eventually(lambda: len(calls(c)) >= 5, "some items have run")
            os.kill(first.pid, signal.SIGSTOP)  # type: ignore[attr-defined]
            join(c, "second")
            eventually(lambda: ps.pipelines.get(run.id).worker_id == "second", "second took over")
            os.kill(first.pid, signal.SIGCONT)  # type: ignore[attr-defined]
            assert ps.get(run.id).result(timeout=60)["output"] == sum(n * n for n in range(30))
            assert ps.pipelines.get(run.id).worker_id == "second"
            items = ps.pipelines.items(run.id, "second", limit=100)
            assert [item.seq for item in items] == list(range(30))


def test_a_run_goes_on_after_its_engine_was_killed(tmp_path: Path) -> None:
    with cluster(tmp_path) as c:
        engine = c.up("--app", "staged:app")
        with c.client() as ps:
            run = ps.pipelines.start("walk", {"n": 30, "pause": 0.02})
            eventually(lambda: len(calls(c)) >= 10, "ten items have run")
        kill(engine)
        c.up("--app", "staged:app")
        with c.client() as ps:
            assert ps.get(run.id).result(timeout=60)["output"] == sum(n * n for n in range(30))
            assert ps.pipelines.get(run.id).attempt == 2
        c.check_history()


def test_a_worker_that_is_stopped_hands_its_run_on_at_once(tmp_path: Path) -> None:
    with cluster(tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold") as c:
        c.up("--no-worker")
        first = join(c, "first", "--drain-timeout", "1h")
        with c.client() as ps:
            run = ps.pipelines.start("walk", {"n": 40, "pause": 0.05})
            eventually(lambda: len(calls(c)) >= 5, "some items have run")
            first.terminate()  # type: ignore[attr-defined]
            assert first.wait(timeout=30) == 0  # type: ignore[attr-defined]
            assert ps.pipelines.get(run.id).status == "RUNNING"
            join(c, "second")
            assert ps.get(run.id).result(timeout=60)["output"] == sum(n * n for n in range(40))


def test_items_of_a_distributed_stage_run_on_several_workers_each_once(tmp_path: Path) -> None:
    with cluster(tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold") as c:
        c.up("--no-worker")
        join(c, "first", "--concurrency", "3")
        join(c, "second", "--concurrency", "3")
        with c.client() as ps:
            run = ps.pipelines.start("far", {"n": 24})
            assert ps.get(run.id).result(timeout=60)["output"] == sum(range(24))
            workers = {job.record.worker_id for job in ps.jobs(workflow_id=run.id, limit=100)}
            assert workers == {"first", "second"}
        assert sorted(calls(c)) == sorted(f"child {n}" for n in range(24))


def test_a_run_is_cancelled_even_if_its_worker_is_gone(tmp_path: Path) -> None:
    with cluster(tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold") as c:
        c.up("--no-worker")
        first = join(c, "first")
        with c.client() as ps:
            run = ps.pipelines.start("walk", {"n": 1000, "pause": 0.05})
            eventually(lambda: len(calls(c)) >= 2, "some items have run")
            kill(first)  # type: ignore[arg-type]
            answer = ps.pipelines.cancel(run.id, timeout=30)
            assert (answer.accepted, answer.status.value) == (True, "CANCELLED")
            record = ps.pipelines.get(run.id)
            assert record.cancel_effective
            assert record.finished_at is not None


def test_a_config_is_checked_by_an_engine_that_knows_the_pipeline_from_its_worker_only(
    tmp_path: Path,
) -> None:
    with cluster(tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold") as c:
        c.up("--no-worker")
        join(c, "first")
        with c.client() as ps:
            with pytest.raises(penstock.InvalidRequest) as caught:
                ps.pipelines.start("sized", {"n": 6})
            assert caught.value.field == "config.n"
            assert ps.jobs() == []
            run = ps.pipelines.start("sized", {"n": 5})
            assert ps.get(run.id).result(timeout=30)["output"] == 5


@pytest.mark.parametrize("number", [6, 7, 9, 11, 13])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_run_comes_to_the_same_end_whichever_of_its_commits_the_engine_dies_at(
    moment: str, number: int, tmp_path: Path
) -> None:
    with cluster(tmp_path) as c:
        doomed = c.up("--app", "staged:app", PENSTOCK_FAILPOINT=f"{moment}-commit:{number}")
        with contextlib.suppress(penstock.PenstockError), c.client() as ps:
            ps.pipelines.start("walk", {"n": 40}, idempotency_key="once")
        assert doomed.wait(timeout=30) == -signal.SIGKILL
        c.up("--app", "staged:app")
        with c.client() as ps:
            # Whether the first call was answered or not, it is the same run.
            run = ps.pipelines.start("walk", {"n": 40}, idempotency_key="once")
            result = ps.get(run.id).result(timeout=60)
            assert result["output"] == sum(n * n for n in range(40))
            assert result["status"] == "COMPLETED"
            record = ps.pipelines.get(run.id)
            assert [stage.ok for stage in record.stages] == [40, 40, 1]
            assert len(ps.pipelines.runs(penstock.RunQuery())) == 1
        c.check_history()


def test_workers_share_what_a_pipeline_remembers_and_its_breakers(tmp_path: Path) -> None:
    with cluster(tmp_path, PENSTOCK_UNKNOWN_TOPICS="hold") as c:
        c.up("--no-worker")
        first = join(c, "first")
        with c.client() as ps:

            def fetched(record: PipelineRecord) -> tuple[str, str]:
                stage = record.stage("fetch")
                assert stage is not None
                return stage.status, stage.reason

            def run(**config: bool) -> PipelineRecord:
                started = ps.pipelines.start("shared", config)
                ps.get(started.id).wait(timeout=30)
                return ps.pipelines.get(started.id)

            for _ in range(2):
                assert fetched(run(fetches=True))[0] == "failed"
            kill(first)  # type: ignore[arg-type]
            second = join(c, "second")
            record = run(fetches=True)
            assert record.worker_id == "second"
            assert fetched(record) == ("skipped", "breaker_open")
            last = run(fetches=False)
            seen = ps.get(last.id).result(timeout=30)["output"]
            assert seen == [first.pid, first.pid, second.pid]  # type: ignore[attr-defined]
            (breaker,) = ps.pipelines.breakers()
            assert (breaker.name, breaker.state.value) == ("feeds", "open")
