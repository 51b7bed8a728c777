"""What one run leaves for the next: versions of the lexicon's settings, and evaluations.

Every version has a parent and a reason. Both are kept in the pipeline's memory.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.workloads.pipeline.context import StageContext
from penstock.workloads.pipeline.news.lexicon import Lexicon, Settings, lexicon_of, shipped

SHELF = "lexicon"
"""The job's resource that holds the lexicon it works with."""
VERSIONS = "lexicon_versions"
EVALUATIONS = "evaluations"
KEPT = 50
"""Versions, and evaluations, that are remembered."""

Origin = Literal["manual", "auto_optimize", "rollback"]


class Version(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    parent: int | None = None
    source: Origin = "manual"
    reason: str = ""
    score: float | None = None
    """Overall score when it was made."""
    evaluations: int = 0
    """Completed evaluations before it was made."""
    settings: Settings = Settings()
    lexicon: str = ""


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """One completed evaluation."""

    job_id: str
    at: float
    version: int
    """Of the settings that were in use."""
    sample: tuple[str, ...]
    """Hashes of the articles."""
    accuracy: float | None
    neutralization: float
    precision: float
    recall: float
    overall: float
    planted: int = 0
    missed: dict[str, int] = {}
    false_hits: dict[str, int] = {}


class History(msgspec.Struct, frozen=True, kw_only=True):
    """Evaluations, the newest last; `count` goes on where old ones are forgotten."""

    count: int = 0
    evaluations: tuple[Evaluation, ...] = ()

    def with_(self, new: Evaluation) -> History:
        """A run that is resumed gives its evaluation once."""
        others = tuple(one for one in self.evaluations if one.job_id != new.job_id)
        repeated = len(others) < len(self.evaluations)
        return History(count=self.count + (not repeated), evaluations=(*others, new)[-KEPT:])


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """Newest last; `current` is in use."""

    current: int = 0
    versions: tuple[Version, ...] = ()

    def get(self, id: int | None) -> Version | None:
        return next((one for one in self.versions if one.id == id), None)

    @property
    def in_use(self) -> Version:
        found = self.get(self.current)
        return found or Version(id=0, reason="as shipped", lexicon=shipped().version)

    def add(
        self,
        settings: Settings,
        *,
        source: Origin,
        reason: str,
        score: float | None,
        evaluations: int,
        parent: int | None,
    ) -> Versions:
        """With a new version in use."""
        kept = self.versions or (self.in_use,)
        new = Version(
            id=kept[-1].id + 1,
            parent=parent,
            source=source,
            reason=reason,
            score=score,
            evaluations=evaluations,
            settings=settings,
            lexicon=lexicon_of(settings).version,
        )
        return Versions(current=new.id, versions=(*kept, new)[-KEPT:])


def recall_versions(ctx: StageContext) -> Versions:
    found = ctx.recall(VERSIONS)
    return Versions() if found is None else msgspec.convert(found, Versions)


def remember_versions(ctx: StageContext, versions: Versions) -> None:
    ctx.remember(VERSIONS, msgspec.to_builtins(versions))


def recall_history(ctx: StageContext) -> History:
    found = ctx.recall(EVALUATIONS)
    return History() if found is None else msgspec.convert(found, History)


def remember_history(ctx: StageContext, history: History) -> None:
    ctx.remember(EVALUATIONS, msgspec.to_builtins(history))


def lexicon_in_use(ctx: StageContext) -> Lexicon:
    """Asked for once a run: all of its articles are read by the same phrases."""
    shelf: dict[str, Lexicon] = ctx.resource(SHELF)
    if "lexicon" not in shelf:
        shelf["lexicon"] = lexicon_of(recall_versions(ctx).in_use.settings)
    return shelf["lexicon"]
