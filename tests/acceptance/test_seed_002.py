"""Seed 002, sentence by sentence, as a user of a pipeline meets it.

tests/seeds/002.md numbers the sentences; marks say which test holds which. Most of it runs with a
`PipelineJobManager`, and what "the DB says" is read from its folder by somebody else.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.support.waiting import soon

import penstock
from penstock import JobState, PipelineJobStatus, StageStatus
from penstock.app import pipelines as front
from penstock.app.offline import offline
from penstock.config import load
from penstock.testing.aio import run_async
from penstock.workloads.pipeline import status, summary
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.orchestrator import AsyncPipelineOrchestrator
from penstock.workloads.pipeline.records import PipelineEventKind, PipelineRecord

_S = PipelineJobStatus
STAGES = ("ingest", "classify", "neutralize", "brief", "evaluation", "optimization")
ALL = {"enable_evaluation": True, "enable_auto_optimize": True}
TWO_HOURS = 7200.0


class Config(msgspec.Struct, frozen=True, kw_only=True):
    sources: tuple[str, ...] = ("a", "b")
    enable_evaluation: bool = False
    enable_auto_optimize: bool = False


class News:
    """The seed's six stages over two articles a source; any can be held, and made to fail."""

    def __init__(self, *, critical: bool = False, **options: Any) -> None:
        self.ran: list[str] = []
        """Stages, in the order in which they began."""
        self.broken: set[str] = set()
        """`classify` fails altogether, `classify a0` for this article."""
        self.complaining: set[str] = set()
        self.held: dict[str, asyncio.Event] = {}
        self.reached: defaultdict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.stopped: list[str] = []
        """What was running when CancelledError came."""
        self.pipeline = self._declared(critical, options)

    def _declared(self, critical: bool, options: dict[str, Any]) -> penstock.Pipeline:
        news = penstock.Pipeline("news", config=Config, summary_after="brief", **options)

        @news.map(over="sources", critical=critical)
        async def ingest(source: str, ctx: Any) -> list[str]:
            await self._work(ctx, source)
            return [f"{source}0", f"{source}1"]

        @news.map(over=ingest)
        async def classify(article: str, ctx: Any) -> str:
            await self._work(ctx, article)
            return article

        @news.map(over=classify)
        async def neutralize(article: str, ctx: Any) -> str:
            await self._work(ctx, article)
            return article.upper()

        @news.step()
        async def brief(results: Any, ctx: Any) -> str:
            await self._work(ctx)
            return " ".join([article async for article in results])

        @news.step(enabled="enable_evaluation")
        async def evaluation(results: Any, ctx: Any) -> float:
            await self._work(ctx)
            return 9.5

        @news.step(enabled="enable_auto_optimize", needs=[evaluation])
        async def optimization(results: Any, ctx: Any) -> str:
            await self._work(ctx)
            return "better"

        return news

    async def _work(self, ctx: Any, article: str = "") -> None:
        if ctx.stage not in self.ran:
            self.ran.append(ctx.stage)
        self.reached[ctx.stage].set()
        try:
            if ctx.stage in self.held:
                await self.held[ctx.stage].wait()
        except asyncio.CancelledError:
            self.stopped.append(ctx.stage)
            raise
        if {ctx.stage, f"{ctx.stage} {article}"} & self.broken:
            raise ValueError(f"{ctx.stage} {article} went wrong")
        if ctx.stage in self.complaining:
            ctx.error("not all of it could be done")

    def hold(self, stage: str) -> asyncio.Event:
        self.held[stage] = asyncio.Event()
        return self.held[stage]


def six_steps(broken: tuple[str, ...]) -> penstock.Pipeline:
    """Six stages that depend on nothing, so that each can end as it likes."""
    pipeline = penstock.Pipeline("six")
    for name in STAGES:

        @pipeline.step(name=name)
        async def stage(ctx: Any) -> None:
            if ctx.stage in broken:
                raise ValueError("it threw")

    return pipeline


def at(monkeypatch: pytest.MonkeyPatch, later: float) -> None:
    """Let managers believe that it is so many seconds later."""
    now = time.time() + later
    monkeypatch.setattr(front, "time", type("Later", (), {"time": lambda: now}))


async def in_the_file(folder: Path, job_id: str) -> PipelineRecord:
    """What somebody else reads there now."""
    async with offline(load(flags={"data_dir": str(folder / "runs")})) as api:
        return await api.pipelines.get(job_id)


