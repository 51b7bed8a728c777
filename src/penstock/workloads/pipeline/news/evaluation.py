"""EVALUATION: how well this run's settings classify and neutralize, measured without a teacher.

Known phrases are planted in clean sentences of a sample of this run's articles. Labels are held
against the sections that addresses and feeds name; where neither does, a teacher model may.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

import msgspec

from penstock.workloads.pipeline.context import StageContext
from penstock.workloads.pipeline.news.access import TextModel, load_model
from penstock.workloads.pipeline.news.articles import CATEGORIES, Classified, Neutralized
from penstock.workloads.pipeline.news.challenge import cases
from penstock.workloads.pipeline.news.config import NewsConfig
from penstock.workloads.pipeline.news.scoring import sample, score
from penstock.workloads.pipeline.news.versions import (
    Evaluation,
    lexicon_in_use,
    recall_history,
    recall_versions,
    remember_history,
)
from penstock.workloads.pipeline.payloads import Results


def evaluation(results: Results[Neutralized], ctx: StageContext) -> Evaluation:
    """Metrics as in the reference, of the whole sample. An empty sample is a completed
    evaluation that says nothing, and is not remembered."""
    config: NewsConfig = ctx.config
    pool = classified_of(ctx)
    done = {one.article.hash for one in results}
    chosen = drawn(pool, done, config.eval_sample_size, config.seed)
    by_hash = {one.article.hash: one for one in pool}
    teacher = load_model(config.teacher_model) if config.teacher_model else None
    accuracy = accuracy_of([by_hash[hash] for hash in chosen], teacher)
    articles = [by_hash[hash].article for hash in chosen]
    found = score(cases(articles, config.seed), lexicon_in_use(ctx))
    result = Evaluation(
        job_id=ctx.job_id,
        at=ctx.now(),
        version=recall_versions(ctx).in_use.id,
        sample=tuple(chosen),
        accuracy=accuracy,
        neutralization=found.neutralization,
        precision=found.precision,
        recall=found.recall,
        overall=found.overall(accuracy),
        planted=found.planted,
        missed=found.missed,
        false_hits=found.false_hits,
    )
    _report(result, ctx)
    if chosen:
        remember_history(ctx, recall_history(ctx).with_(result))
    return result


def classified_of(ctx: StageContext) -> list[Classified]:
    return [msgspec.convert(one, Classified) for one in ctx.results("classify")]


def drawn(pool: Sequence[Classified], done: Set[str], size: int, seed: int) -> list[str]:
    """The sample, as hashes: of what was neutralized, filled up with the rest of this run."""
    first = [one.article for one in pool if one.article.hash in done]
    chosen = sample(first, size, seed)
    rest = [one.article for one in pool if one.article.hash not in done]
    chosen += sample(rest, size - len(chosen), seed)
    return [one.hash for one in chosen]


def accuracy_of(chosen: Sequence[Classified], teacher: TextModel | None) -> float | None:
    """The share of right labels among those that can be checked; None where none can. A label
    that was taken from the feed proves nothing."""
    verdicts = []
    for one in chosen:
        expected = one.article.section
        if one.method == "feed":
            continue
        if not expected and teacher is not None:
            expected = teacher.classify(one.article.title, CATEGORIES)
        if expected in CATEGORIES:
            verdicts.append(one.label == expected)
    return sum(verdicts) / len(verdicts) if verdicts else None


def _report(result: Evaluation, ctx: StageContext) -> None:
    if result.accuracy is not None:
        ctx.metric("classification_accuracy", round(result.accuracy, 4), set=True)
    ctx.metric("avg_neutralization_score", round(result.neutralization, 4), set=True)
    ctx.metric("avg_span_precision", round(result.precision, 4), set=True)
    ctx.metric("avg_span_recall", round(result.recall, 4), set=True)
    ctx.metric("overall_quality_score", round(result.overall, 4), set=True)
    ctx.metric("estimated_cost_usd", 0.0, set=True)
    ctx.metric("sample_size", len(result.sample), set=True)
    ctx.metric("planted", result.planted, set=True)
