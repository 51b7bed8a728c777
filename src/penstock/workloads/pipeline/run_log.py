"""Writes down what a run does: counts its items, and checkpoints rows in batches.

All that changes is gathered here. One checkpoint is under way at a time, and whatever comes
meanwhile goes into the next: there is no timer, and a busy stage costs few commits.
Who brings more than is written waits (`RunOptions.backlog`), so that memory stays flat.

While the engine is away, a checkpoint waits. It fails when another attempt has taken over;
then every waiter gets the error, and nothing is written any more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct
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
    StageKind,
    StageRecord,
    StageStatus,
    by_name,
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


def with_item(stage: StageRecord, item: ItemRecord, report: ItemReport | None) -> StageRecord:
    """A stage with one more item that has ended."""
    ok, failed = item.outcome is ItemOutcome.OK, item.outcome is ItemOutcome.FAILED
    errors, metrics = stage.errors, stage.metrics
    if item.error:
        errors = _with_errors(errors, [f"{item.key}: {item.error}" if item.key else item.error])
    if has_metrics(report):
        metrics = with_report(metrics, report)
    return replace(
        stage,
        done=stage.done + 1,
        ok=stage.ok + ok,
        failed=stage.failed + failed,
        skipped=stage.skipped + (not ok and not failed),
        reused=stage.reused + (ok and item.reused),
        output_count=stage.output_count + (item.output_count if ok else 0),
        errors=errors,
        metrics=metrics,
    )


def _with_errors(errors: tuple[str, ...], more: Sequence[str]) -> tuple[str, ...]:
    some = more[: max(0, _MOST_ERRORS - len(errors))]
    return (*errors, *(bounded(error, _LONGEST_ERROR) for error in some))


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


class _Batch(Struct):
    """What the next checkpoint will hold."""

    asked: bool = False
    rows: list[Step] = []
    changed: dict[str, None] = {}
    """Stages whose rows are to be written."""
    run: bool = False
    """Whether the run's own row is."""
    notes: list[str] = []
    waiting: list[asyncio.Future[None]] = []
    """Waiters for the write."""

    def settle(self, error: BaseException | None = None) -> None:
        for future in self.waiting:
            if future.done():  # who waited is gone
                continue
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)


