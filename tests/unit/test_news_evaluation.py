from collections import Counter

import pytest
from tests.jobs.news import FILLER, FakeContext, FakeResults, article, classified

from penstock.workloads.pipeline.news.challenge import (
    PER_ARTICLE,
    cases,
    challenge,
    clean_sentences,
    strength,
)
from penstock.workloads.pipeline.news.evaluation import accuracy_of, evaluation
from penstock.workloads.pipeline.news.lexicon import Settings, lexicon_of, shipped
from penstock.workloads.pipeline.news.neutralize import neutralized
from penstock.workloads.pipeline.news.quotes import quoted
from penstock.workloads.pipeline.news.scoring import Score, sample, score

ARTICLES = [article(n, body=FILLER * 2 + f"It cost {n} million crowns.") for n in range(20)]
LABELS = ["politics", "sport", "world"]


def test_the_plants_lie_where_the_case_says_and_outside_quotations():
    for case in cases(ARTICLES, 3):
        assert len(case.planted) == PER_ARTICLE
        for one in case.planted:
            found = case.text[one.start : one.end].casefold()
            assert found == one.phrase
            assert not any(a < one.end and one.start < b for a, b in quoted(case.text))


def test_the_same_seed_plants_the_same_and_another_something_else():
    assert cases(ARTICLES, 3) == cases(ARTICLES, 3)
    assert cases(ARTICLES, 3) != cases(ARTICLES, 4)


def test_a_sample_of_twelve_meets_most_plants():
    planted = {one.phrase for case in cases(ARTICLES[:12], 0) for one in case.planted}
    assert len(planted) > 0.9 * len(challenge().plants)


def test_sentences_with_a_known_phrase_or_a_quotation_are_not_planted_in():
    text = "A plain one. He slammed it. A groundbreaking thing. He said “no”. Another one! No end"
    assert clean_sentences(text) == ["A plain one.", "Another one!"]


def test_a_lexicon_without_phrases_finds_nothing_and_misses_all():
    nothing = lexicon_of(Settings(off=shipped().categories))
    found = score(cases(ARTICLES, 0), nothing)
    assert (found.recall, found.precision, found.found) == (0.0, 1.0, 0)
    assert sum(found.missed.values()) == found.planted == 20 * PER_ARTICLE


def test_the_whole_lexicon_misses_only_what_it_does_not_have():
    found = score(cases(ARTICLES, 0), shipped().everything())
    known = {form for phrase in shipped().phrases for form in phrase.forms}
    assert found.missed
    assert not set(found.missed) & known


def test_precision_counts_hits_where_nothing_was_planted():
    found = score(cases(ARTICLES, 0), shipped().with_())
    assert set(found.false_hits) <= {"emotional/stunning", "exaggeration/massive"}
    wrong = sum(found.false_hits.values())
    assert wrong > 0
    assert found.precision == pytest.approx(found.found / (found.found + wrong))


def test_more_phrases_score_higher():
    made = cases(ARTICLES, 0)
    shipped_ones, all_of_them = (
        score(made, shipped().with_()),
        score(made, shipped().everything()),
    )
    assert all_of_them.recall > shipped_ones.recall
    assert all_of_them.neutralization > shipped_ones.neutralization
    assert all_of_them.overall(1.0) > shipped_ones.overall(1.0)


def test_the_overall_score_has_the_references_weights():
    one = Score(
        neutralization=8.0, precision=0.9, recall=0.7, planted=1, found=1, missed={}, false_hits={}
    )
    assert one.overall(0.5) == pytest.approx(0.2 * 5 + 0.5 * 8 + 0.3 * 8)
    assert one.overall(None) == pytest.approx(8.0)


def test_strength_is_of_what_stands_outside_quotations():
    assert strength("A shocking, massive plan.") == 5
    assert strength("A plan, “shocking and massive”.") == 0


@pytest.mark.parametrize(
    ("have", "drawn"),
    [
        ({"tabloid": 9, "quality": 9, "other": 9}, {"tabloid": 3, "quality": 3, "other": 4}),
        ({"tabloid": 1, "quality": 20}, {"tabloid": 1, "quality": 9}),
        ({"other": 4}, {"other": 4}),
        ({}, {}),
    ],
)
def test_a_sample_is_mixed_by_kind_and_filled_up(have, drawn):
    kinds = [kind for kind, count in have.items() for _ in range(count)]
    articles = [article(n, kind=kind) for n, kind in enumerate(kinds)]
    chosen = sample(articles, 10, 0)
    assert Counter(one.source_kind for one in chosen) == drawn
    assert sample(articles[::-1], 10, 0) == chosen


def test_a_label_is_checked_against_the_section_unless_it_was_taken_from_it():
    ones = [
        classified(1, "sport", "model", section="sport"),
        classified(2, "world", "keywords", section="sport"),
        classified(3, "sport", "feed", section="sport"),
        classified(4, "sport", "model"),
    ]
    assert accuracy_of(ones, None) == 0.5
    assert accuracy_of(ones[2:], None) is None


def test_a_teacher_says_what_no_section_does():
    class Teacher:
        def rewrite(self, text):
            return text

        def classify(self, title, labels):
            return "sport"

    ones = [classified(1, "sport", "model"), classified(2, "world", "model")]
    assert accuracy_of(ones, Teacher()) == 0.5


def context(memory=None, *, count=12, job="job-1", **config):
    ones = [
        classified(n, LABELS[n % 3], "model", body=ARTICLES[n].body, section="politics")
        for n in range(count)
    ]
    ctx = FakeContext(memory, **config)
    ctx.job_id = job
    ctx.outputs["classify"] = FakeResults(ones)
    return ctx, FakeResults([neutralized(one, shipped().with_()) for one in ones])


def test_the_stage_reports_the_references_metrics_and_remembers_its_result():
    ctx, results = context(eval_sample_size=6)
    found = evaluation(results, ctx)
    assert ctx.metrics == {
        "classification_accuracy": round(found.accuracy, 4),
        "avg_neutralization_score": round(found.neutralization, 4),
        "avg_span_precision": round(found.precision, 4),
        "avg_span_recall": round(found.recall, 4),
        "overall_quality_score": round(found.overall, 4),
        "estimated_cost_usd": 0.0,
        "sample_size": 6,
        "planted": 24,
    }
    assert 0 < found.recall < 1
    assert ctx.memory["evaluations"]["count"] == 1


def test_a_run_that_evaluates_twice_counts_once():
    ctx, results = context()
    evaluation(results, ctx)
    evaluation(results, ctx)
    again, results = context(ctx.memory, job="job-2")
    evaluation(results, again)
    assert again.memory["evaluations"]["count"] == 2
    assert [one["job_id"] for one in again.memory["evaluations"]["evaluations"]] == [
        "job-1",
        "job-2",
    ]


def test_an_empty_sample_is_a_completed_evaluation_that_leaves_nothing():
    ctx, results = context(count=0)
    assert evaluation(results, ctx).sample == ()
    assert ctx.metrics["sample_size"] == 0
    assert "classification_accuracy" not in ctx.metrics
    assert ctx.memory == {}
