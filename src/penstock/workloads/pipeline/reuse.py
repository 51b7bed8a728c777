"""What an attempt takes over from earlier ones, and a run from the run that it retries.

Stages are declared, not replayed, so what was done can be kept as long as it is still a part of
the pipeline: the stages that have begun must be its first ones, unchanged.

In a run that retries another, an item that was ok before, of the same stage, with the same key
and the same input, is not run again. What a map stage goes over is not listed again, so what
failed meets the same items; but the source of a stage that needs others is, if one of those
before it did not complete. A step is taken over only if all stages before it were.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

from msgspec import Struct
from msgspec.structs import replace

from penstock.workloads.pipeline.definition import Definition, Stage
from penstock.workloads.pipeline.payloads import SUCCEEDED
from penstock.workloads.pipeline.records import (
    ItemOutcome,
    ItemRecord,
    OnChange,
    PipelineRecord,
    StageRecord,
    StageStatus,
    first_stages,
)
from penstock.workloads.pipeline.rows import Metric, RunRows, item_of

DEFINITION_CHANGED = "DEFINITION_CHANGED"
_REMOVED = "removed"
"""Why a stage was skipped that the pipeline has no more."""


class DefinitionChanged(Exception):
    """What was begun can't be gone on with."""

    def __init__(self, message: str, stage: str = "orchestrator") -> None:
        super().__init__(message)
        self.stage = stage


def is_changed(record: PipelineRecord, pipeline: Definition) -> bool:
    """Whether something was begun under another definition than this."""
    return bool(_begun(record)) and record.fingerprint not in ("", pipeline.fingerprint)


def stages_to_go_on(record: PipelineRecord, pipeline: Definition) -> tuple[StageRecord, ...]:
    """The stages with what was done of them. Raises DefinitionChanged, naming the stage.

    Not for a pipeline that restarts upon a change: that forgets what was done.
    """
    if is_changed(record, pipeline):
        if pipeline.on_change is OnChange.REFUSE:
            raise DefinitionChanged(
                f"pipeline {pipeline.name} was changed while this job ran, and its jobs are not"
                " resumed then (on_change='refuse')"
            )
        _check(record, pipeline)
    begun = {stage.name: stage for stage in _begun(record)}
    known = (begun.get(one.name, one) for one in _first(record, pipeline, later=0))
    return (*known, *_removed(record, pipeline))


def _begun(record: PipelineRecord) -> list[StageRecord]:
    """The stages of which something was done, or which were skipped."""
    return [
        stage
        for stage in record.stages
        if stage.status is not StageStatus.PENDING and stage.reason != _REMOVED
    ]


def stages_anew(record: PipelineRecord, pipeline: Definition) -> tuple[StageRecord, ...]:
    """The stages of a run that starts over: nothing that was done is theirs any more."""
    return (*_first(record, pipeline, later=1), *_removed(record, pipeline))


def _first(record: PipelineRecord, pipeline: Definition, *, later: int) -> list[StageRecord]:
    """The stages before anything has begun, so many generations later than those of the record."""
    generations = {stage.name: stage.generation + later for stage in record.stages}
    return [
        replace(one, generation=generations.get(one.name, 0))
        for one in first_stages(stage.info for stage in pipeline.stages.values())
    ]


def _removed(record: PipelineRecord, pipeline: Definition) -> list[StageRecord]:
    """Those that the pipeline had when the job began. They are kept, last, and do not count."""
    first = len(pipeline.stages)
    gone = [stage for stage in record.stages if stage.name not in pipeline.stages]
    return [
        StageRecord(
            name=stage.name,
            index=first + place,
            kind=stage.kind,
            form=stage.form,
            status=StageStatus.SKIPPED,
            reason=_REMOVED,
            counted=False,
            generation=stage.generation + 1,
        )
        for place, stage in enumerate(gone)
    ]


def _check(record: PipelineRecord, pipeline: Definition) -> None:
    now = list(pipeline.stages.values())
    for index, stage in enumerate(_begun(record)):
        if stage.name not in pipeline.stages:
            raise DefinitionChanged(f"stage {stage.name} is not there any more", stage.name)
        if index >= len(now) or now[index].name != stage.name:
            raise DefinitionChanged(f"stage {stage.name} is not in its place any more", stage.name)
        if stage.form and stage.form != (form := now[index].info.form):
            raise DefinitionChanged(
                f"stage {stage.name} was {stage.form!r} and is {form!r}", stage.name
            )