async def run_to_its_end(
    folder: Path, pipeline: Definition, config: dict[str, Any] | None = None
) -> PipelineRecord:
    async with penstock.pipeline_jobs(folder / "runs", pipeline) as jobs:
        job = await jobs.start_job(pipeline, config)
        return await jobs.wait(job.id, 20)


def statuses(record: PipelineRecord) -> dict[str, str]:
    return {stage.name: stage.status.value for stage in record.stages}


def reasons(record: PipelineRecord) -> dict[str, str]:
    return {stage.name: stage.reason for stage in record.stages if stage.reason}


# -- Job status -------------------------------------------------------------------------------


@pytest.mark.seed("002", "1.1")
@pytest.mark.parametrize("name", ["start_job", "create_job"])
@run_async
async def test_a_job_that_is_created_is_pending_until_its_background_task_starts(
    name: str, tmp_path: Path
) -> None:
    news = News()
    async with penstock.pipeline_jobs(tmp_path / "runs", news.pipeline) as jobs:
        await jobs._api.pause_pool("default")
        job = await getattr(jobs, name)("news")
        assert job.status is _S.PENDING
        held = await in_the_file(tmp_path, job.id)
        assert (held.status, held.started_at, held.finished_at) == (_S.PENDING, None, None)
        assert news.ran == []
        await jobs._api.resume_pool("default")
        assert (await jobs.wait(job.id, 20)).status is _S.COMPLETED


@pytest.mark.seed("002", "1.2")
@run_async
async def test_a_job_whose_task_has_started_is_running_since_then(tmp_path: Path) -> None:
    news = News()
    gate = news.hold("ingest")
    async with penstock.pipeline_jobs(tmp_path / "runs", news.pipeline) as jobs:
        job = await jobs.start_job("news")
        await news.reached["ingest"].wait()
        held = await in_the_file(tmp_path, job.id)
        assert (held.status, held.current_stage) == (_S.RUNNING, "ingest")
        assert held.started_at is not None
        assert job.created_at <= held.started_at
        assert held.finished_at is None
        gate.set()
        ended = await jobs.wait(job.id, 20)
    assert ended.started_at == held.started_at
    assert ended.finished_at is not None
    assert ended.finished_at >= held.started_at


@pytest.mark.seed("002", "1.3")
@run_async
async def test_a_job_that_is_cancelled_before_it_starts_is_cancelled_and_never_runs(
    tmp_path: Path,
) -> None:
    news = News()
    async with penstock.pipeline_jobs(tmp_path / "runs", news.pipeline) as jobs:
        await jobs._api.pause_pool("default")
        job = await jobs.start_job("news")
        answer = await jobs.cancel_job(job.id)
        assert (answer.accepted, answer.status) == (True, _S.CANCELLED)
        held = await in_the_file(tmp_path, job.id)
    assert (held.status, held.started_at) == (_S.CANCELLED, None)
    assert held.finished_at is not None
    assert news.ran == []


@pytest.mark.seed("002", "1.4")
@run_async
async def test_a_job_all_of_whose_stages_succeed_is_completed(tmp_path: Path) -> None:
    news = News()
    ended = await run_to_its_end(tmp_path, news.pipeline, ALL)
    assert ended.status is _S.COMPLETED
    assert statuses(ended) == dict.fromkeys(STAGES, "completed")
    assert ended.errors == ()


@pytest.mark.seed("002", "1.5")
@run_async
async def test_a_job_with_good_and_failed_stages_is_partial(tmp_path: Path) -> None:
    news = News()
    news.broken = {"evaluation"}
    ended = await run_to_its_end(tmp_path, news.pipeline, {"enable_evaluation": True})
    assert ended.status is _S.PARTIAL
    assert statuses(ended)["brief"] == "completed"
    assert statuses(ended)["evaluation"] == "failed"
    (error,) = ended.errors
    assert error.stage == "evaluation"
    assert "went wrong" in error.message


@pytest.mark.seed("002", "1.6")
@run_async
async def test_a_job_of_which_nothing_succeeds_has_failed(tmp_path: Path) -> None:
    news = News()
    news.broken = set(STAGES)
    ended = await run_to_its_end(tmp_path, news.pipeline, ALL)
    assert ended.status is _S.FAILED
    assert set(statuses(ended).values()) == {"failed", "skipped"}
    assert ended.finished_at is not None


