"""Thresholds on finished runs, each from both sides."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.workloads.pipeline.records import (
    AlertRule,
    PipelineRecord,
    StageKind,
    StageRecord,
    StageStatus,
    by_name,
)
from penstock.workloads.pipeline.summary import (
    BUILT_IN,
    count_above,
    count_below,
    count_equals_zero,
    duration_above,
    ended,
    evaluate,
    rate_above,
    rate_below,
)

T = 1_700_000_000.0


def a_stage(name: str = "s", status: StageStatus = StageStatus.COMPLETED, **f: Any) -> StageRecord:
    return StageRecord(name=name, index=0, kind=StageKind.MAP, status=status, **f)


def a_run(*stages: StageRecord, seconds: float | None = 10.0, **fields: Any) -> PipelineRecord:
    end = None if seconds is None else T + seconds
    defaults = {"started_at": T, "finished_at": end, "status": PipelineJobStatus.COMPLETED}
    return PipelineRecord(
        id="j",
        trace_id="t",
        pipeline="p",
        created_at=T,
        stage_progress=by_name(stages),
        **{**defaults, **fields},
    )


def fires(rule: AlertRule, run: PipelineRecord) -> bool:
    return [alert.code for alert in evaluate([rule], run)] == [rule.code]


# -- the thresholds of the facts ----------------------------------------------------------


@pytest.mark.seed("002", "8.21")
@pytest.mark.parametrize(("got", "fired"), [(69, True), (70, False), (71, False), (0, True)])
def test_a_rate_below(got: int, fired: bool) -> None:
    rule = rate_below("body_download_rate_low", "ingest.body", of="ingest.total", share=0.7)
    assert fires(rule, a_run(a_stage("ingest", total=100, metrics={"body": got}))) is fired


@pytest.mark.parametrize(("fallback", "fired"), [(0, False), (1, False), (2, True)])
def test_a_rate_above(fallback: int, fired: bool) -> None:
    rule = rate_above("fallback_rate_high", "classify.fallback", of="classify.total", share=0.01)
    run = a_run(a_stage("classify", total=100, metrics={"fallback": fallback}))
    assert fires(rule, run) is fired


@pytest.mark.seed("002", "8.21")
@pytest.mark.parametrize(("stories", "fired"), [(9, True), (10, False), (11, False)])
def test_a_count_below(stories: int, fired: bool) -> None:
    rule = count_below("brief_story_count_low", "brief.stories", 10)
    assert fires(rule, a_run(a_stage("brief", metrics={"stories": stories}))) is fired


@pytest.mark.parametrize(("tokens", "fired"), [(500_000, False), (500_001, True)])
def test_a_count_above(tokens: int, fired: bool) -> None:
    rule = count_above("token_usage_high", "s.tokens", 500_000)
    assert fires(rule, a_run(a_stage(metrics={"tokens": tokens}))) is fired


@pytest.mark.parametrize(("total", "fired"), [(0, True), (1, False)])
def test_a_count_of_zero(total: int, fired: bool) -> None:
    assert fires(count_equals_zero("ingestion_zero", "s.total"), a_run(a_stage(total=total))) is (
        fired
    )


@pytest.mark.seed("002", "8.21")
@pytest.mark.parametrize(("seconds", "fired"), [(599.9, False), (600, False), (600.1, True)])
def test_the_duration_of_a_job(seconds: float, fired: bool) -> None:
    assert fires(duration_above("pipeline_duration_high", 600), a_run(seconds=seconds)) is fired


@pytest.mark.parametrize(("ms", "fired"), [(4_999.0, False), (5_000.0, False), (5_001.0, True)])
def test_the_duration_of_a_stage(ms: float, fired: bool) -> None:
    rule = duration_above("slow", 5, stage="s")
    assert fires(rule, a_run(a_stage(duration_ms=ms), seconds=0.001)) is fired


@pytest.mark.parametrize("status", PipelineJobStatus)
def test_how_a_job_ended(status: PipelineJobStatus) -> None:
    for said in (PipelineJobStatus.FAILED, "FAILED", "failed"):
        assert fires(ended("pipeline_failed", said), a_run(status=status)) is (status == "FAILED")


# -- metrics ------------------------------------------------------------------------------


def test_every_built_in_metric_can_be_used() -> None:
    fields: dict[str, Any] = {name: number for number, name in enumerate(BUILT_IN, start=1)}
    run = a_run(a_stage(**fields))
    for name, number in fields.items():
        (alert,) = evaluate([count_below("x", f"s.{name}", number + 0.5)], run)
        assert alert.value == number


def test_a_metric_of_the_stages_own_goes_before_a_built_in_one() -> None:
    run = a_run(a_stage(total=4, metrics={"total": 360}))
    assert not fires(count_below("x", "s.total", 100), run)


def test_a_metric_that_was_never_counted_is_zero() -> None:
    assert fires(count_below("x", "s.stories", 1), a_run(a_stage()))
    assert fires(count_equals_zero("x", "s.stories"), a_run(a_stage(status=StageStatus.FAILED)))


@pytest.mark.parametrize("status", [StageStatus.SKIPPED, StageStatus.PENDING, StageStatus.RUNNING])
def test_a_stage_that_did_not_run_to_an_end_raises_no_alert(status: StageStatus) -> None:
    run = a_run(a_stage(status=status))
    rules = [count_below("a", "s.stories", 10), count_equals_zero("b", "s.total")]
    assert evaluate([*rules, duration_above("c", -1, "s")], run) == ()


def test_an_unknown_stage_and_an_unmeasured_rate_are_silent() -> None:
    run = a_run(a_stage())
    for metric in ("other.total", "nonsense", "", "s.rate"):
        assert evaluate([count_below("x", metric, 10)], run) == ()


def test_a_share_of_nothing_is_silent() -> None:
    assert evaluate([rate_below("x", "s.ok", "s.total", 0.9)], a_run(a_stage(total=0))) == ()
    assert evaluate([rate_below("x", "s.ok", "gone.total", 0.9)], a_run(a_stage(total=0))) == ()


@pytest.mark.parametrize(
    ("metric", "of"),
    [("s.word", "s.total"), ("s.total", "s.word"), ("s.rate", "s.total"), ("s.total", "s.rate")],
)
def test_a_share_with_a_word_or_something_unmeasured_is_silent(metric: str, of: str) -> None:
    run = a_run(a_stage(total=4, metrics={"word": "x"}))
    assert evaluate([rate_above("x", metric, of, -1)], run) == ()


def test_a_share_may_be_taken_across_stages() -> None:
    run = a_run(a_stage("a", total=10), a_stage("b", ok=4))
    (alert,) = evaluate([rate_below("x", "b.ok", of="a.total", share=0.5)], run)
    assert alert.value == 0.4


def test_words_and_flags_can_be_compared() -> None:
    run = a_run(a_stage(metrics={"mode": "Fallback", "rolled_back": True}))
    assert fires(AlertRule(code="x", metric="s.mode", equals="fallback"), run)
    assert not fires(AlertRule(code="x", metric="s.mode", equals="full"), run)
    assert not fires(AlertRule(code="x", metric="s.mode", below=3), run)
    assert fires(AlertRule(code="x", metric="s.rolled_back", equals="1"), run)
    assert not fires(AlertRule(code="x", metric="s.rolled_back", equals="yes"), run)


def test_a_job_that_never_started_has_no_duration() -> None:
    run = a_run(started_at=None)
    assert evaluate([duration_above("x", -1)], run) == ()


def test_a_run_that_has_not_ended_has_no_duration() -> None:
    assert evaluate([duration_above("x", 5)], a_run(seconds=None)) == ()
    assert evaluate([duration_above("x", 5)], a_run(seconds=5)) == ()
    assert len(evaluate([duration_above("x", 5)], a_run(seconds=6))) == 1


# -- what comes out -----------------------------------------------------------------------


def test_each_code_is_raised_once_by_the_first_rule_that_fires() -> None:
    run = a_run(a_stage(total=5))
    rules = [count_below("low", "s.total", n) for n in (5, 6, 7)] + [
        count_above("hi", "s.total", 1)
    ]
    alerts = evaluate(rules, run)
    assert [(alert.code, alert.threshold) for alert in alerts] == [("low", 6), ("hi", 1)]


def test_an_alert_says_what_was_measured_and_against_what() -> None:
    run = a_run(a_stage(total=10, ok=8), status=PipelineJobStatus.FAILED)
    rules = [rate_below("a", "s.ok", "s.total", 0.9), ended("b", "FAILED")]
    first, second = evaluate(rules, run)
    assert (first.value, first.threshold) == (0.8, 0.9)
    assert first.message == "s.ok of s.total is 0.8, below 0.9"
    assert (second.value, second.threshold) == ("FAILED", "FAILED")


def test_a_rule_without_a_threshold_is_silent() -> None:
    assert evaluate([AlertRule(code="x", metric="s.total")], a_run(a_stage())) == ()


def test_a_rule_may_have_two_thresholds() -> None:
    rule = AlertRule(code="x", metric="s.total", below=2, above=4)
    assert [n for n in range(7) if fires(rule, a_run(a_stage(total=n)))] == [0, 1, 5, 6]


@given(st.integers(0, 100), st.integers(1, 100), st.floats(0, 1))
def test_a_rate_is_either_low_or_high_or_just_right(ok: int, total: int, share: float) -> None:
    run = a_run(a_stage(ok=ok, total=total))
    low = fires(rate_below("x", "s.ok", "s.total", share), run)
    high = fires(rate_above("x", "s.ok", "s.total", share), run)
    assert not (low and high)
    assert (not low and not high) == (ok / total == share)