class RunLog:
    """Gathers and writes the changes of one run, and knows how it stands."""

    def __init__(self, scope: RunScope, state: RunState, write: Write) -> None:
        self._base, self.state, self._write_rows = scope.record, state, write
        self._clock, self._backlog = scope.clock, scope.options.backlog
        self.known = {stage.name: stage for stage in scope.record.stages}
        """Its stages as they are counted, without the time and rate of the one that runs."""
        self._running: tuple[str, float, RateMeter | None] | None = None
        """The stage whose time counts, since when, and if it is a map, its speed."""
        self._batch = _Batch()
        self._broken: BaseException | None = None
        self._is_writing = self._closed = False
        self._writer: asyncio.Task[None] | None = None
        self.when_broken: Callable[[], None] = lambda: None
        """Called when nothing can be written any more: the run should stop now."""
        self.progress_at = self._clock.monotonic()
        """When something last got on, by the clock that never jumps."""

    # -- how it stands ------------------------------------------------------------

    @property
    def record(self) -> PipelineRecord:
        """The run with everything that was gathered, written or not."""
        state = self.state
        return replace(
            self._base,
            stage_progress=by_name(self.stages),
            fingerprint=state.fingerprint,
            errors=state.errors,
            abandoned_items=state.abandoned_items,
            summary=state.summary,
            alerts=state.alerts,
            current_stage=state.current_stage,
            status=state.status or self._base.status,
        )

    def stage(self, name: str) -> StageRecord:
        stage = self.known[name]
        if self._running is None or name != self._running[0]:
            return stage
        return replace(stage, **self._speed(stage))

    def _speed(self, stage: StageRecord) -> dict[str, Any]:
        """The fields of a stage that change with time while it runs."""
        if self._running is None or stage.status is not StageStatus.RUNNING:
            return {}
        _, began, meter = self._running
        spent = stage.duration_ms + (self._clock.monotonic() - began) * 1000
        if meter is None:
            return {"duration_ms": spent}
        meter.mark(stage.done)
        return {"duration_ms": spent, "rate": meter.rate(), "eta": meter.eta(stage.total)}

    @property
    def stages(self) -> tuple[StageRecord, ...]:
        return tuple(map(self.stage, self.known))

    # -- gathering ----------------------------------------------------------------

    def put_all(self, stages: Sequence[StageRecord]) -> None:
        """The stages of the run, instead of those that it had."""
        self.known.clear()
        for stage in stages:
            self.put(stage)

    def put(self, stage: StageRecord) -> None:
        """A stage as it is from now on."""
        self.known[stage.name] = stage
        self._batch.changed[stage.name] = None

    def change(self, stage: str, **changes: Any) -> None:
        self.put(replace(self.known[stage], **changes))

    def begin(self, stage: str, **changes: Any) -> None:
        """A stage runs: from here on its time counts."""
        self.change(stage, status=StageStatus.RUNNING, **changes)
        known = self.known[stage]
        meter = None if known.kind is StageKind.STEP else RateMeter(self._clock, known.done)
        self._running = stage, self._clock.monotonic(), meter

    def end_stage(self, stage: str, status: StageStatus, **changes: Any) -> None:
        """A stage has ended: its time does not grow any more."""
        known = self.known[stage]
        speed = self._speed(known) if self._running and self._running[0] == stage else {}
        self._running = None
        self.put(replace(known, **{**speed, "status": status, "eta": None, **changes}))

    def set(self, **fields: Any) -> None:
        """Fields of the run's own row. One that other rows imply is set in `state` itself: it
        needs no row of its own."""
        for name, value in fields.items():
            setattr(self.state, name, value)
        self._batch.run = True

    def add_error(self, stage: str, message: str, code: str) -> None:
        """An error of the run."""
        self.set(errors=(*self.state.errors, StageError(stage, bounded(message), code)))

    def note(self, text: str) -> None:
        """An entry of the job's history."""
        self._batch.notes.append(text)

    def list(self, stage: str, items: Sequence[ItemRecord]) -> None:
        """New items of a stage; those that are over already are written as ended."""
        known, rows = self.known[stage], self._batch.rows
        self.change(stage, total=known.total + len(items))
        rows.extend(list_rows(list_rows_name(known), items))
        for item in items:
            if item.outcome is not ItemOutcome.PENDING:
                self.end(stage, item)

    def end_list(self, stage: str, report: ItemReport) -> None:
        """All items of a stage are known; `report` is what was counted meanwhile."""
        known = self.known[stage]
        if has_metrics(report) or report.errors:
            row = list_end_row(list_rows_name(known), known.total, report)
            self._batch.rows.append(row)
        self.change(stage, listed=True)
        self.report(stage, report)

    def report(self, stage: str, report: ItemReport) -> None:
        """What a stage reported otherwise than by an item."""
        known = self.known[stage]
        metrics = with_report(known.metrics, report)
        self.change(stage, metrics=metrics, errors=_with_errors(known.errors, report.errors))

    def recount(self, stage: str, rows: Sequence[Step]) -> None:
        """Count items that an earlier attempt ended; its counters may not have been written."""
        for row in rows:
            self.known[stage] = with_item(self.known[stage], item_of(row), report_of(row))

    def end(self, stage: str, item: ItemRecord, report: ItemReport | None = None) -> None:
        """An item that has ended. It is written with whatever comes next."""
        self.check()
        ended = with_item(self.known[stage], item, report)
        self.put(ended)
        self._batch.rows.append(item_row(item_rows_name(ended), item, report))

    def touch(self) -> None:
        """Something got on that is not written by itself."""
        self.progress_at = self._clock.monotonic()

    # -- writing ------------------------------------------------------------------

    def check(self) -> None:
        """Raise what keeps everything from being written."""
        if self._broken is not None:
            raise self._broken

    @property
    def is_full(self) -> bool:
        """Whether so many rows wait that nobody should bring more before they are written."""
        return len(self._batch.rows) >= self._backlog

    async def write(self) -> None:
        """Write all that was gathered. For the run's own task, which is never cancelled."""
        if self._is_writing:
            await self.commit()
            return
        self._is_writing = self._batch.asked = True
        await self._write_on()
        self.check()

    async def commit(self) -> None:
        """Have all that was gathered written, and wait for that. It is written, too, where
        whoever waits is cancelled."""
        self.check()
        saved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._batch.waiting.append(saved)
        self.wake()
        await saved

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
        if not self._is_writing:
            self._is_writing = True
            self._writer = asyncio.get_running_loop().create_task(self._write_on())

    async def close(self) -> None:
        """Write nothing more."""
        self._closed = True
        if self._writer is not None:
            self._writer.cancel()
            with suppress(asyncio.CancelledError):
                await self._writer

    async def _write_on(self) -> None:
        """Until nothing waits. After a failure nobody writes any more."""
        while self._batch.asked:
            batch, self._batch = self._batch, _Batch()
            try:
                self.touch()
                rows, notes = self._rows_of(batch), batch.notes
                # The last notes go with the rows: a stage ends as they say.
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
                return
            batch.settle()
        self._is_writing = False

    def _rows_of(self, batch: _Batch) -> Sequence[Step]:
        # A long checkpoint that is cut off keeps its first rows. So a stage goes before its
        # items while it runs, and after them when it has ended.
        rows, ended = list[Step](), list[Step]()
        for name in batch.changed:
            stage = self.stage(name)
            (ended if stage.is_final else rows).append(stage_row(stage))
        rows += batch.rows
        rows += ended
        if batch.run:
            rows.append(run_row(self.state))
        return rows
