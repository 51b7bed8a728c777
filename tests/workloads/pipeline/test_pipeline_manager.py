"""PipelineJobManager: seed 002's names over an engine inside the process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from penstock import AsyncPipelineOrchestrator, PipelineJobManager, RunQuery, pipeline_jobs
from penstock.app import pipelines as front
from penstock.core.errors import (
    IllegalMove,
    InvalidRequest,
    Misconfigured,
    NotFound,
    PipelineBusy,
    Unavailable,
    WaitTimedOut,
)
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.testing.aio import run_async
from penstock.workloads.pipeline.context import AsyncStageContext
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.records import PipelineEventKind, PipelineRecord

_S, _K = PipelineJobStatus, PipelineEventKind
HOUR = 3600.0
STALE = "Job timed out or was orphaned"


class Config(Struct):
    sources: tuple[str, ...] = ("a", "b")


class News:
    """A pipeline of three stages whose calls can be stopped, and fail."""

    def __init__(self, **options: Any) -> None:
        self.begun: list[tuple[str, str]] = []
        self.failing: set[str] = set()
        self.stuck: set[str] = set()
        """Stages whose calls never end."""
        self.reached = asyncio.Event()
        """Set when such a call has begun."""
        self.definition = news = Definition("news", config=Config, cancel_grace=0.5, **options)

        @news.map(over="sources")
        async def ingest(source: str, ctx: AsyncStageContext) -> list[str]:
            await self.work(ctx)
            return [f"{source}{n}" for n in range(2)]

        @news.map(over=ingest)
        async def classify(article: str, ctx: AsyncStageContext) -> str:
            await self.work(ctx)
            return article

        @news.step()
        async def brief(results: Any, ctx: AsyncStageContext) -> str:
            await self.work(ctx)
            return " ".join([article async for article in results])

    async def work(self, ctx: AsyncStageContext) -> None:
        self.begun.append((ctx.stage, ctx.key))
        if ctx.stage in self.stuck:
            self.reached.set()
            await asyncio.Event().wait()
        if ctx.key in self.failing:
            raise ValueError(f"{ctx.key} can't be done")

    def stages(self) -> list[str]:
        return list(dict.fromkeys(stage for stage, _ in self.begun))


def manager(tmp_path: Path, news: News) -> PipelineJobManager:
    return PipelineJobManager(tmp_path / "data", [news.definition])


def at_hour(monkeypatch: pytest.MonkeyPatch, hours: float) -> None:
    """Let the manager believe that it is so much later."""
    now = front.__dict__["time"].time()
    monkeypatch.setattr(front, "time", type("Later", (), {"time": lambda: now + hours * HOUR}))


# -- starting ---------------------------------------------------------------------


@pytest.mark.seed("002", "1.1")
@run_async
async def test_start_job_records_a_pending_job_and_runs_it_in_the_background(
    tmp_path: Path,
) -> None:
    news = News()
    async with manager(tmp_path, news) as here:
        job = await here.start_job(news.definition, {"sources": ["a"]})
        assert (job.status, job.started_at, job.config) == (_S.PENDING, None, {"sources": ["a"]})
        assert len(job.trace_id) == 36
        ended = await here.wait(job.id)
    assert ended.status is _S.COMPLETED
    assert ended.started_at is not None
    assert news.stages() == ["ingest", "classify", "brief"]


@pytest.mark.seed("002", "7.10")
@run_async
async def test_create_job_and_execute_job_are_names_for_it_too(tmp_path: Path) -> None:
    news = News()
    async with pipeline_jobs(tmp_path / "data", news.definition) as here:
        job = await here.create_job("news")
        ended = await here.execute_job(job.id)
    assert ended.status is _S.COMPLETED
    assert news.begun.count(("brief", "")) == 1


@run_async
async def test_a_pipeline_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    async with manager(tmp_path, News()) as here:
        with pytest.raises(NotFound) as caught:
            await here.start_job("nws")
        assert caught.value.hint == "did you mean news?"
        with pytest.raises(NotFound) as caught:  # of the same name, but another
            await here.start_job(News().definition)
        assert caught.value.hint == "there are: news"


@pytest.mark.parametrize(
    ("config", "field"),
    [({"sources": 3}, "config.sources"), ({"sauces": []}, "config.sauces"), ([], "config")],
)
@run_async
async def test_a_wrong_config_is_refused_by_the_name_of_its_field(
    config: Any, field: str, tmp_path: Path
) -> None:
    async with manager(tmp_path, News()) as here:
        with pytest.raises(InvalidRequest) as caught:
            await here.start_job("news", config)
        assert caught.value.field == field
        assert await here.list_jobs() == []


@run_async
async def test_a_second_start_is_refused_while_one_runs_and_names_that_one(
    tmp_path: Path,
) -> None:
    news = News()
    news.stuck = {"brief"}
    async with manager(tmp_path, news) as here:
        first = await here.start_job("news")
        with pytest.raises(PipelineBusy) as caught:
            await here.start_job("news")
        assert caught.value.running == first.id
        assert (await here.cancel_job(first.id)).accepted
        news.stuck.clear()
        second = await here.start_job("news")
        assert (await here.wait(second.id)).status is _S.COMPLETED


@pytest.mark.seed("002", "7.18")
@run_async
async def test_a_pipeline_that_is_not_single_flight_runs_as_often_as_it_is_started(
    tmp_path: Path,
) -> None:
    async with manager(tmp_path, News(single_flight=False)) as here:
        jobs = [await here.start_job("news") for _ in range(3)]
        assert [(await here.wait(job.id)).status for job in jobs] == [_S.COMPLETED] * 3


@run_async
async def test_the_same_key_is_the_same_job(tmp_path: Path) -> None:
    news = News()
    async with manager(tmp_path, news) as here:
        first = await here.start_job("news", key="one")
        await here.wait(first.id)
        assert (await here.start_job("news", key="one")).id == first.id
    assert news.begun.count(("brief", "")) == 1


@run_async
async def test_a_manager_answers_nothing_before_it_is_entered_or_after_it_is_left(
    tmp_path: Path,
) -> None:
    here = manager(tmp_path, News())
    with pytest.raises(Unavailable):
        await here.start_job("news")
    async with here:
        pass
    with pytest.raises(Unavailable):
        await here.list_jobs()
    await here.shutdown()  # again: nothing happens


def test_a_file_is_not_a_folder(tmp_path: Path) -> None:
    (tmp_path / "jobs.db").touch()
    with pytest.raises(Misconfigured, match="is a file"):
        pipeline_jobs(tmp_path / "jobs.db")


# -- asking -----------------------------------------------------------------------


@run_async
async def test_what_is_not_there_is_not_found(tmp_path: Path) -> None:
    async with manager(tmp_path, News()) as here:
        for ask in (
            here.get_job("none"),
            here.cancel_job("none"),
            here.wait("none"),
            here.retry_failed("none"),
            here.items("none", "ingest"),
            here.execute_job("none"),
            anext(here.events("none")),
        ):
            with pytest.raises(NotFound):
                await ask  # type: ignore[misc]


@run_async
async def test_jobs_are_listed_newest_first(tmp_path: Path) -> None:
    async with manager(tmp_path, News()) as here:
        ids = []
        for _ in range(3):
            ids.append((await here.start_job("news")).id)
            await here.wait(ids[-1])
        assert [job.id for job in await here.list_jobs()] == ids[::-1]
        assert await here.list_jobs(RunQuery(statuses=(_S.FAILED,))) == []


@run_async
async def test_items_of_a_stage_are_paged_and_an_unknown_stage_is_not_found(
    tmp_path: Path,
) -> None:
    async with manager(tmp_path, News()) as here:
        job = await here.start_job("news")
        await here.wait(job.id)
        first = await here.items(job.id, "classify", limit=3)
        rest = await here.items(job.id, "classify", after=first[-1].seq)
        assert [item.key for item in (*first, *rest)] == ["0/0", "0/1", "1/0", "1/1"]
        with pytest.raises(NotFound) as caught:
            await here.items(job.id, "polish")
    assert caught.value.hint == "there are: ingest, classify, brief"


@run_async
async def test_a_wait_ends_with_its_timeout_and_the_job_goes_on(tmp_path: Path) -> None:
    news = News()
    news.stuck = {"brief"}
    async with manager(tmp_path, news) as here:
        job = await here.start_job("news")
        await news.reached.wait()
        with pytest.raises(WaitTimedOut):
            await here.wait(job.id, timeout=0.01)
        assert (await here.get_job(job.id)).status is _S.RUNNING


@run_async
async def test_events_come_in_order_and_end_with_the_job(tmp_path: Path) -> None:
    async with manager(tmp_path, News()) as here:
        job = await here.start_job("news")
        kinds = [event.kind async for event in here.events(job.id)]
        assert kinds[-1] is _K.JOB_COMPLETE
        stored = [event async for event in here.events(job.id)]
        starts = [event.data["stage"] for event in stored if event.kind is _K.STAGE_START]
        assert starts == ["ingest", "classify", "brief"]
        ids = [event.id or 0 for event in stored]
        assert ids == sorted(set(ids))
        rest = [event async for event in here.events(job.id, after=ids[3])]
        assert rest == stored[4:]


@run_async
async def test_a_first_step_that_takes_long_is_seen_to_run(tmp_path: Path) -> None:
    slow = Definition("slow", cancel_grace=0.1)

    @slow.step()
    async def long() -> None:
        await asyncio.Event().wait()

    async with pipeline_jobs(tmp_path / "data", slow) as here, asyncio.timeout(10):
        job = await here.start_job("slow")
        async for event in here.events(job.id):
            if event.kind is _K.STAGE_START:
                break
        record = await here.get_job(job.id)
    assert (record.status, record.current_stage) == (_S.RUNNING, "long")


# -- retrying what failed ---------------------------------------------------------


@run_async
async def test_retry_failed_runs_what_failed_and_what_depends_on_it(tmp_path: Path) -> None:
    news = News()
    news.failing = {"0/0"}
    async with manager(tmp_path, news) as here:
        first = await here.wait((await here.start_job("news")).id)
        assert first.status is _S.PARTIAL
        news.failing, news.begun = set(), []
        second = await here.retry_failed(first.id)
        ended = await here.wait(second.id)
        with pytest.raises(InvalidRequest):
            await here.retry_failed(second.id)
    assert (ended.status, ended.retry_of, ended.trigger) == (_S.COMPLETED, first.id, "retry")
    assert news.begun == [("classify", "0/0"), ("brief", "")]


@run_async
async def test_a_running_job_is_not_retried(tmp_path: Path) -> None:
    news = News()
    news.stuck = {"brief"}
    async with manager(tmp_path, news) as here:
        job = await here.start_job("news")
        with pytest.raises(IllegalMove):
            await here.retry_failed(job.id)


@pytest.mark.seed("002", "3.4", "8.10")
@run_async
async def test_a_stage_that_raises_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    two = Definition("two")

    @two.step()
    async def broken() -> None:
        raise ValueError("no")

    @two.step()
    async def sound() -> int:
        return 1

    async with pipeline_jobs(tmp_path / "data", two) as here:
        ended = await here.wait((await here.start_job(two)).id)
    assert ended.status is _S.PARTIAL
    assert [stage.status.value for stage in ended.stages] == ["failed", "completed"]


@pytest.mark.seed("002", "1.7")
@run_async
async def test_an_exception_of_the_orchestrator_fails_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(self: AsyncPipelineOrchestrator) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(AsyncPipelineOrchestrator, "_run_stages", broken)
    async with manager(tmp_path, News()) as here:
        ended = await here.wait((await here.start_job("news")).id)
    assert ended.status is _S.FAILED
    assert [(error.stage, error.message) for error in ended.errors] == [("orchestrator", "a bug")]


# -- stopping and sharing ---------------------------------------------------------


@pytest.mark.seed("002", "7.11", "8.12")
@run_async
async def test_a_shutdown_leaves_jobs_running_and_the_next_start_goes_on(tmp_path: Path) -> None:
    news = News()
    news.stuck = {"brief"}
    async with manager(tmp_path, news) as here:
        job = await here.start_job("news")
        await news.reached.wait()
    news.stuck, news.begun = set(), []
    async with manager(tmp_path, news) as again:
        assert not (await again.get_job(job.id)).is_final
        ended = await again.wait(job.id)
    assert (ended.status, ended.attempt) == (_S.COMPLETED, 2)
    assert news.stages() == ["brief"]


@run_async
async def test_a_job_that_was_started_a_moment_before_the_shutdown_is_not_lost(
    tmp_path: Path,
) -> None:
    news = News()
    async with manager(tmp_path, news) as here:
        job = await here.start_job("news")
    async with manager(tmp_path, news) as again:
        assert (await again.wait(job.id)).status is _S.COMPLETED


@run_async
async def test_managers_of_one_folder_see_each_others_jobs(tmp_path: Path) -> None:
    news, other = News(), Definition("other")

    @other.step()
    async def only() -> int:
        return 1

    async with manager(tmp_path, news) as here, pipeline_jobs(tmp_path / "data", other) as there:
        job = await there.start_job("news")
        assert (await there.execute_job(job.id)).status is _S.COMPLETED
        kinds = [event.kind async for event in there.events(job.id)]
        assert kinds[-1] is _K.JOB_COMPLETE
        of_there = await here.start_job("other")
        assert (await here.wait(of_there.id)).status is _S.COMPLETED


# -- stale jobs -------------------------------------------------------------------


def _failed_as_stale(record: PipelineRecord) -> bool:
    assert (record.cancel_requested, record.cancel_effective) == (False, None)
    assert record.finished_at is not None
    return record.status is _S.FAILED and record.errors[-1].message == STALE


@pytest.mark.seed("002", "5.2")
@run_async
async def test_a_job_that_is_running_without_progress_for_two_hours_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    news = News()
    news.stuck = {"classify"}
    async with manager(tmp_path, news) as here:
        job = await here.start_job("news")
        await news.reached.wait()
        at_hour(monkeypatch, 1.9)
        assert await here.cleanup_stale_jobs() == []
        at_hour(monkeypatch, 0.2)  # on top of that
        assert await here.cleanup_stale_jobs() == [job.id]
        assert _failed_as_stale(await here.get_job(job.id))
        assert await here.cleanup_stale_jobs() == []
        assert [one.id for one in await here.list_jobs(RunQuery(statuses=(_S.FAILED,)))] == [job.id]
        assert await here.list_jobs(RunQuery(statuses=(_S.CANCELLED,))) == []


@pytest.mark.seed("002", "5.1")
@run_async
async def test_a_job_that_gets_nowhere_is_stopped_and_fails(tmp_path: Path) -> None:
    news = News(stale_after=0.3)
    news.stuck = {"classify"}
    async with manager(tmp_path, news) as here:
        job = await here.start_job("news")
        assert _failed_as_stale(await here.wait(job.id, timeout=30))


@pytest.mark.seed("002", "8.14")
@run_async
async def test_a_call_that_reports_progress_may_take_longer_than_that(tmp_path: Path) -> None:
    slow = Definition("slow", stale_after=2.0)

    @slow.step()
    async def long(ctx: AsyncStageContext) -> None:
        for n in range(30):
            ctx.progress(n / 30)
            await asyncio.sleep(0.1)

    async with pipeline_jobs(tmp_path / "data", slow) as here:
        job = await here.start_job("slow")
        assert (await here.wait(job.id, timeout=60)).status is _S.COMPLETED


@pytest.mark.seed("002", "7.11")
@run_async
async def test_a_job_that_nobody_runs_fails_after_two_hours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    news = News()
    news.stuck = {"classify"}
    async with manager(tmp_path, news) as here:
        job = await here.start_job("news")
        await news.reached.wait()
    async with pipeline_jobs(tmp_path / "data") as elsewhere:
        assert await elsewhere.cleanup_stale_jobs() == []
        at_hour(monkeypatch, 2.1)
        assert await elsewhere.cleanup_stale_jobs() == [job.id]
        ended = await elsewhere.get_job(job.id)
        assert _failed_as_stale(ended)
        assert [stage.status.value for stage in ended.stages] == ["completed", "failed", "skipped"]


@run_async
async def test_a_limit_of_its_own_counts_and_none_means_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit, found in ((10 * HOUR, 0), (None, 0), (0.5 * HOUR, 1)):
        news = News(stale_after=limit)
        news.stuck = {"ingest"}
        async with PipelineJobManager(tmp_path / str(limit), [news.definition]) as here:
            await here.start_job("news")
            await news.reached.wait()
            at_hour(monkeypatch, 3)
            assert len(await here.cleanup_stale_jobs()) == found
        monkeypatch.undo()


@pytest.mark.seed("002", "7.11", "8.14")
@run_async
async def test_a_call_may_take_as_long_as_its_stage_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, begun = Definition("slow", cancel_grace=0.1), asyncio.Event()

    @slow.step(timeout=5 * HOUR)
    async def long() -> None:
        begun.set()
        await asyncio.Event().wait()

    async with pipeline_jobs(tmp_path / "data", slow) as here:
        await here.start_job("slow")
        await begun.wait()
        at_hour(monkeypatch, 3)
        assert await here.cleanup_stale_jobs() == []


@run_async
async def test_a_pipeline_may_say_that_a_job_whose_process_is_gone_fails(tmp_path: Path) -> None:
    news = News(on_orphan="fail")
    news.stuck = {"classify"}
    async with manager(tmp_path, news) as here:
        job = await here.start_job("news")
        await news.reached.wait()
    async with pipeline_jobs(tmp_path / "data") as elsewhere:
        assert _failed_as_stale(await elsewhere.wait(job.id, timeout=30))


@run_async
async def test_a_cancelled_job_that_waited_is_not_stale(tmp_path: Path) -> None:
    news = News()
    news.stuck = {"brief"}
    async with manager(tmp_path, news) as here:
        job = await here.start_job("news")
        await news.reached.wait()
    async with pipeline_jobs(tmp_path / "data") as elsewhere:
        assert (await elsewhere.cancel_job(job.id, timeout=1)).status is _S.CANCELLED
        ended = await elsewhere.get_job(job.id)
        assert (ended.status, ended.cancel_effective) == (_S.CANCELLED, True)
