"""The config of the news pipeline: defaults, and bounds on both sides."""

from __future__ import annotations

import pytest

from penstock.core.errors import InvalidRequest
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.news.config import NewsConfig


@pytest.fixture(autouse=True)
def every_folder_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NEWS_FOLDERS", "/")


NEWS = Definition("news", config=NewsConfig)


def test_the_defaults_are_those_of_the_facts() -> None:
    config = NewsConfig()
    assert (config.max_items_per_source, config.classify_limit, config.neutralize_limit) == (
        25,
        200,
        25,
    )
    assert (config.max_workers, config.cutoff_hours, config.eval_sample_size) == (5, 24, 10)
    assert config.teacher_model is None
    assert config.min_runs_before_optimize == 3
    assert (config.enable_brief, config.enable_evaluation, config.enable_auto_optimize) == (
        True,
        False,
        False,
    )


@pytest.mark.parametrize(
    ("field", "least", "most"),
    [
        ("max_items_per_source", 1, 100),
        ("classify_limit", 1, 500),
        ("neutralize_limit", 1, 500),
        ("max_workers", 1, 10),
        ("cutoff_hours", 1, 72),
        ("eval_sample_size", 1, 50),
        ("min_runs_before_optimize", 1, 50),
        ("corpus_size", 1, 4000),
        ("max_feed_bytes", 1_000, 100_000_000),
    ],
)
def test_a_number_out_of_bounds_is_refused_by_its_name(field: str, least: int, most: int) -> None:
    for allowed in (least, most):
        assert getattr(NEWS.config_of({field: allowed}), field) == allowed
    for refused in (least - 1, most + 1):
        with pytest.raises(InvalidRequest) as caught:
            NEWS.config_of({field: refused})
        assert caught.value.field == f"config.{field}"


@pytest.mark.parametrize("seconds", [0.0, 0.09, 301])
def test_a_fetch_has_a_tenth_of_a_second_to_five_minutes(seconds: float) -> None:
    with pytest.raises(InvalidRequest, match=r"config\.fetch_timeout"):
        NEWS.config_of({"fetch_timeout": seconds})


def test_a_config_comes_through_json_unchanged() -> None:
    given = NewsConfig(sources=("a.xml", "https://x.example/feed"), corpus_size=9)
    assert NEWS.config_of(NEWS.plain_config(given)) == given
