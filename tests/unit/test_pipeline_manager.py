"""Pipeline jobs without a control plane, on virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.unit.pipeline_jobs import Process, on_virtual_time, record_of

from penstock.core.errors import (
    Conflict,
    IllegalMove,
    InvalidRequest,
    NotFound,
    PipelineBusy,
    Unavailable,
    WaitTimedOut,
)
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.orchestrator import AsyncPipelineOrchestrator
from penstock.workloads.pipeline.records import (
    PipelineEventKind,
    PipelineRecord,
    StageStatus,
)
from penstock.workloads.pipeline.storage.memory import MemoryPipelineStore
from penstock.workloads.pipeline.store import RunQuery

_S, _K = PipelineJobStatus, PipelineEventKind


# -- starting ---------------------------------------------------------------------


@on_virtual_time
async def test_start_job_records_a_pending_job_and_runs_it_in_the_background() -> None:
    async with Process(MemoryPipelineStore()) as here:
        job = await here.manager.start_job("news", {"sources": ["a"]})
        assert job.status is _S.PENDING
        assert job.started_at is None
        assert here.journal.begun == []
        ended = await here.manager.wait(job.id)
    assert ended.status is _S.COMPLETED
    assert ended.started_at is not None
    assert ended.finished_at == ended.started_at + 4.0
    assert here.journal.stages() == ["ingest", "classify", "neutralize", "brief"]


@on_virtual_time
async def test_the_config_is_kept_whole_with_its_defaults() -> None:
    async with Process(MemoryPipelineStore()) as here:
        job = await here.manager.start_job(here.news, {"sources": ["a"]})
    assert job.config == {
        "sources": ["a"],
        "enable_evaluation": False,
        "enable_auto_optimize": False,
    }
    assert len(job.trace_id) == 36
    assert job.trace_id != job.id


@on_virtual_time
async def test_an_unknown_pipeline_is_not_found_and_the_hint_names_those_there_are() -> None:
    async with Process(MemoryPipelineStore()) as here:
        with pytest.raises(NotFound) as caught:
            await here.manager.start_job("olds")
    assert caught.value.hint == "there are: news"


@on_virtual_time
async def test_a_pipeline_of_the_same_name_that_was_not_declared_here_is_not_run() -> None:
    async with Process(MemoryPipelineStore()) as here:
        with pytest.raises(NotFound):
            await here.manager.start_job(Process(MemoryPipelineStore()).news)


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"sources": 3}, "config.sources"),
        ({"enable_evaluation": "perhaps"}, "config.enable_evaluation"),
        ({"sauces": []}, "config.sauces"),
        ([], "config"),
    ],
)
@on_virtual_time
async def test_a_wrong_config_is_refused_by_the_name_of_its_field(config: Any, field: str) -> None:
    store = MemoryPipelineStore()
    async with Process(store) as here:
        with pytest.raises(InvalidRequest) as caught:
            await here.manager.start_job("news", config)
    assert caught.value.field == field
    assert await store.find(RunQuery()) == []


@on_virtual_time
async def test_a_second_start_is_refused_while_one_runs_and_names_that_one() -> None:
    async with Process(MemoryPipelineStore()) as here:
        first = await here.manager.start_job("news")
        with pytest.raises(PipelineBusy) as caught:
            await here.manager.start_job("news")
        assert caught.value.running == first.id
        await here.manager.wait(first.id)
        second = await here.manager.start_job("news")
        assert (await here.manager.wait(second.id)).status is _S.COMPLETED


@on_virtual_time
async def test_a_pipeline_that_is_not_single_flight_runs_as_often_as_it_is_started() -> None:
    async with Process(MemoryPipelineStore(), definition={"single_flight": False}) as here:
        jobs = [await here.manager.start_job("news") for _ in range(3)]
        ends = [await here.manager.wait(job.id) for job in jobs]
    assert [end.status for end in ends] == [_S.COMPLETED] * 3


@on_virtual_time
async def test_an_id_that_is_there_is_answered_with_its_job_and_runs_once() -> None:
    async with Process(MemoryPipelineStore()) as here:
        first = await here.manager.start_job("news", job_id="one")
        again = await here.manager.start_job("news", job_id="one")
        assert again.trace_id == first.trace_id
        with pytest.raises(Conflict):
            await here.manager.start_job("news", {"sources": []}, job_id="one")
        await here.manager.wait("one")
    assert here.journal.begun.count(("brief", "")) == 1


@on_virtual_time
async def test_a_manager_runs_nothing_before_it_is_entered_or_after_it_is_left() -> None:
    here = Process(MemoryPipelineStore())
    with pytest.raises(Unavailable):
        await here.manager.start_job("news")
    async with here:
        pass
    with pytest.raises(Unavailable):
        await here.manager.start_job("news")


@on_virtual_time
async def test_the_pipelines_of_a_manager_are_declared_in_the_store() -> None:
    store = MemoryPipelineStore()
    async with Process(store) as here:
        assert await store.declared() == [here.news.info()]


@on_virtual_time
async def test_create_job_and_execute_job_are_names_for_it_too() -> None:
    async with Process(MemoryPipelineStore()) as here:
        job = await here.manager.create_job("news")
        ended = await here.manager.execute_job(job.id)
    assert ended.status is _S.COMPLETED
    assert here.journal.begun.count(("brief", "")) == 1


# -- asking -----------------------------------------------------------------------


@on_virtual_time
async def test_what_is_not_there_is_not_found() -> None:
    async with Process(MemoryPipelineStore()) as here:
        manager = here.manager
        for ask in (
            manager.get_job("none"),
            manager.cancel_job("none"),
            manager.wait("none"),
            manager.retry_failed("none"),
            manager.items("none", "ingest"),
            manager.execute_job("none"),
            anext(manager.events("none")),
        ):
            with pytest.raises(NotFound):
                await ask  # type: ignore[misc]


@on_virtual_time
async def test_jobs_are_listed_newest_first() -> None:
    async with Process(MemoryPipelineStore()) as here:
        ids = []
        for _ in range(3):
            ids.append((await here.manager.start_job("news")).id)
            await here.manager.wait(ids[-1])
        assert [job.id for job in await here.manager.list_jobs()] == ids[::-1]
        failed = RunQuery(statuses=(_S.FAILED,))
        assert await here.manager.list_jobs(failed) == []


@on_virtual_time
async def test_items_of_a_stage_are_paged_and_an_unknown_stage_is_not_found() -> None:
    async with Process(MemoryPipelineStore()) as here:
        job = await here.manager.start_job("news")
        await here.manager.wait(job.id)
        first = await here.manager.items(job.id, "classify", limit=3)
        rest = await here.manager.items(job.id, "classify", after=first[-1].seq)
        assert [item.key for item in (*first, *rest)] == ["0/0", "0/1", "1/0", "1/1"]
        assert await here.manager.items(job.id, "evaluation") == []
        with pytest.raises(NotFound) as caught:
            await here.manager.items(job.id, "polish")
    assert "evaluation" in caught.value.hint


@on_virtual_time
async def test_a_wait_ends_with_its_patience_and_the_job_goes_on() -> None:
    async with Process(MemoryPipelineStore()) as here:
        job = await here.manager.start_job("news")
        with pytest.raises(WaitTimedOut):
            await here.manager.wait(job.id, timeout=1.5)
        assert (await here.manager.get_job(job.id)).status is _S.RUNNING
        assert (await here.manager.wait(job.id)).status is _S.COMPLETED


@on_virtual_time
async def test_events_come_in_order_and_end_with_the_job() -> None:
    async with Process(MemoryPipelineStore()) as here:
        job = await here.manager.start_job("news")
        events = [event async for event in here.manager.events(job.id)]
        assert events[-1].kind is _K.JOB_COMPLETE
        assert [event.id for event in events] == sorted({event.id for event in events})
        starts = [event.data["stage"] for event in events if event.kind is _K.STAGE_START]
        assert starts == ["ingest", "classify", "neutralize", "brief"]
        middle = events[len(events) // 2].id
        rest = [event async for event in here.manager.events(job.id, after=middle)]
        assert rest == [event for event in events if event.id > middle]
        assert [event async for event in here.manager.events(job.id, events[-1].id)] == []


@on_virtual_time
async def test_another_process_sees_the_events_and_the_end_by_looking() -> None:
    store = MemoryPipelineStore()
    async with Process(store) as here, Process(store, "there") as there:
        there.manager._deaf()  # what a store tells it tells within its process only
        job = await here.manager.start_job("news")
        following = asyncio.create_task(there.manager.wait(job.id))
        kinds = [event.kind async for event in there.manager.events(job.id)]
        assert kinds[-1] is _K.JOB_COMPLETE
        assert (await following).status is _S.COMPLETED
        there.manager._deaf = lambda: None


# -- retrying what failed ---------------------------------------------------------


async def _partial(here: Process) -> PipelineRecord:
    here.journal.failing = {("classify", "0/0")}
    job = await here.manager.start_job("news")
    ended = await here.manager.wait(job.id)
    assert ended.status is _S.PARTIAL
    here.journal.failing = set()
    here.journal.begun.clear()
    return ended


@on_virtual_time
async def test_retry_failed_runs_what_failed_and_what_depends_on_it() -> None:
    async with Process(MemoryPipelineStore()) as here:
        first = await _partial(here)
        second = await here.manager.retry_failed(first.id)
        ended = await here.manager.wait(second.id)
    assert ended.status is _S.COMPLETED
    assert (ended.retry_of, ended.trigger, ended.config) == (first.id, "retry", first.config)
    assert here.journal.begun == [("classify", "0/0"), ("neutralize", "0/0"), ("brief", "")]


@on_virtual_time
async def test_nothing_is_retried_of_a_job_that_runs_or_in_which_nothing_failed() -> None:
    async with Process(MemoryPipelineStore()) as here:
        job = await here.manager.start_job("news")
        with pytest.raises(IllegalMove):
            await here.manager.retry_failed(job.id)
        await here.manager.wait(job.id)
        with pytest.raises(InvalidRequest):
            await here.manager.retry_failed(job.id)


@on_virtual_time
async def test_what_a_cancelled_job_did_not_get_to_is_run_by_its_retry() -> None:
    async with Process(MemoryPipelineStore()) as here:
        here.journal.seconds = {"classify": 600.0}
        job = await here.manager.start_job("news")
        await asyncio.sleep(1.5)
        await here.manager.cancel_job(job.id)
        here.journal.begun.clear()
        again = await here.manager.retry_failed(job.id)
        assert (await here.manager.wait(again.id)).status is _S.COMPLETED
    assert here.journal.stages() == ["classify", "neutralize", "brief"]


# -- shutting down ----------------------------------------------------------------


@on_virtual_time
async def test_a_shutdown_leaves_jobs_running_for_the_next_start_which_goes_on_at_once() -> None:
    store = MemoryPipelineStore()
    async with Process(store) as here:
        job = await here.manager.start_job("news")
        await asyncio.sleep(2.5)
    left = await record_of(store, job.id)
    assert left.status is _S.RUNNING
    assert left.finished_at is None
    assert here.journal.running == set()
    async with Process(store, "next") as there:
        assert list(there.manager._runs) == [job.id]
        ended = await there.manager.wait(job.id)
    assert ended.status is _S.COMPLETED
    assert ended.resumes == 1
    assert there.journal.stages() == ["neutralize", "brief"]


@on_virtual_time
async def test_a_job_that_was_started_a_moment_before_the_shutdown_is_not_lost() -> None:
    store = MemoryPipelineStore()
    async with Process(store) as here:
        job = await here.manager.start_job("news")
    assert (await record_of(store, job.id)).finished_at is None
    async with Process(store, "next") as there:
        assert (await there.manager.wait(job.id)).status is _S.COMPLETED


@on_virtual_time
async def test_a_job_that_is_being_claimed_at_the_shutdown_does_not_begin() -> None:
    store = MemoryPipelineStore()
    async with Process(store) as here:
        job = await here.manager.start_job("news")
        here.line.cut()
        await asyncio.sleep(1)
        closing = asyncio.create_task(here.manager.shutdown())
        await asyncio.sleep(1)
        here.line.mend()
        await closing
    assert here.journal.begun == []
    assert (await record_of(store, job.id)).finished_at is None


@on_virtual_time
async def test_a_job_that_will_not_stop_does_not_keep_a_manager_from_ending() -> None:
    store, stuck = MemoryPipelineStore(), Definition("stuck")
    calls = []

    @stuck.step()
    async def deaf() -> None:
        calls.append(1)
        while len(calls) < 50:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                calls.append(1)

    async with Process(store, pipelines=[stuck]) as here:
        job = await here.manager.start_job("stuck")
        await asyncio.sleep(1)
    assert (await record_of(store, job.id)).status is _S.RUNNING


@on_virtual_time
async def test_a_task_that_is_cancelled_by_itself_ends_its_job_as_the_seed_says() -> None:
    async with Process(MemoryPipelineStore()) as here:
        job = await here.manager.start_job("news")
        await asyncio.sleep(1.5)
        here.manager._runs[job.id].task.cancel()
        ended = await here.manager.wait(job.id)
    assert ended.status is _S.CANCELLED
    assert ended.finished_at is not None
    assert here.journal.running == set()


@on_virtual_time
async def test_an_exception_of_the_orchestrator_fails_the_job(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(self: AsyncPipelineOrchestrator) -> PipelineRecord:
        raise RuntimeError("a bug")

    monkeypatch.setattr(AsyncPipelineOrchestrator, "run", broken)
    async with Process(MemoryPipelineStore()) as here:
        job = await here.manager.start_job("news")
        ended = await here.manager.wait(job.id)
    assert ended.status is _S.FAILED
    assert [e.message for e in ended.errors] == ["it could not be run: RuntimeError('a bug')"]
    assert "could not be run" in caplog.text


@on_virtual_time
async def test_execute_job_waits_for_a_job_that_another_process_runs() -> None:
    store = MemoryPipelineStore()
    async with Process(store) as here, Process(store, "another") as other:
        job = await here.manager.start_job("news")
        await asyncio.sleep(1.5)
        assert (await other.manager.execute_job(job.id)).status is _S.COMPLETED
    assert other.journal.begun == []


@on_virtual_time
async def test_a_stage_that_raises_fails_and_the_next_one_runs() -> None:
    async with Process(MemoryPipelineStore()) as here:
        here.journal.failing = {("brief", "")}
        job = await here.manager.start_job("news", {"enable_evaluation": True})
        ended = await here.manager.wait(job.id)
    assert ended.status is _S.PARTIAL
    assert ended.stage_progress["brief"].status is StageStatus.FAILED
    assert ("evaluation", "") in here.journal.ended
