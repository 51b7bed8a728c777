"""Writes down what a run does: counts its items, and checkpoints rows in batches.

All that changes is gathered here. One checkpoint is under way at a time, and whatever comes
meanwhile goes into the next: nobody waits for a timer, and a busy stage costs few commits.
Who brings more than is written waits (`RunOptions.backlog`), so that memory stays flat.

While the engine is away, a checkpoint waits. It fails when another attempt has taken over;
then the error is given to everybody who waits or comes, and nothing is written any more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from msgspec.structs import replace

from penstock.core.ledger import Step
from penstock.core.steps import MAX_NOTES
from penstock.ports.clock import Clock
from penstock.workloads.pipeline.context import RunScope
from penstock.workloads.pipeline.records import (
    ItemOutcome,
    ItemRecord,
    PipelineRecord,
    StageError,
    StageRecord,
    StageStatus,
)
from penstock.workloads.pipeline.retrying import bounded
from penstock.workloads.pipeline.rows import (
    ItemReport,
    Metric,
    RunState,
    has_metrics,
    item_of,
    item_row,
    item_rows_name,
    list_end_row,
    list_rows,
    list_rows_name,
    report_of,
    run_row,
    stage_row,
)

Write = Callable[[Sequence[Step], Sequence[str]], Awaitable[None]]
"""Makes rows and notes durable, as `ctx.checkpoint` does."""

_MOST_ERRORS = 5
_LONGEST_ERROR = 300
_WINDOW = 10.0
"""Seconds over which the rate of a stage is taken."""
_GRAIN = 0.2
"""Seconds between two marks of a rate that are kept."""


class RateMeter:
    """How fast a stage goes, by a clock that never jumps.

    The rate is that of the last ten seconds; of a slower stage, since its last item but one.
    One that stalls has a falling rate and a growing ETA.
    """

    def __init__(self, clock: Clock, done: int = 0) -> None:
        """`done` is what an attempt before this one has done: it says nothing of the speed."""
        self._clock = clock
        self._done = done
        self._marks: deque[tuple[float, int]] = deque([(clock.monotonic(), done)])

    def mark(self, done: int) -> None:
        """So many are done by now, in all."""
        if done == self._done:
            return
        now = self._clock.monotonic()
        self._done = done
        if now - self._marks[-1][0] >= _GRAIN:
            self._marks.append((now, done))
            self._forget(now)

    def rate(self) -> float | None:
        """Items a second; None before there is anything to tell."""
        now = self._clock.monotonic()
        self._forget(now)
        since, done = self._marks[0]
        if now <= since or self._done <= done:
            return None
        return (self._done - done) / (now - since)

    def eta(self, total: int) -> float | None:
        """Seconds until all are done, at that rate; None if that can't be told."""
        rest = max(0, total - self._done)
        if not rest:
            return 0.0
        rate = self.rate()
        return rest / rate if rate else None

    def _forget(self, now: float) -> None:
        while len(self._marks) > 2 and self._marks[1][0] <= now - _WINDOW:
            self._marks.popleft()