@pytest.mark.seed("002", "1.7")
@run_async
async def test_an_exception_of_the_orchestrator_fails_the_job_whatever_was_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    news = News()
    run_stage = AsyncPipelineOrchestrator._run_stage

    async def broken(self: AsyncPipelineOrchestrator, stage: Any) -> None:
        if stage.name == "classify":
            raise RuntimeError("a bug of its own")
        await run_stage(self, stage)

    monkeypatch.setattr(AsyncPipelineOrchestrator, "_run_stage", broken)
    ended = await run_to_its_end(tmp_path, news.pipeline)
    assert ended.status is _S.FAILED
    assert statuses(ended)["ingest"] == "completed"
    assert [(error.stage, error.message) for error in ended.errors] == [
        ("orchestrator", "a bug of its own")
    ]
    assert news.ran == ["ingest"]
    assert ended.finished_at is not None


@pytest.mark.seed("002", "1.8")
@run_async
async def test_a_first_stage_that_is_critical_fails_the_job_and_nothing_else_runs(
    tmp_path: Path,
) -> None:
    news = News(critical=True)
    news.broken = {"ingest"}
    ended = await run_to_its_end(tmp_path, news.pipeline, ALL)
    assert ended.status is _S.FAILED
    assert news.ran == ["ingest"]
    assert reasons(ended) == {
        "ingest": "no item succeeded",
        **dict.fromkeys(STAGES[1:], "critical_stage_failed"),
    }


@pytest.mark.seed("002", "7.1")
@run_async
async def test_a_first_stage_that_is_not_critical_leaves_the_rest_its_chance(
    tmp_path: Path,
) -> None:
    news = News()
    news.broken = {"ingest"}
    ended = await run_to_its_end(tmp_path, news.pipeline)
    assert ended.status is _S.PARTIAL
    assert news.ran == ["ingest", "brief"]


@pytest.mark.seed("002", "1.9")
@run_async
async def test_a_running_job_that_is_cancelled_is_cancelled_once_it_has_stopped(
    tmp_path: Path,
) -> None:
    news = News(cancel_grace=0.2)
    news.hold("classify")
    async with penstock.pipeline_jobs(tmp_path / "runs", news.pipeline) as jobs:
        job = await jobs.start_job("news")
        await news.reached["classify"].wait()
        answer = await jobs.cancel_job(job.id, timeout=20)
        assert (answer.accepted, answer.status) == (True, _S.CANCELLED)
        held = await in_the_file(tmp_path, job.id)
    assert held.status is _S.CANCELLED
    assert held.started_at is not None
    assert held.finished_at is not None
    assert news.ran == ["ingest", "classify"]
    assert set(news.stopped) == {"classify"}


