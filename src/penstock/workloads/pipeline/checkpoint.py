"""The one who writes while a run goes on.

All that changes is gathered here. One write is under way at a time, and whatever comes
meanwhile goes into the next: nobody waits for a timer, and a busy stage costs few writes.
Who brings more than is written waits (`RunOptions.backlog`), so that memory stays flat.

What a write can't do is tried again for a while. Then, or when another run has taken over,
the error is given to everybody who waits or comes, and nothing is written any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from penstock.core.errors import StoreCorrupt, Unavailable
from penstock.lifecycles.pipeline import PIPELINE, PipelineJobEvent
from penstock.ports.clock import Clock
from penstock.workloads.pipeline.context import Notes
from penstock.workloads.pipeline.options import RunOptions, Tell
from penstock.workloads.pipeline.records import (
    ItemRecord,
    PipelineEventKind,
    PipelineRecord,
    StageRecord,
    StageStatus,
)
from penstock.workloads.pipeline.store import Happening, PipelineStore, Save, Saved, StageItems
from penstock.workloads.pipeline.summary import progress_of
from penstock.workloads.pipeline.tally import Tally

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 5.0


class _Batch:
    """What the next write will hold."""

    __slots__ = (
        "asked",
        "changed",
        "ended",
        "event",
        "fields",
        "happened",
        "listed",
        "saved",
        "size",
    )

    def __init__(self) -> None:
        self.asked = False
        self.size = 0
        self.event: PipelineJobEvent | None = None
        self.changed: dict[str, None] = {}
        self.listed: list[StageItems] = []
        self.ended: dict[str, list[ItemRecord]] = {}
        self.happened: list[Happening] = []
        self.fields: dict[str, Any] = {}
        self.saved: asyncio.Future[Saved] | None = None

    def wait(self) -> asyncio.Future[Saved]:
        if self.saved is None:
            self.saved = asyncio.get_running_loop().create_future()
            self.saved.add_done_callback(_look)
        return self.saved

    def settle(self, result: Saved | BaseException) -> None:
        if self.saved is None or self.saved.done():
            return
        if isinstance(result, BaseException):
            self.saved.set_exception(result)
        else:
            self.saved.set_result(result)


def _look(future: asyncio.Future[Saved]) -> None:
    """Who waited may be gone; the error is kept for whoever comes next."""
    if not future.cancelled():
        future.exception()


class Checkpoint:
    """Gathers and writes the changes of one run, and knows how it stands."""

    def __init__(
        self,
        record: PipelineRecord,
        store: PipelineStore,
        clock: Clock,
        options: RunOptions,
        tell: Tell,
        heard: Callable[[Saved], None],
    ) -> None:
        self._base, self._store, self._clock = record, store, clock
        self._options, self._tell, self._heard = options, tell, heard
        self._tallies: dict[str, Tally] = {}
        self._fields: dict[str, Any] = {}
        self._batch = _Batch()
        self._under_way: _Batch | None = None
        self._broken: BaseException | None = None
        self._bell: asyncio.Future[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._closed = False
        self.when_broken: Callable[[], None] = lambda: None
        """Called when nothing can be written any more: whoever works should hear of it now."""
        self.progress_at = clock.monotonic()
        """When something last got on, by the clock that never jumps."""
        for stage in record.stages:
            self._tallies[stage.name] = Tally(stage, clock)

    # -- how it stands ------------------------------------------------------------

    @property
    def record(self) -> PipelineRecord:
        """The run with everything that was gathered, written or not."""
        stages = tuple(tally.record() for tally in self._tallies.values())
        return replace(self._base, stages=stages, **self._fields)

    @property
    def job_id(self) -> str:
        return self._base.id

    def tally(self, stage: str) -> Tally:
        return self._tallies[stage]

    def stage(self, name: str) -> StageRecord:
        return self._tallies[name].record()

    @property
    def current_stage(self) -> str:
        return self._fields.get("current_stage", self._base.current_stage) or ""

    @property
    def started_at(self) -> float | None:
        return self._base.started_at

    @property
    def stages(self) -> tuple[StageRecord, ...]:
        return tuple(tally.record() for tally in self._tallies.values())

    # -- gathering ----------------------------------------------------------------

    def put(self, stage: StageRecord) -> None:
        """A stage as it is from now on."""
        self._tallies[stage.name] = Tally(stage, self._clock)
        self._batch.changed[stage.name] = None

    def change(self, stage: str, **changes: Any) -> None:
        self._tallies[stage].change(**changes)
        self._batch.changed[stage] = None

    def happened(self, kind: PipelineEventKind, data: dict[str, Any]) -> None:
        self._batch.happened.append(Happening(kind, data))

    def set(self, **fields: Any) -> None:
        """Fields of the record that a Save can set."""
        self._fields.update(fields)
        self._batch.fields.update(fields)

    def move(self, event: PipelineJobEvent) -> None:
        """What happens to the job with the next write."""
        self._batch.event = event
        status = PIPELINE.after(self._base.status, event)
        self._base = replace(self._base, status=status)

    @property
    def is_moving(self) -> bool:
        """Whether a move of the job waits to be written; there is one in a write."""
        return self._batch.event is not None

    def note_start(self) -> None:
        """The store sets it with the first write; so does the record here."""
        self._base = replace(self._base, started_at=self._clock.now())

    def listed(self, stage: str, items: list[ItemRecord]) -> None:
        """New items of a stage."""
        batch = self._batch
        self._tallies[stage].list(items)
        batch.changed[stage] = None
        batch.listed.append(StageItems(stage, tuple(items)))
        batch.size += len(items)

    async def end(
        self, stage: str, item: ItemRecord, notes: Notes | None = None, *, soon: bool = True
    ) -> None:
        """An item that has ended. Returns at once, unless too many wait to be written. One that
        need not be written soon goes with whatever comes next."""
        if self._broken is not None:
            raise self._broken
        batch = self._batch
        self._tallies[stage].end(item, notes)
        batch.changed[stage] = None
        batch.ended.setdefault(stage, []).append(item)
        batch.size += 1
        if batch.size >= self._options.backlog:
            await self.commit()
        elif soon:
            self.wake()

    def touch(self) -> None:
        """Something got on that is not written by itself."""
        self.progress_at = self._clock.monotonic()

    # -- writing ------------------------------------------------------------------

    def check(self) -> None:
        """Raise what keeps everything from being written."""
        if self._broken is not None:
            raise self._broken

    async def commit(self) -> Saved:
        """Have all that was gathered written, and wait for that."""
        self.check()
        saved = self._batch.wait()
        self.wake()
        return await asyncio.shield(saved)

    async def settle(self) -> None:
        """Wait until nothing is left to write."""
        if self._batch.asked:
            await self.commit()
        elif self._under_way is not None:
            await asyncio.shield(self._under_way.wait())

    def wake(self) -> None:
        """Have it written soon. After the end, nothing is."""
        if self._closed:
            return
        self._batch.asked = True
        if self._bell is not None and not self._bell.done():
            self._bell.set_result(None)
        elif self._writer is None:
            self._writer = asyncio.ensure_future(self._write_on())

    async def close(self) -> None:
        """Write nothing more."""
        self._closed = True
        if self._writer is not None:
            self._writer.cancel()
            with suppress(asyncio.CancelledError):
                await self._writer

    async def _write_on(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            while self._batch.asked:
                self._under_way, self._batch = self._batch, _Batch()
                if not await self._write(self._under_way):
                    return
                self._under_way = None
            self._bell = loop.create_future()
            await self._bell

    async def _write(self, batch: _Batch) -> bool:
        try:
            saved = await self._patiently(self._save_of(batch))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._broken = error
            batch.settle(error)
            self._batch.settle(error)
            self.when_broken()
            return False
        self._heard(saved)
        batch.settle(saved)
        return True

    def _save_of(self, batch: _Batch) -> Save:
        now, options = self._clock.now(), self._options
        if batch.ended or batch.listed or batch.changed or batch.event:
            self.touch()
        for name in batch.ended:
            self._tell_progress(batch, self._tallies[name])
        if options.lease is not None and "lease_until" not in batch.fields:
            batch.fields["lease_until"] = now + options.lease
        return Save(
            job_id=self._base.id,
            fence=self._base.fence,
            at=now,
            event=batch.event,
            stages=tuple(self._tallies[name].record() for name in batch.changed),
            listed=tuple(batch.listed),
            ended=tuple(StageItems(name, tuple(items)) for name, items in batch.ended.items()),
            happened=tuple(batch.happened),
            **batch.fields,
        )

    def _tell_progress(self, batch: _Batch, tally: Tally) -> None:
        now = self._clock.monotonic()
        if tally.status is StageStatus.RUNNING and (
            now - tally.told_at >= self._options.progress_every
        ):
            tally.told_at = now
            data = progress_of(tally.record())
            batch.happened.append(Happening(PipelineEventKind.STAGE_PROGRESS, data))

    async def _patiently(self, save: Save) -> Saved:
        """Write, and if the store fails, again and again for a while."""
        since, wait = self._clock.monotonic(), _FIRST_PAUSE
        while True:
            try:
                return await self._store.save(save)
            except StoreCorrupt:
                raise
            except Unavailable as error:
                if self._clock.monotonic() - since + wait > self._options.store_patience:
                    raise
                self._tell.log(f"the store failed, and is tried again: {error}", level="warning")
            await self._clock.sleep(wait)
            wait = min(wait * 2, _LONGEST_PAUSE)
