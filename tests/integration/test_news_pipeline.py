"""The news pipeline from its feeds to its brief, offline, in real stores."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import asynccontextmanager
from importlib import resources
from pathlib import Path

import pytest
from tests.jobs.models import gate

from penstock.adapters.memory.blobs import MemoryBlobs
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.clock import SystemClock
from penstock.testing.aio import run_async
from penstock.workloads.pipeline.summary import evaluate
from penstock.workloads.pipeline.manager import PipelineJobManager
from penstock.workloads.pipeline.news.pipeline import news
from penstock.workloads.pipeline.records import (
    ItemOutcome,
    PipelineRecord,
    StageRecord,
    StageStatus,
)
from penstock.workloads.pipeline.storage.memory import MemoryPipelineStore
from penstock.workloads.pipeline.storage.sqlite.store import SqlitePipelineStore


@pytest.fixture(autouse=True)
def every_folder_is_allowed(monkeypatch):
    monkeypatch.setenv("PENSTOCK_NEWS_FOLDERS", "/")
    monkeypatch.setenv("PENSTOCK_NEWS_MODELS", "gate=tests.jobs.models:gate, lost=no.such:model")


SAMPLE = Path(str(resources.files("penstock.workloads.pipeline.news"))) / "sample"
NEWEST = 1_780_591_200.0
"""4 June 2026, 16:40 UTC: the newest article of the sample."""
STAGES = ["ingest", "classify", "neutralize", "brief", "evaluation", "optimization"]


@asynccontextmanager
async def manager(store=None, blobs=None):
    async with PipelineJobManager(
        store or MemoryPipelineStore(), [news], blobs or MemoryBlobs(), SystemClock()
    ) as one:
        yield one


async def ended(manager, **config):
    started = await manager.start_job(news, config)
    return await manager.wait(started.id, timeout=50)


def statuses(record):
    return {stage.name: (stage.status.value, stage.reason) for stage in record.stages}


def feed(folder, name, copy=None):
    target = folder / (copy or name)
    shutil.copy(SAMPLE / name, target)
    return str(target)


def gone(path):
    Path(path).unlink()


@pytest.fixture(params=["memory", "sqlite"])
def store(request, tmp_path):
    if request.param == "memory":
        yield MemoryPipelineStore()
        return
    one = SqlitePipelineStore(tmp_path / "pipelines.db")
    yield one
    asyncio.run(one.close())


@run_async
async def test_the_sample_ends_partial_for_its_dead_feed_with_a_readable_brief(store, tmp_path):
    async with manager(store) as here:
        record = await ended(here, out=str(tmp_path))
        dead = await here.items(record.id, "ingest", outcomes=(ItemOutcome.FAILED,))
    assert record.status is PipelineJobStatus.PARTIAL
    assert statuses(record) == {
        "ingest": ("partial", ""),
        "classify": ("completed", ""),
        "neutralize": ("completed", ""),
        "brief": ("completed", ""),
        "evaluation": ("skipped", "disabled"),
        "optimization": ("skipped", "disabled"),
    }
    assert [item.key for item in dead] == ["sample:lighthouse.xml"]
    page = (tmp_path / "brief.md").read_text()
    assert page.startswith("# News brief\n\n*10 stories in 9 sections")
    assert "Norlane shares fall" in page
    assert "“This is an absolutely shocking record, and islanders pay the price,”" in page
    assert "slam" not in page.casefold()
    assert "- sample:lighthouse.xml: there is no file lighthouse.xml" in page
    assert (tmp_path / "brief.html").read_text().startswith("<!doctype html>")


@run_async
async def test_every_stage_has_the_references_metrics_and_the_summary_holds_them():
    async with manager() as here:
        record = await ended(here, enable_evaluation=True, enable_auto_optimize=True)
    found = {stage.name: stage.metrics for stage in record.stages}
    assert found["ingest"].items() >= {
        "total": 15, "success": 12, "body_downloaded": 11, "body_failed": 4,
        "skipped_duplicate": 3,
    }.items()  # fmt: skip
    assert found["classify"]["total"] == found["classify"]["success"] == 12
    assert found["neutralize"].items() >= {"total": 11, "success": 11}.items()
    assert found["neutralize"]["spans"] >= 15
    assert found["brief"] == {"story_count": 10, "section_count": 9, "is_empty": False}
    assert set(found["evaluation"]) >= {
        "avg_neutralization_score", "avg_span_precision", "avg_span_recall",
        "overall_quality_score", "estimated_cost_usd",
    }  # fmt: skip
    assert found["optimization"] == {
        "rollback_triggered": False,
        "prompts_updated": 0,
        "reason": "1 of 3 evaluations since the last change",
    }
    assert record.summary is not None
    assert record.summary.stages["brief"]["story_count"] == 10
    assert record.alerts == ()


@pytest.mark.parametrize(
    ("evaluate", "optimize", "expected"),
    [
        (False, False, [("skipped", "disabled"), ("skipped", "disabled")]),
        (True, False, [("completed", ""), ("skipped", "disabled")]),
        (False, True, [("skipped", "disabled"), ("skipped", "evaluation_disabled")]),
        (True, True, [("completed", ""), ("completed", "")]),
    ],
)
@run_async
async def test_flags_decide_whether_evaluation_and_optimization_run(
    evaluate, optimize, expected, tmp_path
):
    one = [feed(tmp_path, "harbour.xml")]
    async with manager() as here:
        record = await ended(
            here,
            sources=one,
            reference_time=NEWEST,
            enable_evaluation=evaluate,
            enable_auto_optimize=optimize,
        )
    found = statuses(record)
    assert list(found) == STAGES
    assert [found["evaluation"], found["optimization"]] == expected
    assert record.status is PipelineJobStatus.COMPLETED


@run_async
async def test_optimization_is_skipped_after_an_evaluation_that_failed():
    async with manager() as here:
        record = await ended(
            here, enable_evaluation=True, enable_auto_optimize=True, teacher_model="lost"
        )
    found = statuses(record)
    assert found["evaluation"][0] == "failed"
    assert found["optimization"] == ("skipped", "evaluation_failed")
    assert record.status is PipelineJobStatus.PARTIAL


@run_async
async def test_two_runs_give_the_same_brief(tmp_path):
    async with manager() as here:
        await ended(here, out=str(tmp_path / "a"))
        await ended(here, out=str(tmp_path / "b"), max_workers=1)
    for name in ("brief.md", "brief.html"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@run_async
async def test_optimization_raises_the_score_of_the_runs_after_it():
    async with manager() as here:
        records = [
            await ended(here, enable_evaluation=True, enable_auto_optimize=True, eval_sample_size=7)
            for _ in range(4)
        ]
    last = [record.stage("optimization").metrics["prompts_updated"] for record in records]
    assert last == [0, 0, 1, 0]
    scores = [r.stage("evaluation").metrics["overall_quality_score"] for r in records]
    assert scores[0] == scores[1] == scores[2] < scores[3]


@run_async
async def test_retry_failed_reads_only_the_feed_that_came_alive(tmp_path):
    first, late = feed(tmp_path, "harbour.xml"), str(tmp_path / "late.xml")
    async with manager() as here:
        broken = await ended(
            here, sources=[first, late], reference_time=NEWEST, out=str(tmp_path / "out")
        )
        assert broken.status is PipelineJobStatus.PARTIAL
        assert broken.stage("brief").metrics["story_count"] == 5
        gone(first)
        feed(tmp_path, "valley.xml", "late.xml")
        retried = await here.retry_failed(broken.id)
        record = await here.wait(retried.id, timeout=50)
    assert record.status is PipelineJobStatus.COMPLETED, record.errors
    assert record.stage("ingest").reused == 1
    assert record.stage("classify").reused == 5
    assert record.stage("ingest").metrics["total"] == 10
    assert record.stage("neutralize").metrics["total"] == 9
    assert record.stage("brief").metrics["story_count"] == 9
    assert "Every source was read." in (tmp_path / "out" / "brief.md").read_text()


@run_async
async def test_a_run_that_is_interrupted_goes_on_and_gives_the_same_brief(tmp_path):
    store, blobs = MemoryPipelineStore(), MemoryBlobs()
    gate.reached.clear()
    gate.opened.clear()
    async with manager(store, blobs) as here:
        record = await here.start_job(
            news, {"model": "gate", "max_workers": 1, "out": str(tmp_path / "a")}
        )
        await asyncio.to_thread(gate.reached.wait, 20)
        leaving = asyncio.create_task(here.shutdown())
        await asyncio.sleep(0)
        gate.opened.set()
        await leaving
    left = await store.get(record.id)
    assert left is not None
    assert left.status is PipelineJobStatus.RUNNING
    assert left.stage("neutralize").status is StageStatus.RUNNING  # type: ignore[union-attr]
    async with manager(store, blobs) as again:
        record = await again.wait(record.id, timeout=50)
        await ended(again, out=str(tmp_path / "b"))
        items = await again.items(record.id, "classify")
    assert record.resumes == 1
    assert record.status is PipelineJobStatus.PARTIAL
    assert all(item.attempts == 1 for item in items)
    assert record.stage("neutralize").metrics["total"] == 11
    assert (tmp_path / "a" / "brief.md").read_text() == (tmp_path / "b" / "brief.md").read_text()


@run_async
async def test_if_no_feed_can_be_read_the_run_fails_and_says_so(tmp_path):
    async with manager() as here:
        record = await ended(here, sources=[str(tmp_path / "a.xml"), str(tmp_path / "b.xml")])
    assert record.status is PipelineJobStatus.FAILED
    assert [statuses(record)[name] for name in STAGES[:4]] == [
        ("failed", "no item succeeded"),
        ("skipped", "ingest_failed"),
        ("skipped", "classify_skipped"),
        ("skipped", "neutralize_skipped"),
    ]
    assert {alert.code for alert in record.alerts} == {"ingestion_zero", "pipeline_failed"}


@run_async
async def test_old_news_is_an_empty_brief_and_an_alert(tmp_path):
    async with manager() as here:
        record = await ended(
            here, sources=[feed(tmp_path, "harbour.xml")], reference_time=NEWEST + 90 * 86400
        )
    assert record.status is PipelineJobStatus.COMPLETED
    assert record.stage("brief").metrics == {
        "story_count": 0,
        "section_count": 0,
        "is_empty": True,
    }
    assert [alert.code for alert in record.alerts] == ["brief_story_count_low"]


def run_with(status="COMPLETED", seconds=1.0, **metrics):
    """A finished run of which only these figures are out of the ordinary."""
    usual = {
        "ingest": {"total": 100, "body_downloaded": 100},
        "classify": {"total": 100, "keyword_fallback": 0},
        "neutralize": {"total": 100, "success": 100},
        "brief": {"story_count": 20},
    }
    for name, value in metrics.items():
        stage, _, metric = name.partition("__")
        usual[stage][metric] = value
    stages = tuple(
        StageRecord(
            name=name, index=n, kind=news.stages[name].info.kind,
            status=StageStatus.COMPLETED, metrics=found,
        )
        for n, (name, found) in enumerate(usual.items())
    )  # fmt: skip
    return PipelineRecord(
        id="1", trace_id="1", pipeline="news", created_at=0.0, started_at=0.0,
        finished_at=seconds, status=PipelineJobStatus(status), stages=stages,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("code", "figure", "quiet", "loud"),
    [
        ("body_download_rate_low", "ingest__body_downloaded", 70, 69),
        ("neutralization_rate_low", "neutralize__success", 90, 89),
        ("classify_fallback_rate_high", "classify__keyword_fallback", 1, 2),
        ("brief_story_count_low", "brief__story_count", 10, 9),
        ("pipeline_duration_high", "seconds", 600.0, 600.1),
        ("pipeline_failed", "status", "PARTIAL", "FAILED"),
        ("ingestion_zero", "ingest__total", 1, 0),
    ],
)
def test_each_alert_has_two_sides(code, figure, quiet, loud):
    assert [alert.code for alert in evaluate(news.alerts, run_with(**{figure: quiet}))] == []
    assert [alert.code for alert in evaluate(news.alerts, run_with(**{figure: loud}))] == [code]
