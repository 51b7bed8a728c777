"""The settings of the lexicon over time: every version with its parent and its reason.

They are kept in the pipeline's memory, so a run finds what the run before it left.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from penstock.workloads.pipeline.context import StageContext
from penstock.workloads.pipeline.news.lexicon import Lexicon, Settings, lexicon_of, shipped

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


def lexicon_in_use(ctx: StageContext) -> Lexicon:
    """Asked for once a run: all of its articles are read by the same phrases."""
    shelf: dict[str, Lexicon] = ctx.resource("lexicon")
    if "lexicon" not in shelf:
        shelf["lexicon"] = lexicon_of(recall_versions(ctx).in_use.settings)
    return shelf["lexicon"]
