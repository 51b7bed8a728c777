"""Guarded optimization: a change of the lexicon's switches is kept only if it improves the score on
articles and phrases that were held out; one that lets later runs fall is rolled back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec

from .articles import Article, Articles
from .evaluation import Case, Score, cases, half_of, score
from .lexicon import Choice, lexicon_of, shipped

DROPS = {
    "overall": 0.5,
    "accuracy": 0.10,
    "neutralization": 0.75,
    "precision": 0.15,
    "recall": 0.15,
}
"""A fall against the run before that is too much."""
BELOW_BEST = 1.0
"""A distance to the best overall score of the last five runs that is too much."""
TARGET = 0.85
"""Of precision and of recall: where both are there, nothing is changed."""
HELD_OUT_CASES = 24
"""Texts that are enough for a verdict; fewer articles are planted more often."""
KEPT = 50
_SEED = 1_000_003
_EPSILON = 1e-9


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One completed evaluation. Figures are of the held-out half, `missed` is of the other."""

    job_id: str
    version: int
    accuracy: float | None
    neutralization: float
    precision: float
    recall: float
    overall: float
    missed: dict[str, int] = {}
    false_hits: dict[str, int] = {}


class Version(msgspec.Struct, frozen=True, kw_only=True):
    id: int = 0
    parent: int | None = None
    source: Literal["manual", "auto_optimize", "rollback"] = "manual"
    reason: str = "as shipped"
    score: float | None = None
    job_id: str = ""
    evaluations: int = 0
    """Evaluations before it was made."""
    choice: Choice = Choice()


class History(msgspec.Struct, frozen=True):
    """What runs leave for later ones; the newest is last."""

    versions: tuple[Version, ...] = (Version(),)
    evaluations: tuple[Evaluation, ...] = ()
    count: int = 0
    """Of all evaluations, also those that are forgotten."""

    @property
    def current(self) -> Version:
        return self.versions[-1]

    def evaluated(self, new: Evaluation) -> History:
        """A run that is resumed adds its evaluation once."""
        others = tuple(one for one in self.evaluations if one.job_id != new.job_id)
        count = self.count + (len(others) == len(self.evaluations))
        return msgspec.structs.replace(self, evaluations=(*others, new)[-KEPT:], count=count)

    def with_(self, new: Version) -> History:
        return msgspec.structs.replace(self, versions=(*self.versions, new)[-KEPT:])


class Outcome(msgspec.Struct, frozen=True):
    """What an optimization did, and why."""

    action: Literal["none", "rollback", "optimized"]
    reason: str
    trials: tuple[str, ...] = ()


def load(articles: Articles) -> History:
    found = articles.recall("history")
    return msgspec.json.decode(found, type=History) if found else History()


def save(articles: Articles, history: History) -> None:
    articles.remember({"history": msgspec.json.encode(history)})


def optimize(articles: Articles, pool: Sequence[Article], job_id: str, min_runs: int) -> Outcome:
    """Roll back, or wait, or try changes; the new version is stored."""
    history = load(articles)
    current, latest = history.current, history.evaluations[-1]
    if current.job_id == job_id:  # a resumed stage: the change is stored, its result was not
        return Outcome("rollback" if current.source == "rollback" else "optimized", current.reason)
    if fell := fallen(latest, history.evaluations[:-1]):
        return _roll_back(articles, history, fell, job_id)
    since = history.count - current.evaluations
    if since < min_runs:
        return Outcome("none", f"{since} of {min_runs} evaluations since the last change")
    if min(latest.precision, latest.recall) >= TARGET:
        return Outcome("none", "precision and recall are at their target")
    choice, trials = improve(latest, current.choice, held_out(pool))
    if choice == current.choice:
        return Outcome("none", "no change improves the held-out score", tuple(trials))
    reason = "; ".join(one for one in trials if one.endswith("kept"))
    new = Version(
        id=current.id + 1,
        parent=current.id,
        source="auto_optimize",
        reason=reason,
        score=latest.overall,
        job_id=job_id,
        evaluations=history.count,
        choice=choice,
    )
    save(articles, history.with_(new))
    return Outcome("optimized", reason, tuple(trials))


def fallen(latest: Evaluation, before: Sequence[Evaluation]) -> list[str]:
    """Which figures fell too much against the run before, or the best of the last ones."""
    if not before:
        return []
    fell = []
    for figure, limit in DROPS.items():
        old, new = getattr(before[-1], figure), getattr(latest, figure)
        if old is not None and new is not None and old - new >= limit - _EPSILON:
            fell.append(figure)
    best = max(one.overall for one in before[-5:])
    if "overall" not in fell and best - latest.overall >= BELOW_BEST - _EPSILON:
        fell.append("overall")
    return fell


def _roll_back(articles: Articles, history: History, fell: list[str], job_id: str) -> Outcome:
    current, what = history.current, f"{', '.join(fell)} fell"
    parent = next((one for one in history.versions if one.id == current.parent), None)
    if current.source != "auto_optimize" or parent is None or fell == ["accuracy"]:
        return Outcome("none", f"{what}, but no change made here is the cause")
    restored = msgspec.structs.replace(
        parent,
        id=current.id + 1,
        parent=current.id,
        source="rollback",
        reason=f"{what}: back to version {parent.id}",
        job_id=job_id,
        evaluations=history.count,
    )
    save(articles, history.with_(restored))
    return Outcome("rollback", restored.reason)


# -- changes -------------------------------------------------------------------------------


def held_out(pool: Sequence[Article]) -> list[Case]:
    """Held-out phrases in held-out articles, planted anew until there are enough texts."""
    rest = [one for one in pool if half_of(one) == "held_out"]
    rounds = max(1, min(4, HELD_OUT_CASES // max(1, len(rest))))
    return [one for n in range(rounds) for one in cases(rest, "held_out", _SEED + n)]


def improve(latest: Evaluation, choice: Choice, texts: Sequence[Case]) -> tuple[Choice, list[str]]:
    """One proposal after the other, each upon those kept before it; and what became of each."""
    trials = []
    before: Score = score(texts, lexicon_of(choice))
    for what, on, off in proposals(latest, choice):
        tried = Choice(
            tuple(sorted({*choice.on, *on} - {*off})), tuple(sorted({*choice.off, *off} - {*on}))
        )
        after = score(texts, lexicon_of(tried))
        better = after.overall() > before.overall() + _EPSILON
        figures = f"{before.overall():.3f} to {after.overall():.3f}"
        trials.append(f"{what}: {figures}, {'kept' if better else 'dropped'}")
        if better:
            choice, before = tried, after
    return choice, trials


def proposals(
    latest: Evaluation, choice: Choice
) -> list[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    """Categories to switch on for what was missed, phrases to switch off for false hits. A single
    phrase is never added: no held-out phrase could show that it helps."""
    known = {form: one for one in shipped()[0] for form in one.replacements}
    in_use = lexicon_of(choice)
    missed: Counter[str] = Counter()
    for form, times in latest.missed.items():
        if form in known and form not in in_use.by_form:
            missed[known[form].category] += times
    ids = {one.id for one in in_use.phrases}
    return [
        *((f"switch on {name}", (name,), ()) for name, _ in missed.most_common()),
        *((f"switch off {id}", (), (id,)) for id in sorted(latest.false_hits) if id in ids),
    ]
