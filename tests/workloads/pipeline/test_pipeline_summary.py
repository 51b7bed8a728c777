"""Summaries of runs."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.workloads.pipeline.records import (
    Alert,
    PipelineRecord,
    RunSummary,
    StageKind,
    StageRecord,
    StageStatus,
    by_name,
)
from penstock.workloads.pipeline.summary import closed, metrics_of, summarise

T = 1_700_000_000.0

INGEST = StageRecord(
    name="ingest",
    index=0,
    kind=StageKind.MAP,
    status=StageStatus.PARTIAL,
    total=4,
    done=4,
    ok=3,
    failed=1,
    duration_ms=1_500.0,
    metrics={"body_downloaded": 9, "skipped_duplicate": 1},
)
BRIEF = StageRecord(
    name="brief",
    index=1,
    kind=StageKind.STEP,
    status=StageStatus.SKIPPED,
    reason="disabled",
    duration_ms=0.0,
)


def a_run(**fields: Any) -> PipelineRecord:
    defaults: dict[str, Any] = {
        "started_at": T + 1,
        "status": PipelineJobStatus.RUNNING,
        "stage_progress": by_name((INGEST, BRIEF)),
    }
    return PipelineRecord(
        id="j", trace_id="trace", pipeline="p", created_at=T, **{**defaults, **fields}
    )


def an_alert(code: str) -> Alert:
    return Alert(code=code, message="", value=1, threshold=2)


def test_an_open_summary_says_what_each_stage_did_so_far() -> None:
    summary = summarise(a_run(), T + 6)
    assert (summary.trace_id, summary.started_at, summary.finished_at) == ("trace", T + 1, None)
    assert summary.status is PipelineJobStatus.RUNNING
    assert summary.stages["ingest"] == {
        "status": "partial",
        "total": 4,
        "ok": 3,
        "failed": 1,
        "skipped": 0,
        "duration_ms": 1_500.0,
        "body_downloaded": 9,
        "skipped_duplicate": 1,
    }
    assert summary.stages["brief"]["reason"] == "disabled"


def test_wall_time_and_time_within_stages_are_told_apart() -> None:
    summary = summarise(a_run(), T + 6)
    assert (summary.duration_ms, summary.stages_ms) == (5_000.0, 1_500.0)


def test_a_metric_of_the_stages_own_goes_before_its_count() -> None:
    assert metrics_of(replace(INGEST, metrics={"total": 360}))["total"] == 360


def test_empty_and_reused_are_told_where_they_are() -> None:
    assert metrics_of(replace(INGEST, empty=True))["empty"] is True
    assert metrics_of(replace(INGEST, reused=2))["reused"] == 2
    assert not {"empty", "reused", "reason"} & set(metrics_of(INGEST))


@pytest.mark.parametrize(
    ("fields", "trigger"),
    [
        ({}, "manual"),
        ({"trigger": "schedule"}, "schedule"),
        ({"retry_of": "other"}, "retry"),
        ({"retry_of": "other", "trigger": "child"}, "child"),
    ],
)
def test_a_summary_says_what_set_the_run_off(fields: dict[str, Any], trigger: str) -> None:
    assert summarise(a_run(**fields), T + 6).trigger == trigger


@pytest.mark.seed("002", "7.15")
@pytest.mark.parametrize(
    "status",
    [
        PipelineJobStatus.COMPLETED,
        PipelineJobStatus.PARTIAL,
        PipelineJobStatus.FAILED,
        PipelineJobStatus.CANCELLED,
    ],
)
@pytest.mark.parametrize("was_open", [True, False])
def test_a_summary_is_closed_whatever_the_end(status: PipelineJobStatus, was_open: bool) -> None:
    before: RunSummary | None = (
        summarise(a_run(stage_progress=by_name([INGEST])), T + 6) if was_open else None
    )
    record = a_run(status=status, finished_at=T + 11, summary=before)
    summary = closed(record, [an_alert("a"), an_alert("b"), an_alert("a")])
    assert (summary.status, summary.finished_at) == (status, T + 11)
    assert summary.duration_ms == 10_000.0
    assert summary.alerts == ("a", "b")
    assert list(summary.stages) == ["ingest", "brief"]


def test_alerts_of_an_open_summary_are_not_kept_once_they_were_evaluated_anew() -> None:
    before = replace(summarise(a_run(), T + 6), alerts=("early",))
    assert closed(a_run(finished_at=T + 7, summary=before), []).alerts == ()


def test_a_run_that_was_cancelled_before_it_began_has_a_summary_too() -> None:
    record = a_run(
        status=PipelineJobStatus.CANCELLED, started_at=None, finished_at=T + 3, stage_progress={}
    )
    summary = closed(record, [])
    assert (summary.started_at, summary.duration_ms, summary.stages_ms) == (None, 0.0, 0.0)
    assert summary.stages == {}


def test_a_clock_that_was_set_back_gives_no_negative_duration() -> None:
    assert summarise(a_run(), T - 100).duration_ms == 0.0


def test_a_summary_can_be_stored() -> None:
    summary = closed(a_run(finished_at=T + 9), [an_alert("a")])
    assert msgspec.json.decode(msgspec.json.encode(summary), type=RunSummary) == summary