class StageCounters:
    """One stage while it runs; `record` makes the value that is written."""

    def __init__(self, stage: StageRecord, clock: Clock) -> None:
        self._base, self._clock = stage, clock
        self.total, self.done, self.ok = stage.total, stage.done, stage.ok
        self.failed, self.skipped, self.reused = stage.failed, stage.skipped, stage.reused
        self.output_count = stage.output_count
        self.metrics: dict[str, Metric] = stage.metrics
        self.errors: tuple[str, ...] = stage.errors
        self._meter: RateMeter | None = None
        self._began: float | None = None
        self._still = True
        """Nothing was counted since `_base` was made."""
        self.item_rows, self.list_rows = item_rows_name(stage), list_rows_name(stage)

    @property
    def status(self) -> StageStatus:
        return self._base.status

    @property
    def listed(self) -> bool:
        return self._base.listed

    def begin(self) -> None:
        """From here on time counts."""
        self._began = self._clock.monotonic()
        self._meter = RateMeter(self._clock, self.done)

    def change(self, **changes: object) -> None:
        """Set fields of the record that are not counted here."""
        self._base = replace(self._base, **changes)
        if self._base.eta is not None and self._base.is_final:
            self._base = replace(self._base, eta=None)

    def list(self, items: Sequence[ItemRecord]) -> None:
        self._still = False
        self.total += len(items)

    def end(self, item: ItemRecord, report: ItemReport | None) -> None:
        self._still = False
        self.done += 1
        outcome = item.outcome
        if outcome is ItemOutcome.OK:
            self.ok += 1
            self.output_count += item.output_count
            self.reused += item.reused
        elif outcome is ItemOutcome.FAILED:
            self.failed += 1
        else:
            self.skipped += 1
        if item.error and len(self.errors) < _MOST_ERRORS:
            self.complain(f"{item.key}: {item.error}" if item.key else item.error)
        if has_metrics(report):
            self.metrics = with_report(self.metrics, report)

    def report(self, report: ItemReport | None) -> None:
        """What the stage reported otherwise than by an item."""
        if report is not None:
            self._still = False
            self.metrics = with_report(self.metrics, report)
            for error in report.errors:
                self.complain(error)

    def complain(self, error: str) -> None:
        self._still = False
        if len(self.errors) < _MOST_ERRORS:
            self.errors = (*self.errors, bounded(error, _LONGEST_ERROR))

    def record(self) -> StageRecord:
        """The stage as it is now; where nothing moves, the same value again."""
        if self._began is None and self._still:
            return self._base
        made = self._made()
        if self._began is None:
            self._base, self._still = made, True
        return made

    def _made(self) -> StageRecord:
        base, meter, now = self._base, self._meter, self._clock.monotonic()
        spent, rate, eta = base.duration_ms, base.rate, base.eta
        if self._began is not None:
            spent += (now - self._began) * 1000
        if meter is not None and base.status is StageStatus.RUNNING:
            meter.mark(self.done)
            rate, eta = meter.rate(), meter.eta(self.total)
        return replace(
            base,
            total=self.total,
            done=self.done,
            ok=self.ok,
            failed=self.failed,
            skipped=self.skipped,
            reused=self.reused,
            output_count=self.output_count,
            metrics=self.metrics,
            errors=self.errors,
            duration_ms=spent,
            rate=rate,
            eta=eta,
        )

    def stand_still(self) -> None:
        """Its time is over: it does not grow any more."""
        self._base, self._began, self._still = self._made(), None, True


def with_report(metrics: dict[str, Metric], report: ItemReport) -> dict[str, Metric]:
    """The metrics of a stage with what an item reported."""
    result = {**metrics, **report.fixed}
    for name, value in report.added.items():
        before = result.get(name, 0)
        result[name] = value if isinstance(before, str) else before + value
    return result


def report_from(metrics: dict[str, Metric], errors: Sequence[str] = ()) -> ItemReport:
    """A report that gives these metrics to a stage that has none."""
    report = ItemReport({}, {}, list(errors))
    for name, value in metrics.items():
        if isinstance(value, bool | str):
            report.fixed[name] = value
        else:
            report.added[name] = value
    return report


class _Batch:
    """What the next checkpoint will hold."""

    __slots__ = ("asked", "changed", "notes", "rows", "run", "saved")

    def __init__(self) -> None:
        self.asked = False
        self.rows: list[Step] = []
        self.changed: dict[str, None] = {}
        """Stages whose rows are to be written."""
        self.run = False
        """Whether the run's own row is."""
        self.notes: list[str] = []
        self.saved: asyncio.Future[None] | None = None

    def wait(self) -> asyncio.Future[None]:
        if self.saved is None:
            self.saved = asyncio.get_running_loop().create_future()
            self.saved.add_done_callback(_look)
        return self.saved

    def settle(self, error: BaseException | None = None) -> None:
        if self.saved is None or self.saved.done():
            return
        if error is None:
            self.saved.set_result(None)
        else:
            self.saved.set_exception(error)


def _look(future: asyncio.Future[None]) -> None:
    """Who waited may be gone; the error is kept for whoever comes next."""
    if not future.cancelled():
        future.exception()


