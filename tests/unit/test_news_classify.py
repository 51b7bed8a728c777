"""The stage that finds sections: who is asked, in which order, and how well it does."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.news_context import NewsContext

from penstock.core.errors import Misconfigured
from penstock.testing.aio import run_async
from penstock.workloads.pipeline.news import training
from penstock.workloads.pipeline.news.articles import CATEGORIES, Article
from penstock.workloads.pipeline.news.classify import NO_CLASSIFIER, candidates, classify, key
from penstock.workloads.pipeline.news.identity import url_hash
from penstock.workloads.pipeline.news.ingest import SAMPLE_FEEDS, ingest
from penstock.workloads.pipeline.news.keywords import by_keywords


@pytest.fixture(autouse=True)
def every_folder_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_NEWS_FOLDERS", "/")
    models = ("Sure", "Lost", "Inventive")
    named = (f"{name}={__name__}:{name}" for name in models)
    monkeypatch.setenv("PENSTOCK_NEWS_MODELS", ",".join((*named, "gone=no_such_module:x")))


SPORT = "The striker scored twice as the team won the cup final against the league champions."


def article(name: str = "a", *, body: str = SPORT, **changes: Any) -> Article:
    url = f"https://a.example/{name}"
    return Article(
        url=url,
        title=changes.pop("title", f"Title {name}"),
        body=body,
        source=changes.pop("source", "A"),
        hash=url_hash(url),
        **changes,
    )


# -- what is classified --------------------------------------------------------------------


@run_async
async def test_the_newest_come_first_up_to_the_limit() -> None:
    found = [article(str(when), published=float(when)) for when in (3, 1, 5, 4, 2)]
    found.append(article("undated"))
    ctx = NewsContext(found, classify_limit=3)
    assert [one.published for one in await candidates(ctx.config, ctx)] == [5, 4, 3]
    ctx = NewsContext(found)
    assert (await candidates(ctx.config, ctx))[-1].published is None


@run_async
async def test_of_two_the_same_the_one_of_the_first_source_goes_on() -> None:
    title = "The very same headline in two papers"
    found = [
        article("x", source="First", published=1.0),
        article("x", source="Second", published=2.0),
        article("y", source="First", title=title, published=1.0),
        article("z", source="Third", title=title, published=3.0),
    ]
    ctx = NewsContext(found)
    assert [one.source for one in await candidates(ctx.config, ctx)] == ["First", "First"]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), max_size=30), st.integers(1, 9))
def test_candidates_are_the_newest_of_the_different_ones(
    drawn: list[tuple[int, int]], limit: int
) -> None:
    found = [article(str(name), title="T", published=float(when)) for when, name in drawn]
    ctx = NewsContext(found, classify_limit=limit)
    chosen = run_async(candidates)(ctx.config, ctx)
    first = {one.hash: one for one in reversed(found)}
    newest = sorted((one.published or 0.0 for one in first.values()), reverse=True)
    assert [one.published for one in chosen] == newest[:limit]
    assert all(first[one.hash] == one for one in chosen)


def test_an_item_is_known_by_its_article() -> None:
    one = article()
    assert key(one) == key({"hash": one.hash}) == one.hash


# -- who is asked --------------------------------------------------------------------------


class Sure:
    def rewrite(self, text: str) -> str:
        return text

    def classify(self, title: str, labels: Any) -> str:
        return "culture"


class Lost(Sure):
    def classify(self, title: str, labels: Any) -> str:
        raise ConnectionError("no model there")


class Inventive(Sure):
    def classify(self, title: str, labels: Any) -> str:
        return "horoscopes"


def test_the_trained_classifier_answers() -> None:
    ctx = NewsContext()
    found = classify(article(), ctx)
    assert (found.label, found.method) == ("sport", "model")
    assert 0 < found.confidence <= 1
    assert ctx.metrics == {"total": 1, "success": 1, "model": 1}


def test_a_text_model_is_asked_first() -> None:
    ctx = NewsContext(model="Sure")
    found = classify(article(), ctx)
    assert (found.label, found.method) == ("culture", "llm")
    assert ctx.metrics == {"total": 1, "success": 1, "llm": 1}


@pytest.mark.parametrize("model", ["Lost", "Inventive"])
def test_a_text_model_that_fails_or_invents_is_passed_over(model: str) -> None:
    ctx = NewsContext(model=model)
    assert classify(article(), ctx).method == "model"
    assert ctx.metrics == {"total": 1, "success": 1, "model": 1, "llm_failed": 1}


def test_a_text_model_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(Misconfigured, match="no_such_module"):
        classify(article(), NewsContext(model="gone"))


@pytest.fixture
def without_sklearn(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    training._trained.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "sklearn"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    yield
    training._trained.cache_clear()


@pytest.mark.usefixtures("without_sklearn")
def test_without_scikit_learn_keywords_answer() -> None:
    ctx = NewsContext()
    found = classify(article(), ctx)
    assert (found.label, found.method) == ("sport", "keywords")
    assert ctx.metrics == {"total": 1, "success": 1, "keyword_fallback": 1}


@pytest.mark.usefixtures("without_sklearn")
def test_without_scikit_learn_the_feeds_own_section_goes_before_keywords() -> None:
    found = classify(article(section="health"), NewsContext())
    assert (found.label, found.method, found.confidence) == ("health", "feed", 1.0)


@pytest.mark.usefixtures("without_sklearn")
@run_async
async def test_without_scikit_learn_a_run_says_so_once() -> None:
    ctx = NewsContext([article(str(n)) for n in range(3)])
    await candidates(ctx.config, ctx)
    assert ctx.logged == [NO_CLASSIFIER]
    assert "pip install 'penstock[news]'" in NO_CLASSIFIER


def test_a_text_without_a_hint_is_of_no_section_in_particular() -> None:
    assert by_keywords("Lorem ipsum", "dolor sit amet") == ("other", 0.0)


def test_keywords_are_whole_words() -> None:
    # Not the app, nor the war, nor the bus in them.
    assert by_keywords("", "He was happy to warm up, busily, and to apply") == ("other", 0.0)


# -- how well ------------------------------------------------------------------------------


def test_every_section_has_at_least_fifteen_texts_of_its_own() -> None:
    examples = training.own_examples()
    counts = {label: sum(one.label == label for one in examples) for label in CATEGORIES}
    assert min(counts.values()) >= 15
    assert len(examples) == sum(counts.values()) == len({one.text for one in examples})


def test_on_texts_it_has_not_seen_four_of_five_are_right() -> None:
    from sklearn.model_selection import StratifiedKFold, cross_val_score

    examples = training.own_examples()
    folds = StratifiedKFold(5, shuffle=True, random_state=0)
    scores = cross_val_score(
        training.new_model(few=True),
        [one.text for one in examples],
        [one.label for one in examples],
        cv=folds,
    )
    assert scores.mean() >= 0.8


def test_the_same_seed_learns_the_same() -> None:
    examples = training.own_examples()
    texts = [one.text for one in examples[::7]]
    one, two = (training.Classifier(examples, seed=4).predict(texts) for _ in range(2))
    assert one == two


@run_async
async def test_the_sample_articles_get_the_sections_they_were_written_for() -> None:
    ctx = NewsContext()
    wanted = {
        "Mayor Ansel": "politics",
        "Norlane shares": "business",
        "Skarrow and Tessaly": "world",
        "Elvery Rovers": "sport",
        "Hospital trial": "health",
        "Upper Lorn": "environment",
        "Telescope on": "science",
        "Hackers hit": "technology",
        "Film about": "culture",
        "Two hurt": "other",
        "Fury as": "politics",
        "Baker, 100": "other",
    }
    got = {}
    for feed in SAMPLE_FEEDS[:3]:
        for one in await ingest(f"sample:{feed}", ctx):
            name = next(start for start in wanted if one.title.startswith(start))
            got[name] = classify(one, ctx).label
    assert got == wanted
