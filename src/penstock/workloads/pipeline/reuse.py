"""What a job that retries another takes over from it.

An item that was ok before, of the same stage, with the same key and the same input, is not
run again. Where a map stage goes over is not asked again, so what failed meets the same list;
but a source of a stage that needs others is, if one of those before it did not complete.
A step is taken over only if all that stands before it was.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from msgspec.structs import replace

from penstock.workloads.pipeline.context import Metric
from penstock.workloads.pipeline.records import (
    ItemOutcome,
    ItemRecord,
    PipelineRecord,
    StageRecord,
    StageStatus,
)
from penstock.workloads.pipeline.stage import Stage
from penstock.workloads.pipeline.store import PipelineStore

DUPLICATES = "duplicates"
"""Metric: items left out since another has their key."""


class Reuse:
    """The run before, as the one that retries it sees it."""

    def __init__(self, before: PipelineRecord, store: PipelineStore, page: int) -> None:
        self._before, self._store, self._page = before, store, page

    async def listing(self, stage: Stage) -> AsyncIterator[list[ItemRecord]] | None:
        """The items that the run before went over; None if that is not to be copied."""
        old = self._old(stage)
        if old is None or not old.listed or stage.info.over.startswith("stage:"):
            return None
        if stage.info.needs and not self._all_done_before(old):
            return None
        return self._copied(stage.name)

    def _all_done_before(self, stage: StageRecord) -> bool:
        """Whether a source that reads the stages before its own would find the same again."""
        return all(
            one.status is StageStatus.COMPLETED or not one.counted
            for one in self._before.stages
            if one.index < stage.index
        )

    async def _copied(self, stage: str) -> AsyncIterator[list[ItemRecord]]:
        after = -1
        while page := await self._store.items(
            self._before.id, stage, after=after, limit=self._page
        ):
            yield [_afresh(item) for item in page]
            after = page[-1].seq

    async def taken_over(self, stage: Stage, items: list[ItemRecord]) -> list[ItemRecord]:
        """The items, with the ends of those that need not be run again."""
        if self._old(stage) is None:
            return items
        keys = [item.key for item in items]
        before = {
            item.key: item
            for item in await self._store.items_by_key(self._before.id, stage.name, keys)
        }
        return [_taken(item, before.get(item.key)) for item in items]

    async def step(self, stage: Stage, stages: tuple[StageRecord, ...]) -> ItemRecord | None:
        """The end of a step, if it need not be run again; `stages` are those before it."""
        old = self._old(stage)
        if old is None or old.status is not StageStatus.COMPLETED:
            return None
        if not all(self._is_as_before(one) for one in stages):
            return None
        held = await self._store.items(self._before.id, stage.name, limit=1)
        if not held or held[0].outcome is not ItemOutcome.OK:
            return None
        return replace(held[0], seq=0, reused=True)

    def counted(self, stage: Stage) -> dict[str, Metric]:
        """What was counted before, to go on from where items are taken over."""
        old = self._old(stage)
        kept = {} if old is None else old.metrics
        return {name: value for name, value in kept.items() if name != DUPLICATES}

    def _old(self, stage: Stage) -> StageRecord | None:
        old = self._before.stage(stage.name)
        return old if old is not None and old.form == form_of(stage) else None

    def _is_as_before(self, stage: StageRecord) -> bool:
        old = self._before.stage(stage.name)
        if old is None or old.form != stage.form or old.status is not stage.status:
            return False
        return stage.reused == stage.total == old.total or not stage.total


def form_of(stage: Stage) -> str:
    """What a stage is, as far as its results depend on it: a change makes it another."""
    return stage.info.form


def _afresh(item: ItemRecord) -> ItemRecord:
    """As it was listed. One that could not be stored when it was has failed for good."""
    if not item.input:
        return item
    return ItemRecord(seq=item.seq, key=item.key, input=item.input)


def _taken(item: ItemRecord, old: ItemRecord | None) -> ItemRecord:
    if old is None or old.outcome is not ItemOutcome.OK or old.error or old.input != item.input:
        return item
    return replace(old, seq=item.seq, reused=True)