class RunLog:
    """Gathers and writes the changes of one run, and knows how it stands."""

    def __init__(self, scope: RunScope, state: RunState, write: Write) -> None:
        self._base, self.state, self._write_rows = scope.record, state, write
        self._clock, self._backlog = scope.clock, scope.options.backlog
        self._stages = {one.name: StageCounters(one, self._clock) for one in scope.record.stages}
        self._batch = _Batch()
        self._under_way: _Batch | None = None
        self._broken: BaseException | None = None
        self._bell: asyncio.Future[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._closed = False
        self.when_broken: Callable[[], None] = lambda: None
        """Called when nothing can be written any more: whoever works should stop now."""
        self.progress_at = self._clock.monotonic()
        """When something last got on, by the clock that never jumps."""

    # -- how it stands ------------------------------------------------------------

    @property
    def record(self) -> PipelineRecord:
        """The run with everything that was gathered, written or not."""
        state = self.state
        return replace(
            self._base,
            stages=self.stages,
            fingerprint=state.fingerprint,
            errors=state.errors,
            abandoned_items=state.abandoned_items,
            summary=state.summary,
            alerts=state.alerts,
            current_stage=state.current_stage,
            status=state.status or self._base.status,
        )

    def counters(self, stage: str) -> StageCounters:
        return self._stages[stage]

    def stage(self, name: str) -> StageRecord:
        return self._stages[name].record()

    @property
    def stages(self) -> tuple[StageRecord, ...]:
        return tuple(counters.record() for counters in self._stages.values())

    # -- gathering ----------------------------------------------------------------

    def put_all(self, stages: Sequence[StageRecord]) -> None:
        """The stages of the run, instead of those that it had."""
        self._stages.clear()
        for stage in stages:
            self.put(stage)

    def put(self, stage: StageRecord) -> None:
        """A stage as it is from now on."""
        self._stages[stage.name] = StageCounters(stage, self._clock)
        self._batch.changed[stage.name] = None

    def change(self, stage: str, **changes: Any) -> None:
        self._stages[stage].change(**changes)
        self._batch.changed[stage] = None

    def set(self, **fields: Any) -> None:
        """Fields of the run's own row."""
        self.state = replace(self.state, **fields)
        self._batch.run = True

    def complain(self, stage: str, message: str, code: str) -> None:
        """An error of the run."""
        self.set(errors=(*self.state.errors, StageError(stage, bounded(message), code)))

    def note(self, text: str) -> None:
        """An entry of the job's history."""
        self._batch.notes.append(text)

    def list(self, stage: str, items: Sequence[ItemRecord]) -> None:
        """New items of a stage; those that are over already are written as ended."""
        counters, batch = self._stages[stage], self._batch
        counters.list(items)
        batch.changed[stage] = None
        batch.rows.extend(list_rows(counters.list_rows, items))
        for item in items:
            if item.outcome is not ItemOutcome.PENDING:
                counters.end(item, None)
                batch.rows.append(item_row(counters.item_rows, item))

    def end_list(self, stage: str, report: ItemReport) -> None:
        """All items of a stage are known; `report` is what was counted meanwhile."""
        counters = self._stages[stage]
        counters.report(report)
        if has_metrics(report) or report.errors:
            self._batch.rows.append(list_end_row(counters.list_rows, counters.total, report))
        self.change(stage, listed=True)

    def recount(self, stage: str, rows: Sequence[Step]) -> None:
        """Count items that an earlier attempt ended; its counters may not have been written."""
        counters = self._stages[stage]
        for row in rows:
            counters.end(item_of(row), report_of(row))

    async def end(
        self, stage: str, item: ItemRecord, report: ItemReport | None = None, *, soon: bool = True
    ) -> None:
        """An item that has ended. Returns at once, unless too many wait to be written. One that
        need not be written soon goes with whatever comes next."""
        if self._broken is not None:
            raise self._broken
        batch, counters = self._batch, self._stages[stage]
        counters.end(item, report)
        batch.changed[stage] = None
        batch.rows.append(item_row(counters.item_rows, item, report))
        if len(batch.rows) >= self._backlog:
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

    async def commit(self) -> None:
        """Have all that was gathered written, and wait for that."""
        self.check()
        saved = self._batch.wait()
        self.wake()
        await asyncio.shield(saved)

    async def settle(self) -> None:
        """Wait until nothing is left to write."""
        if self._batch.asked:
            await self.commit()
        elif self._under_way is not None:
            await asyncio.shield(self._under_way.wait())

    def flush(self) -> None:
        """Have what was gathered written soon, if anything was."""
        batch = self._batch
        if batch.rows or batch.changed or batch.run or batch.notes:
            self.wake()

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
            self.touch()
            # A long checkpoint that is cut off keeps its first rows. So a stage goes before its
            # items while it runs, and after them when it has ended.
            stages = [self.stage(name) for name in batch.changed]
            rows = [stage_row(stage) for stage in stages if not stage.is_final]
            rows += batch.rows
            rows += [stage_row(stage) for stage in stages if stage.is_final]
            if batch.run:
                rows.append(run_row(self.state))
            notes = batch.notes  # the last ones go with the rows: a stage ends as it says
            while len(notes) > MAX_NOTES:
                await self._write_rows((), notes[:MAX_NOTES])
                notes = notes[MAX_NOTES:]
            if rows or notes:
                await self._write_rows(rows, notes)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._broken = error
            batch.settle(error)
            self._batch.settle(error)
            self.when_broken()
            return False
        batch.settle()
        return True
