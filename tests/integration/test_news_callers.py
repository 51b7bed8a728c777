"""The news pipeline in an engine that others use: what the input of a job may name, and feeds as
they are."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.core.errors import InvalidRequest
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.workloads.pipeline.news.pipeline import news
from penstock.workloads.pipeline.store import RunQuery

NEWEST = 1_780_000_000.0
TEASER = """<item>
<title>Minister slams shocking plan {0} in parliament</title>
<link>https://news.example/politics/{0}</link>
<description>The minister slammed plan {0} on Monday, and said it would be stopped.</description>
<pubDate>Thu, 28 May 2026 1{0}:00:00 GMT</pubDate>
</item>"""


@pytest.fixture
def app() -> penstock.App:
    app = penstock.App()
    app.add(news)
    return app


def a_feed(folder: Path) -> Path:
    items = "".join(TEASER.format(number) for number in range(8))
    path = folder / "feed.xml"
    path.write_text(
        '<?xml version="1.0"?><rss version="2.0"><channel><title>Example</title>'
        f"<link>https://news.example</link><description>x</description>{items}</channel></rss>"
    )
    return path


def test_the_input_of_a_job_names_no_code_and_no_folder_of_its_own(
    app: penstock.App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "evil_model.py").write_text("import sys\nsys.evil_model_was_imported = True\n")
    allowed, other = tmp_path / "allowed", tmp_path / "other"
    allowed.mkdir()
    other.mkdir()
    (allowed / "link").symlink_to(other)
    a_feed(other)
    monkeypatch.setenv("PENSTOCK_NEWS_FOLDERS", str(allowed))
    refused: dict[str, list[dict[str, Any]]] = {
        "config.model": [{"model": "evil_model:x"}, {"model": "os:abort"}],
        "config.teacher_model": [{"teacher_model": "evil_model:x"}],
        "config.out": [
            {"out": str(other)},
            {"out": str(allowed / ".." / "other")},
            {"out": str(allowed / "link")},
            {"out": "\0"},
        ],
        "config.sources[0]": [
            {"sources": [str(other / "feed.xml")]},
            {"sources": [(other / "feed.xml").as_uri()]},
            {"sources": ["FILE:" + str(other / "feed.xml")]},
        ],
    }
    with app.run(tmp_path / "data") as ps:
        for field, configs in refused.items():
            for config in configs:
                for start in (
                    lambda given: ps.pipelines.start("news", given),
                    lambda given: ps.submit("job.pipeline.news", given),
                ):
                    with pytest.raises(InvalidRequest) as caught:
                        start(config)
                    assert caught.value.field == field
        assert (ps.jobs(), ps.pipelines.runs(RunQuery())) == ([], [])
    assert not hasattr(sys, "evil_model_was_imported")
    assert list(other.iterdir()) == [other / "feed.xml"]


def test_a_feed_of_teasers_gives_a_brief_of_them_in_an_allowed_folder(
    app: penstock.App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_NEWS_FOLDERS", str(tmp_path / "news"))
    monkeypatch.setenv("PENSTOCK_NEWS_MODELS", "quiet=tests.jobs.models:Quiet")
    (tmp_path / "news").mkdir()
    config = {
        "sources": [str(a_feed(tmp_path / "news"))],
        "out": str(tmp_path / "news" / "brief"),
        "model": "quiet",
        "reference_time": NEWEST,
        "enable_evaluation": True,
    }
    with app.run(tmp_path / "data") as ps:
        run = ps.pipelines.start("news", config)
        ps.get(run.id).wait(timeout=50)
        record = ps.pipelines.get(run.id)
        assert record.status is PipelineJobStatus.COMPLETED, record.errors
        neutralized, brief = record.stage("neutralize"), record.stage("brief")
        assert neutralized is not None
        assert brief is not None
        assert neutralized.metrics["teasers"] == 8
        assert brief.metrics["story_count"] == 3  # of one source in one section
    text = (tmp_path / "news" / "brief" / "brief.md").read_text()
    assert "plan 7" in text
    assert "shocking" not in text
