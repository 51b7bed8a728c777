"""Whole runs of examples/news, offline: what a reader of the brief and an operator can see."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from examples.news.articles import Articles
from examples.news.pipeline import ALERTS, NewsConfig, build
from examples.news.settings import Feed, load
from tests.support.news.newsroom import (
    NOW,
    brief,
    codes,
    item,
    metrics,
    rss,
    run,
    sample,
    settings,
    statuses,
)

import penstock
from examples.news import classify as classifying

ROOT = Path(__file__).resolve().parents[3]
SKIPPED = ("skipped", "disabled")
DONE = ("completed", "")
TEASER = "The minister slammed the plan on Monday, and said that it would be stopped."


def paper(folder: Path, *items: str, name: str = "Paper") -> Feed:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"{name}.xml"
    file.write_text(rss(*items))
    return Feed(name=name, url=str(file))


@pytest.mark.seed("002", "8.27")
def test_a_dead_a_malformed_and_a_repeating_feed_give_a_partial_run_with_a_readable_brief(
    tmp_path: Path,
) -> None:
    record = run(sample(tmp_path))
    assert record.status == "PARTIAL"
    assert statuses(record) == {
        "ingest": ("partial", ""),
        "classify": DONE,
        "neutralize": DONE,
        "brief": DONE,
        "evaluation": SKIPPED,
        "optimization": SKIPPED,
    }
    found = metrics(record, "ingest")
    assert (found["total"], found["success"], found["skipped_duplicate"]) == (15, 12, 3)
    assert found["body_downloaded"] + found["body_failed"] == 12
    assert found["malformed"] == 1
    assert metrics(record, "neutralize")["total"] == 12
    assert metrics(record, "brief") == {
        "story_count": 11, "section_count": 10, "is_empty": False
    }  # fmt: skip
    page = brief(tmp_path)
    assert page.startswith("# News brief\n\n*11 stories in 10 sections")
    assert "Norlane shares fall" in page
    assert "“This is an absolutely shocking record, and islanders pay the price,”" in page
    assert "slam" not in page.casefold()
    assert "light injuries" in page  # from the downloaded page; the feed has a teaser
    assert "teaser only" not in page  # the fuller of two versions is shown
    assert "- Lighthouse Weekly: there is no file lighthouse.xml" in page


def test_a_second_run_does_only_what_is_new(tmp_path: Path) -> None:
    feed = paper(tmp_path, *(item(n) for n in range(5)))
    chosen = settings(tmp_path / "home", feed)
    assert run(chosen).status == "COMPLETED"
    again = run(chosen)
    assert again.status == "COMPLETED"
    assert metrics(again, "ingest")["skipped_duplicate"] == 5
    assert [again.stage(name).total for name in ("classify", "neutralize")] == [0, 0]  # type: ignore[union-attr]
    assert "plan number 4" in brief(tmp_path / "home")
    paper(tmp_path, *(item(n) for n in range(7)))
    third = run(chosen)
    assert metrics(third, "ingest")["success"] == 2
    assert metrics(third, "neutralize")["total"] == 2


def test_the_26th_article_gets_its_turn_in_the_next_run_even_if_the_feed_is_gone(
    tmp_path: Path,
) -> None:
    feed = paper(tmp_path, *(item(n) for n in range(30)))
    chosen = settings(tmp_path / "home", feed)
    first = run(chosen)
    assert metrics(first, "ingest")["success"] == 25
    assert metrics(first, "ingest")["waiting"] == 5
    assert "5 articles wait for the next run" in brief(tmp_path / "home")
    Path(feed.url).unlink()
    second = run(chosen)
    assert statuses(second)["ingest"][0] == "failed"
    assert metrics(second, "neutralize")["total"] == 5
    assert second.status == "PARTIAL"
    assert "wait for the next run" not in brief(tmp_path / "home")


def test_what_the_limits_leave_is_done_before_what_is_new(tmp_path: Path) -> None:
    feed = paper(tmp_path, *(item(n) for n in range(6)))
    run(settings(tmp_path / "home", feed), {"neutralize_limit": 4})
    paper(tmp_path, *(item(n) for n in range(10)))
    run(settings(tmp_path / "home", feed, as_of=NOW + 60), {"neutralize_limit": 4})
    table = Articles(tmp_path / "home" / "articles.db")
    titles = {one.title for one in table.finished()}
    assert {f"Council of Elvery decides on plan number {n}" for n in range(6)} <= titles
    assert table.counts() == {"articles": 10, "finished": 8, "waiting": 0, "undone": 2}
    table.close()


def test_an_article_that_fails_is_tried_again_and_does_not_stop_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings(tmp_path / "home", paper(tmp_path, *(item(n) for n in range(4))))
    works = classifying.classify

    def broken(article, model):  # type: ignore[no-untyped-def]
        if article.title.endswith("2"):
            raise RuntimeError("the section is unknown")
        return works(article, model)

    with monkeypatch.context() as patched:
        patched.setattr(classifying, "classify", broken)
        record = run(chosen)
    assert statuses(record)["classify"][0] == "partial"
    assert metrics(record, "classify")["failed"] == 1
    assert record.status == "PARTIAL"
    assert metrics(run(chosen), "classify") == {"total": 1, "success": 1, "feed": 1}


def test_ordinary_teasers_give_a_brief_of_teasers_and_alerts(tmp_path: Path) -> None:
    items = (
        item(n, TEASER, title=f"Minister slams shocking plan {n} in parliament",
             link=f"http://127.0.0.1:9/{section}/{n}")
        for n, section in zip(range(25), ["world", "politics", "sport", "health", "culture"] * 5,
                              strict=True)
    )  # fmt: skip
    record = run(settings(tmp_path / "home", paper(tmp_path, *items)))
    assert record.status == "COMPLETED"
    assert metrics(record, "ingest")["body_failed"] == 25
    assert metrics(record, "neutralize")["skipped_no_body"] == 25
    assert metrics(record, "brief")["story_count"] == 15  # three of one source in a section
    assert {"body_download_rate_low", "neutralization_rate_low"} <= codes(record)
    page = brief(tmp_path / "home")
    assert "Minister criticises unexpected plan" in page
    assert "teaser only" in page


@pytest.mark.seed("002", "7.12")
def test_old_news_is_no_brief_and_the_stage_says_why(tmp_path: Path) -> None:
    chosen = settings(tmp_path / "home", paper(tmp_path, item(1)), as_of=NOW + 90 * 86400)
    record = run(chosen)
    assert record.status == "PARTIAL"
    stage = record.stage("brief")
    assert stage is not None
    assert stage.status == "partial"
    assert "none of those is from the last 24 hours" in stage.errors[0]
    assert metrics(record, "brief")["is_empty"]
    assert "brief_story_count_low" in codes(record)


def test_if_no_feed_can_be_read_the_run_fails_and_says_so(tmp_path: Path) -> None:
    feeds = [Feed(name=name, url=str(tmp_path / name)) for name in ("a", "b")]
    record = run(settings(tmp_path / "home", *feeds))
    assert record.status == "FAILED"
    assert [
        statuses(record)[name][0] for name in ("ingest", "classify", "neutralize", "brief")
    ] == ["failed"] * 4
    assert "no feed could be read" in str(record.errors)
    assert codes(record) >= {"ingestion_zero", "pipeline_failed"}


@pytest.mark.seed("002", "7.14", "8.8")
@pytest.mark.parametrize(
    ("evaluate", "optimize", "expected"),
    [
        (False, False, [SKIPPED, SKIPPED]),
        (True, False, [DONE, SKIPPED]),
        (False, True, [SKIPPED, ("skipped", "evaluation_disabled")]),
        (True, True, [DONE, DONE]),
    ],
)
def test_flags_decide_whether_evaluation_and_optimization_run(
    evaluate: bool, optimize: bool, expected: list[tuple[str, str]], tmp_path: Path
) -> None:
    feed = paper(tmp_path, *(item(n) for n in range(12)))
    config = {"enable_evaluation": evaluate, "enable_auto_optimize": optimize}
    record = run(settings(tmp_path / "home", feed), config)
    found = statuses(record)
    assert [*found] == [
        "ingest", "classify", "neutralize", "brief", "evaluation", "optimization"
    ]  # fmt: skip
    assert [found["evaluation"], found["optimization"]] == expected
    assert record.status == "COMPLETED"


@pytest.mark.seed("002", "7.20")
def test_optimization_is_skipped_after_an_evaluation_that_failed(tmp_path: Path) -> None:
    config = {"enable_evaluation": True, "enable_auto_optimize": True, "teacher_model": "os:abort"}
    feed = paper(tmp_path, *(item(n) for n in range(12)))
    record = run(settings(tmp_path / "home", feed), config)
    found = statuses(record)
    assert found["evaluation"][0] == "failed"
    assert "teacher_model is 'os:abort'; the settings allow: none" in str(record.errors)
    assert found["optimization"] == ("skipped", "evaluation_failed")
    assert record.status == "PARTIAL"


def test_an_evaluation_measures_held_out_phrases_and_optimization_raises_its_score(
    tmp_path: Path,
) -> None:
    chosen = sample(tmp_path)
    config = {"enable_evaluation": True, "enable_auto_optimize": True}
    first = run(chosen, config)
    assert metrics(first, "evaluation").keys() >= {
        "avg_neutralization_score", "avg_span_precision", "avg_span_recall",
        "overall_quality_score", "estimated_cost_usd", "dev_span_recall",
    }  # fmt: skip
    before = metrics(first, "evaluation")
    assert before["avg_span_recall"] < before["dev_span_recall"] < 1
    assert metrics(first, "optimization") == {
        "rollback_triggered": False,
        "prompts_updated": 0,
        "reason": "1 of 3 evaluations since the last change",
    }
    third = metrics(run(chosen, config, times=2), "optimization")
    assert third["prompts_updated"] == 1
    assert third["reason"].startswith("switch on hype: ")
    after = metrics(run(chosen, config), "evaluation")
    assert after["overall_quality_score"] > before["overall_quality_score"]
    assert after["avg_span_recall"] > before["avg_span_recall"]


def test_the_input_of_a_job_names_no_code_no_folder_and_no_address(tmp_path: Path) -> None:
    chosen = settings(tmp_path / "home", paper(tmp_path, item(1)))
    app = penstock.App()
    app.add(build(chosen, app.client))
    refused: list[dict[str, Any]] = [
        {"model": "os:abort"}, {"out": str(tmp_path)}, {"sources": ["http://127.0.0.1/"]},
        {"max_items_per_source": 0}, {"max_items_per_source": 101}, {"classify_limit": 501},
        {"neutralize_limit": 0}, {"max_workers": 11}, {"cutoff_hours": 73},
        {"eval_sample_size": 51}, {"min_runs_before_optimize": 0},
    ]  # fmt: skip
    with app.run(chosen.home / "engine") as engine:
        for config in refused:
            with pytest.raises(penstock.InvalidRequest) as caught:
                engine.pipelines.start("news", config)
            assert caught.value.field == f"config.{next(iter(config))}"
        assert engine.jobs() == []
    assert NewsConfig() == NewsConfig(
        max_items_per_source=25, classify_limit=200, neutralize_limit=25, max_workers=5,
        cutoff_hours=24, eval_sample_size=10, min_runs_before_optimize=3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "required field `feeds`"),
        ("feeds = []", "give at least one feed"),
        ("[[feeds]]\nname = 'a'\nurl = 'a'\n[[feeds]]\nname = 'a'\nurl = 'b'", "name of its own"),
        ("out = '/etc'\n[[feeds]]\nname = 'a'\nurl = 'a'", "unknown field `out`"),
    ],
)
def test_a_wrong_feeds_toml_is_refused_by_name(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "feeds.toml").write_text(text)
    with pytest.raises(ValueError, match=r"feeds\.toml") as caught:
        load(tmp_path)
    assert said in str(caught.value)


@pytest.mark.seed("002", "8.21")
@pytest.mark.parametrize(
    ("code", "stage", "figures", "quiet", "loud"),
    [
        ("ingestion_zero", "ingest", {}, {"total": 1}, {"total": 0}),
        ("body_download_rate_low", "ingest", {"total": 100, "success": 100},
         {"body_downloaded": 70}, {"body_downloaded": 69}),
        ("classify_fallback_rate_high", "classify", {"total": 100},
         {"keyword_fallback": 1}, {"keyword_fallback": 2}),
        ("neutralization_rate_low", "neutralize", {"total": 100}, {"success": 90}, {"success": 89}),
        ("brief_story_count_low", "brief", {}, {"story_count": 10}, {"story_count": 9}),
    ],
)  # fmt: skip
def test_each_alert_has_two_sides(
    code: str,
    stage: str,
    figures: dict[str, int],
    quiet: dict[str, int],
    loud: dict[str, int],
    tmp_path: Path,
) -> None:
    pipeline = penstock.Pipeline("figures", alerts=ALERTS)

    @pipeline.step(name=stage)
    def count(results, ctx):  # type: ignore[no-untyped-def]
        for name, value in {**figures, **ctx.config}.items():
            ctx.metric(name, value, set=True)

    app = penstock.App()
    app.add(pipeline)
    with app.run(tmp_path):
        assert [one.code for one in pipeline.run(quiet).alerts] == []
        assert [one.code for one in pipeline.run(loud).alerts] == [code]


def test_the_pipeline_is_served_by_name_with_the_settings_of_its_home(tmp_path: Path) -> None:
    paper(tmp_path, *(item(n) for n in range(3)))
    (tmp_path / "feeds.toml").write_text("[[feeds]]\nname = 'Paper'\nurl = 'Paper.xml'\n")
    ended = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "pipeline", "start", "examples.news.app:news"],
        cwd=ROOT,
        env={**os.environ, "NEWS_HOME": str(tmp_path), "PENSTOCK_DATA_DIR": str(tmp_path / "data")},
        capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "news PARTIAL" in ended.stdout  # the news is of June 2026
    assert "Every feed was read." in brief(tmp_path)