@pytest.mark.seed("002", "1.12")
@pytest.mark.parametrize("end", [_S.COMPLETED, _S.PARTIAL, _S.FAILED, _S.CANCELLED])
@run_async
async def test_an_end_is_final(
    end: PipelineJobStatus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    news = News(critical=True, cancel_grace=0.1)
    news.broken = {_S.PARTIAL: {"classify a0"}, _S.FAILED: {"ingest"}}.get(end, set())
    if end is _S.CANCELLED:
        news.hold("ingest")
    async with penstock.pipeline_jobs(tmp_path / "runs", news.pipeline) as jobs:
        job = await jobs.start_job("news")
        if end is _S.CANCELLED:
            await news.reached["ingest"].wait()
            await jobs.cancel_job(job.id)
        ended = await jobs.wait(job.id, 20)
        assert ended.status is end
        news.ran.clear()
        answer = await jobs.cancel_job(job.id)
        assert (answer.accepted, answer.status) == (False, end)
        assert await jobs.execute_job(job.id) == ended
    at(monkeypatch, 2 * TWO_HOURS)
    async with penstock.pipeline_jobs(tmp_path / "runs", news.pipeline) as jobs:
        assert await jobs.cleanup_stale_jobs() == []
        assert await jobs.get_job(job.id) == ended
    assert await in_the_file(tmp_path, job.id) == ended
    assert news.ran == []


# -- Stage execution --------------------------------------------------------------------------


@pytest.mark.seed("002", "2.1")
@run_async
async def test_stages_run_one_after_the_other_in_the_order_of_the_flowchart(
    tmp_path: Path,
) -> None:
    news = News()
    async with penstock.pipeline_jobs(tmp_path / "runs", news.pipeline) as jobs:
        job = await jobs.start_job("news", ALL)
        told = [
            (event.kind.value, event.data["stage"])
            async for event in jobs.events(job.id)
            if event.kind in (PipelineEventKind.STAGE_START, PipelineEventKind.STAGE_COMPLETE)
        ]
    steps = [(kind, name) for name in STAGES for kind in ("stage_start", "stage_complete")]
    assert [(kind, str(name)) for kind, name in told] == steps
    assert news.ran == list(STAGES)


class Spy:
    """Cancels a job from outside, just before a check; and sees what the orchestrator does by the
    seed's own names."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, at: int | None, *, waits: bool = True
    ) -> None:
        """Before check number `at`; with `waits`, until the orchestrator has been told of it."""
        self.told: list[tuple[str, bool | int]] = []
        self.made = 0
        check = AsyncPipelineOrchestrator._check_cancelled
        build = AsyncPipelineOrchestrator._build_cancelled_result

        async def checking(orchestrator: AsyncPipelineOrchestrator) -> bool:
            self.made += 1
            if self.made == at:
                await self._mark(folder)
                if waits:
                    await soon(lambda: orchestrator._stopping is not None)
            answer = await check(orchestrator)
            self.told.append(("_check_cancelled", answer))
            return answer

        def building(orchestrator: AsyncPipelineOrchestrator) -> Any:
            self.told.append(("_build_cancelled_result", self.made))
            return build(orchestrator)

        monkeypatch.setattr(AsyncPipelineOrchestrator, "_check_cancelled", checking)
        monkeypatch.setattr(AsyncPipelineOrchestrator, "_build_cancelled_result", building)

    async def _mark(self, folder: Path) -> None:
        async with penstock.connect(data=folder / "runs") as client:
            (job,) = await client.api.pipelines.runs(penstock.RunQuery())
            await client.api.pipelines.cancel(job.id, timeout=0)


@pytest.mark.seed("002", "2.2")
@run_async
async def test_the_first_check_finds_what_was_cancelled_before_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    news, spy = News(), Spy(tmp_path, monkeypatch, 1)
    ended = await run_to_its_end(tmp_path, news.pipeline, ALL)
    assert ended.status is _S.CANCELLED
    assert list(statuses(ended).values()) == ["skipped"] * 6
    assert ended.finished_at is not None
    assert news.ran == []
    assert spy.told == [("_check_cancelled", True), ("_build_cancelled_result", 1)]


@pytest.mark.seed("002", "2.3", "2.4", "2.5", "2.6", "2.7", "4.2", "4.5", "8.2")
@pytest.mark.parametrize("check", range(2, 7))
@run_async
async def test_each_check_sees_a_cancel_from_outside_and_leads_to_cancelled(
    check: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    news, spy = News(), Spy(tmp_path, monkeypatch, check)
    async with penstock.pipeline_jobs(tmp_path / "runs", news.pipeline) as jobs:
        job = await jobs.start_job("news", ALL)
        ended = await jobs.wait(job.id, 20)
        events = [event async for event in jobs.events(job.id)]
    assert ended.status is _S.CANCELLED
    started = [e.data["stage"] for e in events if e.kind is PipelineEventKind.STAGE_START]
    assert started == list(STAGES[: check - 1])
    assert ended.finished_at is not None
    assert news.ran == list(STAGES[: check - 1])
    assert list(statuses(ended).values()) == ["completed"] * (check - 1) + ["skipped"] * (7 - check)
    assert spy.told == [
        *[("_check_cancelled", False)] * (check - 1),
        ("_check_cancelled", True),
        ("_build_cancelled_result", check),
    ]


@pytest.mark.seed("002", "4.2", "7.21")
@pytest.mark.parametrize("check", range(2, 7))
@run_async
async def test_no_stage_runs_after_a_cancel_that_is_in_the_database_before_its_check(
    check: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    news = News()
    Spy(tmp_path, monkeypatch, check, waits=False)
    ended = await run_to_its_end(tmp_path, news.pipeline, ALL)
    assert ended.status is _S.CANCELLED
    assert news.ran == list(STAGES[: check - 1])


@pytest.mark.seed("002", "2.8")
@run_async
async def test_a_check_that_finds_nothing_lets_its_stage_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    news, spy = News(), Spy(tmp_path, monkeypatch, None)
    ended = await run_to_its_end(tmp_path, news.pipeline, ALL)
    assert ended.status is _S.COMPLETED
    assert spy.told == [("_check_cancelled", False)] * 6
    assert news.ran == list(STAGES)


@pytest.mark.seed("002", "2.9")
@run_async
async def test_the_summary_is_made_between_the_brief_and_the_look_at_the_evaluation_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    news = News()
    is_enabled, summarise = status.is_enabled, summary.summarise

    def asked(stage: Any, config: Any) -> bool:
        told.append(f"{stage.name}?")
        return is_enabled(stage, config)

    def made(record: PipelineRecord, now: float) -> Any:
        told.append(f"summary of a run that is {record.status.value}")
        told.append(f"brief is {statuses(record)['brief']}")
        return summarise(record, now)

    monkeypatch.setattr(status, "is_enabled", asked)
    monkeypatch.setattr(summary, "summarise", made)
    await run_to_its_end(tmp_path, news.pipeline)
    assert told[3:] == [
        "brief?",
        "summary of a run that is RUNNING",
        "brief is completed",
        "evaluation?",
        "optimization?",
        "summary of a run that is COMPLETED",
        "brief is completed",
    ]


@pytest.mark.seed("002", "2.9", "7.15")
@run_async
async def test_the_summary_can_be_read_while_evaluation_runs_and_is_closed_at_the_end(
    tmp_path: Path,
) -> None:
    news = News()
    before, gate = news.hold("brief"), news.hold("evaluation")
    async with penstock.pipeline_jobs(tmp_path / "runs", news.pipeline) as jobs:
        job = await jobs.start_job("news", ALL)
        await news.reached["brief"].wait()
        assert (await in_the_file(tmp_path, job.id)).summary is None
        before.set()
        await news.reached["evaluation"].wait()
        held = (await in_the_file(tmp_path, job.id)).summary
        gate.set()
        ended = await jobs.wait(job.id, 20)
    assert held is not None
    assert held.finished_at is None
    assert [held.stages[name]["status"] for name in STAGES] == ["completed"] * 4 + ["pending"] * 2
    assert ended.summary is not None
    assert ended.summary.status is _S.COMPLETED
    assert ended.summary.finished_at == pytest.approx(ended.finished_at, abs=1)
    assert ended.summary.stages["optimization"]["status"] == "completed"


@pytest.mark.seed("002", "2.10", "2.11", "8.8")
@pytest.mark.parametrize(
    ("evaluate", "optimize", "skipped"),
    [
        (False, False, {"evaluation": "disabled", "optimization": "disabled"}),
        (False, True, {"evaluation": "disabled", "optimization": "evaluation_disabled"}),
        (True, False, {"optimization": "disabled"}),
        (True, True, {}),
    ],
)
@run_async
async def test_the_flags_decide_whether_evaluation_and_optimization_run(
    evaluate: bool,
    optimize: bool,
    skipped: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    news, spy = News(), Spy(tmp_path, monkeypatch, None)
    config = {"enable_evaluation": evaluate, "enable_auto_optimize": optimize}
    ended = await run_to_its_end(tmp_path, news.pipeline, config)
    assert ended.status is _S.COMPLETED
    assert news.ran == [name for name in STAGES if name not in skipped]
    assert reasons(ended) == skipped
    assert spy.made == len(news.ran), "what a flag leaves out is not checked for either"


@pytest.mark.seed("002", "1.6", "2.12", "2.13", "2.14", "2.15")
@pytest.mark.parametrize(
    ("broken", "end"),
    [
        ((), _S.COMPLETED),
        (("ingest",), _S.PARTIAL),
        (("classify", "evaluation"), _S.PARTIAL),
        (STAGES[:5], _S.PARTIAL),
        (STAGES, _S.FAILED),
    ],
)
@run_async
async def test_the_end_is_determined_by_how_the_stages_ended(
    broken: tuple[str, ...], end: PipelineJobStatus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    determined: list[PipelineJobStatus] = []
    determine = AsyncPipelineOrchestrator._determine_overall_status

    def seen(self: AsyncPipelineOrchestrator) -> PipelineJobStatus:
        determined.append(determine(self))
        return determined[-1]

    monkeypatch.setattr(AsyncPipelineOrchestrator, "_determine_overall_status", seen)
    ended = await run_to_its_end(tmp_path, six_steps(broken))
    assert statuses(ended) == {name: "failed" if name in broken else "completed" for name in STAGES}
    assert (ended.status, determined) == (end, [end])


# -- Stage status -----------------------------------------------------------------------------


@pytest.mark.seed("002", "3.1", "3.2", "3.4")
@run_async
async def test_each_stage_has_a_status_of_its_own(tmp_path: Path) -> None:
    news = News()
    news.broken = {"classify a1", "brief"}
    ended = await run_to_its_end(tmp_path, news.pipeline, {"enable_auto_optimize": True})
    assert statuses(ended) == {
        "ingest": "completed",
        "classify": "partial",
        "neutralize": "completed",
        "brief": "failed",
        "evaluation": "skipped",
        "optimization": "skipped",
    }
    assert ended.status is _S.PARTIAL


@pytest.mark.seed("002", "3.3", "7.2")
@run_async
async def test_a_classify_with_failures_is_partial_and_lists_them(tmp_path: Path) -> None:
    news = News()
    news.broken = {"classify a1", "classify b0"}
    async with penstock.pipeline_jobs(tmp_path / "runs", news.pipeline) as jobs:
        job = await jobs.start_job("news")
        ended = await jobs.wait(job.id, 20)
        items = await jobs.items(job.id, "classify", outcomes=(penstock.ItemOutcome.FAILED,))
    stage = ended.stage_progress["classify"]
    assert (stage.status, stage.ok, stage.failed) == (StageStatus.PARTIAL, 2, 2)
    assert [item.key for item in items] == ["0/1", "1/0"]
    assert ended.stage_progress["neutralize"].total == 2
    assert ended.status is _S.PARTIAL


@pytest.mark.seed("002", "3.5", "7.5", "7.20")
@run_async
async def test_an_optimization_without_an_evaluation_is_skipped_and_says_why(
    tmp_path: Path,
) -> None:
    off = await run_to_its_end(tmp_path, News().pipeline, {"enable_auto_optimize": True})
    last = off.stage_progress["optimization"]
    assert (last.status, last.reason) == (StageStatus.SKIPPED, "evaluation_disabled")
    assert off.status is _S.COMPLETED
    news = News()
    news.broken = {"evaluation"}
    failed = await run_to_its_end(tmp_path, news.pipeline, ALL)
    last = failed.stage_progress["optimization"]
    assert (last.status, last.reason) == (StageStatus.SKIPPED, "evaluation_failed")
    assert failed.status is _S.PARTIAL
    assert "optimization" not in news.ran


@pytest.mark.seed("002", "7.20")
@run_async
async def test_an_optimization_after_a_partial_evaluation_has_something_to_go_by(
    tmp_path: Path,
) -> None:
    news = News()
    news.complaining = {"evaluation"}
    ended = await run_to_its_end(tmp_path, news.pipeline, ALL)
    assert statuses(ended)["evaluation"] == "partial"
    assert statuses(ended)["optimization"] == "completed"
    assert ended.status is _S.PARTIAL


# -- Cancellation -----------------------------------------------------------------------------


@pytest.mark.seed("002", "4.1", "4.3", "4.4")
@run_async
async def test_a_cancel_marks_the_file_first_then_stops_the_work_and_only_then_ends_the_job(
    tmp_path: Path,
) -> None:
    news = News(cancel_grace=2.0)
    news.hold("brief")
    async with penstock.pipeline_jobs(tmp_path / "runs", news.pipeline) as jobs:
        job = await jobs.start_job("news")
        await news.reached["brief"].wait()
        assert not (await in_the_file(tmp_path, job.id)).cancel_requested
        first = await jobs.cancel_job(job.id, timeout=0)
        assert (first.accepted, first.status) == (True, _S.RUNNING)
        marked = await in_the_file(tmp_path, job.id)
        assert (marked.status, marked.cancel_requested) == (_S.RUNNING, True)
        assert (marked.finished_at, marked.cancel_effective) == (None, None)
        assert news.stopped == []
        second = await jobs.cancel_job(job.id, timeout=20)
        assert second.status is _S.CANCELLED
        assert news.stopped == ["brief"]
        ended = await in_the_file(tmp_path, job.id)
    assert (ended.status, ended.cancel_effective) == (_S.CANCELLED, True)
    assert ended.finished_at is not None
    assert ended.abandoned_items == ()


@pytest.mark.seed("002", "1.10")
@run_async
async def test_a_cancelled_error_of_the_background_task_ends_the_job_as_cancelled(
    tmp_path: Path,
) -> None:
    news = News(cancel_grace=0.1)
    news.hold("neutralize")
    async with penstock.pipeline_jobs(tmp_path / "runs", news.pipeline) as jobs:
        job = await jobs.start_job("news")
        await news.reached["neutralize"].wait()
        await jobs._api.cancel(job.id)
        ended = await jobs.wait(job.id, 20)
    assert (ended.status, set(news.stopped)) == (_S.CANCELLED, {"neutralize"})
    assert ended.finished_at is not None
    assert ended == await in_the_file(tmp_path, job.id)


# -- Stale jobs -------------------------------------------------------------------------------


@pytest.mark.seed("002", "1.11", "5.1", "5.2", "8.13")
@run_async
async def test_what_is_stuck_for_more_than_two_hours_is_failed_in_the_seeds_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    news, waiting = News(), six_steps(())
    news.hold("ingest")
    async with penstock.pipeline_jobs(tmp_path / "runs", news.pipeline, waiting) as jobs:
        ids = [(await jobs.start_job("news")).id]
        await news.reached["ingest"].wait()
        await jobs._api.pause_pool("default")
        ids.append((await jobs.start_job(waiting)).id)
    async with penstock.pipeline_jobs(tmp_path / "runs") as jobs:
        assert [(await jobs.get_job(job_id)).status for job_id in ids] == [_S.RUNNING, _S.PENDING]
        at(monkeypatch, TWO_HOURS - 60)
        assert await jobs.cleanup_stale_jobs() == []
        at(monkeypatch, TWO_HOURS + 1)
        assert sorted(await jobs.cleanup_stale_jobs()) == sorted(ids)
        assert await jobs.cleanup_stale_jobs() == []
    for job_id in ids:
        ended = await in_the_file(tmp_path, job_id)
        assert ended.status is _S.FAILED
        assert ended.finished_at is not None
        assert [error.message for error in ended.errors] == ["Job timed out or was orphaned"]


# -- Key files --------------------------------------------------------------------------------


@pytest.mark.seed("002", "6.1", "6.2", "6.3")
@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("PipelineJobStatus", "penstock.lifecycles.pipeline"),
        ("PipelineJobManager", "penstock.app.pipelines"),
        ("AsyncPipelineOrchestrator", "penstock.workloads.pipeline.orchestrator"),
    ],
)
def test_the_seeds_names_are_penstocks_and_live_where_the_page_says(name: str, home: str) -> None:
    assert getattr(penstock, name).__module__ == home
    page = Path(__file__).parents[1] / "seeds" / "002.md"
    assert f"`{name}` is in `{home}`" in page.read_text("utf-8")


# -- The same in an engine --------------------------------------------------------------------


@pytest.mark.seed("002", "6.5")
@run_async
async def test_under_an_engine_the_same_pipeline_comes_to_the_same_ends(tmp_path: Path) -> None:
    news, app = News(critical=True, cancel_grace=0.2), penstock.App()
    app.add(news.pipeline)
    seen: dict[PipelineJobStatus, tuple[JobState, str | None]] = {}
    async with app.run(tmp_path) as client:
        runs = client.api.pipelines
        for broken in (set[str](), {"classify a0"}, {"ingest"}, None):
            news.broken = broken or set()
            if broken is None:
                news.reached.clear()
                news.hold("brief")
            job = await runs.start("news", ALL)
            assert job.status is _S.PENDING
            if broken is None:
                await news.reached["brief"].wait()
                assert (await runs.get(job.id)).status is _S.RUNNING
                await runs.cancel(job.id)
            canonical = await client.api.wait(job.id, 20)
            ended = await runs.get(job.id)
            assert ended.finished_at is not None
            assert canonical.result is not None
            seen[ended.status] = canonical.state, canonical.result.error_code or None
    assert {status: state for status, (state, _) in seen.items()} == {
        _S.COMPLETED: JobState.SUCCEEDED,
        _S.PARTIAL: JobState.SUCCEEDED,
        _S.FAILED: JobState.FAILED,
        _S.CANCELLED: JobState.CANCELLED,
    }
    assert seen[_S.PARTIAL] == (JobState.SUCCEEDED, "PARTIAL")