DUPLICATES = "duplicates"
"""Metric: items left out since another has their key."""


class Reuse:
    """The run before, as the one that retries it sees it."""

    def __init__(self, stages: tuple[StageRecord, ...], rows: RunRows, page: int) -> None:
        self._stages = {stage.name: stage for stage in stages}
        self._rows, self._page = rows, page
        self._finders: dict[str, _Finder] = {}

    async def listing(self, stage: Stage) -> AsyncIterator[list[ItemRecord]] | None:
        """The items that the run before went over; None if that is not to be copied."""
        old = self._old(stage)
        if old is None or not old.listed or stage.info.over.startswith("stage:"):
            return None
        before = [one for one in self._stages.values() if one.counted and one.index < old.index]
        if stage.info.needs and any(one.status is not StageStatus.COMPLETED for one in before):
            return None  # a source that reads the stages before its own may find something else
        return self._copied(old)

    async def _copied(self, stage: StageRecord) -> AsyncIterator[list[ItemRecord]]:
        after = -1
        while page := await self._rows.items(stage, after=after, limit=self._page):
            yield [_afresh(item) for item in page]
            after = page[-1].seq

    async def taken_over(self, stage: Stage, items: list[ItemRecord]) -> list[ItemRecord]:
        """The items, with the ends of those that need not be run again."""
        old = self._old(stage)
        if old is None:
            return items
        finder = self._finders.get(stage.name)
        if finder is None:
            finder = self._finders[stage.name] = _Finder(self._rows, old)
        return [_taken(item, await finder.find(item.key)) for item in items]

    async def step(self, stage: Stage, stages: tuple[StageRecord, ...]) -> ItemRecord | None:
        """The end of a step, if it need not be run again; `stages` are those before it."""
        old = self._old(stage)
        if old is None or old.status is not StageStatus.COMPLETED:
            return None
        if not all(self._is_as_before(one) for one in stages):
            return None
        rows = await self._rows.ended(old, limit=1)
        if not rows or (held := item_of(rows[0])).outcome is not ItemOutcome.OK:
            return None
        return replace(held, seq=0, reused=True)

    def counted(self, stage: Stage) -> dict[str, Metric]:
        """What was counted before, to go on from where items are taken over."""
        old = self._old(stage)
        kept = {} if old is None else old.metrics
        return {name: value for name, value in kept.items() if name != DUPLICATES}

    def _old(self, stage: Stage) -> StageRecord | None:
        old = self._stages.get(stage.name)
        return old if old is not None and old.form == stage.info.form else None

    def _is_as_before(self, stage: StageRecord) -> bool:
        old = self._stages.get(stage.name)
        if old is None or old.form != stage.form or old.status is not stage.status:
            return False
        return stage.reused == stage.total == old.total or not stage.total


class _Finder(Struct):
    """Finds items that succeeded by their keys: one page of them is in memory, and all keys."""

    rows: RunRows
    stage: StageRecord
    positions: dict[str, int] | None = None
    page: dict[int, ItemRecord] = {}

    async def find(self, key: str) -> ItemRecord | None:
        if self.positions is None:
            self.positions = {}
            after = -1
            while rows := await self.rows.ended(self.stage, after, outcomes=SUCCEEDED):
                self.positions.update((row.key, row.n) for row in rows)
                after = rows[-1].n
        seq = self.positions.get(key)
        if seq is not None and seq not in self.page:
            rows = await self.rows.ended(self.stage, seq - 1, outcomes=SUCCEEDED)
            self.page = {row.n: item_of(row) for row in rows}
        return None if seq is None else self.page.get(seq)


def _afresh(item: ItemRecord) -> ItemRecord:
    """As it was listed. One that could not be stored when it was has failed for good."""
    if not item.input:
        return item
    return ItemRecord(seq=item.seq, key=item.key, input=item.input)


def _taken(item: ItemRecord, old: ItemRecord | None) -> ItemRecord:
    if old is None or old.outcome is not ItemOutcome.OK or old.error or old.input != item.input:
        return item
    return replace(old, seq=item.seq, reused=True)
