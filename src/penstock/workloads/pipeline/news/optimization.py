"""OPTIMIZATION: better settings for the next run, or back to those before.

In this order: roll back if the scores fell; wait for enough evaluations; propose changes; keep
those with which an evaluation on other articles, with another seed, does not fall. The outcome
follows from the seed, the articles and what was remembered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from penstock.workloads.pipeline.context import StageContext
from penstock.workloads.pipeline.news.articles import Article
from penstock.workloads.pipeline.news.challenge import Case, cases
from penstock.workloads.pipeline.news.config import NewsConfig
from penstock.workloads.pipeline.news.evaluation import classified_of
from penstock.workloads.pipeline.news.lexicon import Settings, lexicon_of
from penstock.workloads.pipeline.news.proposals import proposals
from penstock.workloads.pipeline.news.scoring import sample, score
from penstock.workloads.pipeline.news.versions import (
    Evaluation,
    History,
    Versions,
    recall_history,
    recall_versions,
    remember_versions,
)
from penstock.workloads.pipeline.payloads import Results

DROPS = {
    "overall": 0.5,
    "accuracy": 0.10,
    "neutralization": 0.75,
    "precision": 0.15,
    "recall": 0.15,
}
"""A fall against the run before that is too much."""
BELOW_BEST = 1.0
"""A distance to the best overall score of the last runs that is too much."""
LAST_RUNS = 5
TARGET = 0.85
"""Of precision and of recall: where both are there, nothing is changed."""
MIN_HELD_OUT = 2
"""Articles that must be left for an evaluation of a change."""
ROUNDS = 4
"""How often the articles that were held out are planted anew, at most."""
HELD_OUT_CASES = 40
"""Texts that are enough for a verdict; fewer articles are planted more often."""
_HELD_OUT = 1_000_003
_EPSILON = 1e-9


class Verdict(msgspec.Struct, frozen=True):
    """A proposal, and the overall scores of the held-out evaluation before and with it."""

    change: str
    before: float
    after: float
    accepted: bool


class Optimization(msgspec.Struct, frozen=True, kw_only=True):
    """What was done, and why nothing was, if so."""

    action: Literal["none", "rollback", "optimized"]
    reason: str
    version: int
    """In use from now on."""
    parent: int | None = None
    verdicts: tuple[Verdict, ...] = ()


def optimization(results: Results[Evaluation], ctx: StageContext) -> Optimization:
    """Metrics: rollback_triggered, prompts_updated, reason."""
    latest = next(iter(results), None)
    done = _optimized(latest, ctx) if latest else _nothing("there is no evaluation", Versions())
    ctx.metric("rollback_triggered", done.action == "rollback", set=True)
    ctx.metric("prompts_updated", int(done.action == "optimized"), set=True)
    ctx.metric("reason", done.reason, set=True)
    return done


def _optimized(latest: Evaluation, ctx: StageContext) -> Optimization:
    config: NewsConfig = ctx.config
    versions, history = recall_versions(ctx), recall_history(ctx)
    if latest.version != versions.current:
        # A resumed stage: the change was remembered, its result was not.
        return _already(versions)
    if falls := fallen(latest, history):
        return _rolled_back(falls, versions, history, ctx)
    since = history.count - versions.in_use.evaluations
    if since < config.min_runs_before_optimize:
        need = config.min_runs_before_optimize
        return _nothing(f"{since} of {need} evaluations since the last change", versions)
    if min(latest.precision, latest.recall) >= TARGET:
        return _nothing("precision and recall are at their target", versions)
    return _changed(latest, versions, history, ctx)


def fallen(latest: Evaluation, history: History) -> list[str]:
    """Which figures fell too much against the run before, or the best of the last ones."""
    before = [one for one in history.evaluations if one.job_id != latest.job_id]
    if not before:
        return []
    fell = []
    for figure, limit in DROPS.items():
        old, new = getattr(before[-1], figure), getattr(latest, figure)
        if old is not None and new is not None and old - new >= limit - _EPSILON:
            fell.append(figure)
    best = max(one.overall for one in before[-LAST_RUNS:])
    if "overall" not in fell and best - latest.overall >= BELOW_BEST - _EPSILON:
        fell.append("overall")
    return fell


def _rolled_back(
    falls: list[str], versions: Versions, history: History, ctx: StageContext
) -> Optimization:
    current = versions.in_use
    parent = versions.get(current.parent)
    fell = f"{', '.join(falls)} fell"
    if falls == ["accuracy"]:
        return _nothing(f"{fell}, which the lexicon does not decide", versions)
    if current.source != "auto_optimize" or parent is None:
        return _nothing(f"{fell}, but version {current.id} was not made here", versions)
    restored = versions.add(
        parent.settings,
        source="rollback",
        reason=f"{fell}: back to version {parent.id}",
        score=parent.score,
        evaluations=history.count,
        parent=current.id,
    )
    remember_versions(ctx, restored)
    return Optimization(
        action="rollback",
        reason=restored.in_use.reason,
        version=restored.current,
        parent=current.id,
    )


def _changed(
    latest: Evaluation, versions: Versions, history: History, ctx: StageContext
) -> Optimization:
    held_out = _held_out(latest, ctx)
    if held_out is None:
        return _nothing("too few articles were left to check a change on", versions)
    current = versions.in_use
    settings, verdicts = _tried(latest, current.settings, held_out, _given_up(versions), ctx)
    if settings == current.settings:
        reason = "no change held on other articles" if verdicts else "there is nothing to propose"
        return _nothing(reason, versions, verdicts)
    reason = ", ".join(one.change for one in verdicts if one.accepted)
    changed = versions.add(
        settings,
        source="auto_optimize",
        reason=reason,
        score=latest.overall,
        evaluations=history.count,
        parent=current.id,
    )
    remember_versions(ctx, changed)
    return Optimization(
        action="optimized",
        reason=reason,
        version=changed.current,
        parent=current.id,
        verdicts=tuple(verdicts),
    )


def _tried(
    latest: Evaluation,
    settings: Settings,
    held_out: Sequence[Case],
    given_up: set[str],
    ctx: StageContext,
) -> tuple[Settings, list[Verdict]]:
    """One proposal after the other, each upon those accepted before it."""
    verdicts = []
    before = score(held_out, lexicon_of(settings)).overall(None)
    for proposal in proposals(latest, settings):
        ctx.check()
        tried = proposal.apply(settings)
        if lexicon_of(tried).version in given_up:
            continue
        after = score(held_out, lexicon_of(tried)).overall(None)
        accepted = after >= before - _EPSILON
        verdicts.append(Verdict(proposal.what, round(before, 4), round(after, 4), accepted))
        if accepted:
            settings, before = tried, after
    return settings, verdicts


def _held_out(latest: Evaluation, ctx: StageContext) -> list[Case] | None:
    """Cases of articles that the evaluation did not see."""
    config: NewsConfig = ctx.config
    seen = set(latest.sample)
    rest: list[Article] = [
        one.article for one in classified_of(ctx) if one.article.hash not in seen
    ]
    if len(rest) < MIN_HELD_OUT:
        return None
    size = min(len(rest), config.eval_sample_size)
    made = []
    for turn in range(max(1, min(ROUNDS, HELD_OUT_CASES // size))):
        seed = config.seed + _HELD_OUT + turn
        made += cases(sample(rest, size, seed), seed)
    return made


def _given_up(versions: Versions) -> set[str]:
    """Settings that were rolled back: they are not tried again."""
    left = {one.parent for one in versions.versions if one.source == "rollback"}
    return {one.lexicon for one in versions.versions if one.id in left}


def _already(versions: Versions) -> Optimization:
    done = versions.in_use
    return Optimization(
        action="rollback" if done.source == "rollback" else "optimized",
        reason=done.reason,
        version=done.id,
        parent=done.parent,
    )


def _nothing(reason: str, versions: Versions, verdicts: Sequence[Verdict] = ()) -> Optimization:
    return Optimization(
        action="none", reason=reason, version=versions.in_use.id, verdicts=tuple(verdicts)
    )
