import pytest
from tests.jobs.news import FILLER, FakeContext, classified

from penstock.core.errors import InvalidRequest, Misconfigured
from penstock.workloads.pipeline.news.access import load_model
from penstock.workloads.pipeline.news.lexicon import Settings, lexicon_of, shipped
from penstock.workloads.pipeline.news.neutralize import (
    NO_BODY,
    candidates,
    neutralize,
    neutralized,
)
from penstock.workloads.pipeline.news.versions import Versions, remember_versions


@pytest.fixture(autouse=True)
def every_folder_is_allowed(monkeypatch):
    monkeypatch.setenv("PENSTOCK_NEWS_FOLDERS", "/")
    models = ("Quiet", "quiet", "Plainer", "nothing")
    named = (f"{name}=tests.jobs.models:{name}" for name in models)
    odd = ("none=tests.jobs.models", "empty=:x", "gone=no.such:thing", "path=os:path")
    monkeypatch.setenv("PENSTOCK_NEWS_MODELS", ",".join((*named, *odd)))


LEXICON = shipped().with_()
LOUD = "The mayor slammed the shocking plan for 40 buses. " + FILLER * 3


class Model:
    """Answers what it is told to; a text it was not asked for is an error."""

    def __init__(self, answer):
        self.answer = answer
        self.asked = []

    def rewrite(self, text):
        self.asked.append(text)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def classify(self, title, labels):
        return labels[0]


def test_title_and_body_are_rewritten_and_the_spans_say_where():
    one = classified(title="Mayor slams plan", body=LOUD)
    result = neutralized(one, LEXICON)
    assert result.title == "Mayor criticises plan"
    assert result.body == LOUD.replace("slammed", "criticised").replace("shocking", "unexpected")
    assert [one.text for one in result.spans] == ["slammed", "shocking"]
    assert [one.category for one in result.title_spans] == ["conflict"]
    assert result.article == one.article
    assert (result.label, result.audit) == ("politics", "")


def test_a_sources_own_misspelling_stays():
    body = LOUD.replace("committee", "comittee")
    assert "comittee" in neutralized(classified(body=body), LEXICON).body


def test_a_rewrite_that_the_auditor_refuses_leaves_the_original_and_says_why():
    body = "It was a large massive plan. He slammed it. " + FILLER * 3
    result = neutralized(classified(body=body), LEXICON)
    assert result.body == body
    assert result.spans == ()
    assert result.audit == "body: it reads badly: 'large large'"


def test_a_models_text_is_taken_if_facts_are_kept_and_less_is_found():
    better = LOUD.replace("slammed the shocking plan", "spoke against the plan")
    model = Model(better)
    result = neutralized(classified(body=LOUD), LEXICON, model)
    assert (result.body, result.spans, result.audit) == (better, (), "")
    assert model.asked == [LOUD]


@pytest.mark.parametrize(
    "answer",
    [
        LOUD.replace("slammed the shocking plan for 40", "spoke against the plan for 41"),
        LOUD.replace("mayor", "governor of Ohio").replace("slammed", "criticised"),
        LOUD,
        "",
        None,
        RuntimeError("out of memory"),
    ],
)
def test_any_other_text_of_a_model_gives_way_to_the_spans(answer):
    result = neutralized(classified(body=LOUD), LEXICON, Model(answer))
    assert result.body == LOUD.replace("slammed", "criticised").replace("shocking", "unexpected")


def test_a_model_is_not_asked_where_there_is_nothing_to_do():
    model = Model("x")
    assert neutralized(classified(), LEXICON, model).body == FILLER * 3
    assert model.asked == []


def test_candidates_are_long_enough_and_the_newest():
    ones = [
        classified(1, published=10.0),
        classified(2, published=30.0),
        classified(3, published=None),
        classified(4, published=30.0),
        classified(5, published=99.0, body="x" * 499),
        classified(6, published=20.0, body="é" * 250),
    ]
    assert [one.article.hash for one in candidates(ones, 10)] == [
        "0002",
        "0004",
        "0006",
        "0001",
        "0003",
    ]
    assert [one.article.hash for one in candidates(ones, 2)] == ["0002", "0004"]


def test_metrics_add_up():
    ctx = FakeContext()
    neutralize(classified(1, body=LOUD), ctx)
    neutralize(classified(2, body=" " * 600 + "Short."), ctx)
    refused = neutralize(classified(3, body="It was a large massive plan. " + FILLER * 3), ctx)
    assert refused.audit
    assert ctx.metrics == {
        "total": 3, "success": 1, "skipped_no_body": 1, "failed": 1, "spans": 2,
    }  # fmt: skip


def test_bodies_that_a_model_wrote_are_counted():
    ctx = FakeContext(model="Plainer")
    assert neutralize(classified(body=LOUD), ctx).body == LOUD.replace("slammed", "criticised")
    assert ctx.metrics == {"total": 1, "success": 1, "llm": 1, "spans": 0}


def test_a_body_of_nothing_but_space_is_passed_over():
    assert neutralized(classified(body=" " * 600), LEXICON).audit == NO_BODY


def test_a_run_uses_the_settings_that_are_in_use_when_it_begins():
    ctx = FakeContext()
    body = "A groundbreaking plan. " + FILLER * 3
    assert neutralize(classified(body=body), ctx).spans == ()
    versions = Versions().add(
        Settings(on=("hype",)), source="manual", reason="", score=None, evaluations=0, parent=0
    )
    remember_versions(ctx, versions)
    assert neutralize(classified(body=body), ctx).spans == ()
    later = FakeContext(ctx.memory)
    assert neutralize(classified(body=body), later).body.startswith("A new plan.")
    assert lexicon_of(Settings(on=("hype",))).version == versions.in_use.lexicon


def test_a_registered_model_is_loaded_by_name_and_what_is_none_is_refused():
    assert load_model("quiet").rewrite("x") == "x"
    assert load_model("Quiet").rewrite("x") == "x"
    for name in ("none", "empty", "gone", "nothing", "path"):
        with pytest.raises(Misconfigured):
            load_model(name)
    for name in ("tests.jobs.models:quiet", "os:abort", "unknown"):
        with pytest.raises(InvalidRequest):
            load_model(name)
