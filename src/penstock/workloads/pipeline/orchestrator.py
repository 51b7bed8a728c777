"""Runs one claimed job of a pipeline: its stages, one after the other, to an honest end.

The end of a stage and the beginning of the next are one write, and that is done before
anything of the next one runs; so whenever the process dies, the record says what is left to
do. Between stages, and with every write, the store is asked whether the job is to be
cancelled. There is one end, and it is written in one piece: status, errors, summary, alerts
and the last event.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec
from msgspec.structs import replace

from penstock.core.errors import IllegalMove, Superseded, Unavailable
from penstock.core.stages import (
    STALE_MESSAGE,
    Alert,
    ItemRecord,
    OnChange,
    PipelineEventKind,
    PipelineRecord,
    StageError,
    StageKind,
    StageRecord,
    StageStatus,
)
from penstock.lifecycles.pipeline import PipelineJobEvent, PipelineJobStatus
from penstock.ports.blobs import Blobs
from penstock.ports.clock import Clock
from penstock.ports.executor import Interrupted
from penstock.ports.pipelines import PipelineStore, Saved
from penstock.ports.token import Token
from penstock.workloads.pipeline import alerts, resume, status, summary
from penstock.workloads.pipeline.calls import Calls
from penstock.workloads.pipeline.checkpoint import Checkpoint, progress_of
from penstock.workloads.pipeline.definition import Definition, Stage
from penstock.workloads.pipeline.items import ItemRunner
from penstock.workloads.pipeline.listing import StageFailed
from penstock.workloads.pipeline.options import DEFAULTS, RunOptions, Silent, Spread, Tell
from penstock.workloads.pipeline.retrying import bounded
from penstock.workloads.pipeline.reuse import Reuse
from penstock.workloads.pipeline.skipping import skip_of
from penstock.workloads.pipeline.stage_run import Halt, StageRun

__all__ = ["AsyncPipelineOrchestrator", "RunOptions", "Spread", "Stop", "Tell"]

ORCHESTRATOR = "orchestrator"
CANCELLED = "CANCELLED"
STALE = "STALE"
_ITEM_ERRORS = 3
_ENDS = {
    PipelineJobStatus.COMPLETED: PipelineJobEvent.COMPLETE,
    PipelineJobStatus.PARTIAL: PipelineJobEvent.COMPLETE_PARTLY,
    PipelineJobStatus.FAILED: PipelineJobEvent.FAIL,
    PipelineJobStatus.CANCELLED: PipelineJobEvent.CANCEL,
}


class Stop(StrEnum):
    """How a run is ended from outside."""

    CANCEL = "cancel"
    """CANCELLED, once its work has stopped."""
    FAIL = "fail"
    """FAILED, with the reason."""
    INTERRUPT = "interrupt"
    """It stays RUNNING, for another to go on with."""


class AsyncPipelineOrchestrator:
    """Runs one job that its caller has claimed."""

    def __init__(
        self,
        pipeline: Definition,
        record: PipelineRecord,
        store: PipelineStore,
        blobs: Blobs,
        clock: Clock,
        *,
        tell: Tell | None = None,
        spread: Spread | None = None,
        options: RunOptions = DEFAULTS,
        calls: Calls | None = None,
    ) -> None:
        self._pipeline, self._record, self._store = pipeline, record, store
        self._blobs, self._clock, self._options = blobs, clock, options
        self._tell: Tell = tell or Silent()
        self._spread, self._calls = spread, calls
        self._token = Token()
        self._stopping: tuple[Stop, str] | None = None
        self._stage: StageRun | None = None
        self._runner: ItemRunner | None = None
        self._checkpoint: Checkpoint | None = None
        self._errors: list[StageError] = list(record.errors)
        self._abandoned: list[Callable[[], tuple[str, ...]]] = []

    # -- from outside -------------------------------------------------------------

    async def run(self) -> PipelineRecord:
        """The record as it ended. Raises Interrupted after `Stop.INTERRUPT`, Superseded when
        another run has taken over, Unavailable when the store is lost: then it can be resumed.
        """
        running = asyncio.ensure_future(self._run())
        given_up = False
        while not running.done():
            try:
                await asyncio.wait((running,))
            except asyncio.CancelledError:
                given_up = given_up or self._stopping is None
                self.stop(Stop.CANCEL, "its task was cancelled")
                if self._stage is not None and not given_up:
                    self._stage.hurry()
        if given_up:
            running.exception()
            raise asyncio.CancelledError
        return running.result()

    def stop(self, how: Stop, reason: str) -> None:
        """End it soon. Of several wishes the first counts."""
        if self._stopping is None:
            self._stopping = how, reason or str(how)
            self._token.request(reason or str(how))
            if self._stage is not None:
                self._stage.halt(_HALTS[how], reason)

    # -- the seed's names ---------------------------------------------------------

    async def _check_cancelled(self) -> bool:
        """Whether it is to end: asked before every stage."""
        if self._stopping is None:
            record = await self._store.get(self._record.id)
            if record is not None and record.cancel_requested:
                self.stop(Stop.CANCEL, "Job was cancelled")
        return self._stopping is not None

    def _build_cancelled_result(self) -> None:
        """Gather what a cancelled job ends with: the stage that ran was cut short."""
        assert self._stopping is not None
        self._errors.append(StageError(self._current or ORCHESTRATOR, self._stopping[1], CANCELLED))
        self._cut_short("cancelled")
        self._gather_end(PipelineJobStatus.CANCELLED)

    def _determine_overall_status(self) -> PipelineJobStatus:
        return status.overall(self._pipeline.policy, self._saved.stages)

    # -- the run ------------------------------------------------------------------

    async def _run(self) -> PipelineRecord:
        self._checkpoint = checkpoint = Checkpoint(
            self._record, self._store, self._clock, self._options, self._tell, self._heard
        )
        upkeep = asyncio.ensure_future(self._look_after())
        try:
            await self._go()
        except IllegalMove:
            return await self._ended_elsewhere()
        finally:
            upkeep.cancel()
            await checkpoint.close()
            if self._runner is not None:
                await self._runner.close()
        record = await self._store.get(self._record.id)
        assert record is not None
        await self._call_hooks(record)
        return record

    async def _go(self) -> None:
        """To the end of the job, or to where it is left."""
        failure: Exception | None = None
        try:
            await self._begin()
            await self._run_stages()
        except (Superseded, Unavailable, IllegalMove, asyncio.CancelledError):
            raise
        except Exception as error:
            failure = error
        if failure is None and self._stopping is not None and self._stopping[0] is Stop.INTERRUPT:
            await self._give_back()
            raise Interrupted(self._stopping[1])
        if self._saved.is_moving:  # nothing was run: its start is not written yet
            await self._saved.commit()
        self._finish(failure)
        await self._saved.commit()

    def _finish(self, failure: Exception | None) -> None:
        """Gather the end."""
        if failure is not None:
            self._fail(failure)
        elif self._stopping is None:
            try:
                self._gather_end(self._determine_overall_status())
            except Exception as error:
                self._fail(error)
        elif self._stopping[0] is Stop.CANCEL:
            self._build_cancelled_result()
        else:
            reason = self._stopping[1]
            self._errors.append(StageError(self._current or ORCHESTRATOR, reason, STALE))
            self._cut_short(reason)
            self._gather_end(PipelineJobStatus.FAILED)

    async def _begin(self) -> None:
        checkpoint, pipeline = self._saved, self._pipeline
        if self._record.status is PipelineJobStatus.PENDING:
            checkpoint.move(PipelineJobEvent.EXECUTE)
            checkpoint.note_start()
            checkpoint.happened(
                PipelineEventKind.JOB_START,
                {"pipeline": pipeline.name, "stages": list(pipeline.stages)},
            )
        self._runner = ItemRunner(
            pipeline,
            self._record,
            self._store,
            self._blobs,
            self._clock,
            self._token,
            self._tell,
            self._options,
            calls=self._calls,
        )
        self._abandoned.append(self._runner.calls.abandoned)
        self._runner.scope.on_progress = self._progressed
        self._runner.scope.on_emit = self._emitted
        for stage in await self._prepared():
            checkpoint.put(stage)
        checkpoint.set(fingerprint=pipeline.fingerprint)
        self._reuse = await self._reused()
        if self._record.cancel_requested:
            self.stop(Stop.CANCEL, "Job was cancelled")

    async def _prepared(self) -> tuple[StageRecord, ...]:
        record, pipeline = self._record, self._pipeline
        if pipeline.on_change is OnChange.RESTART and resume.is_changed(record, pipeline):
            self._tell.log("the pipeline was changed: every stage is run again", level="warning")
            names = [stage.name for stage in record.stages]
            await self._store.forget_stages(record.id, record.fence, names)
            self._saved.drop(names)
            return resume.first_stages(pipeline)
        return resume.stages_to_go_on(record, pipeline)

    async def _reused(self) -> Reuse | None:
        if self._record.retry_of is None:
            return None
        before = await self._store.get(self._record.retry_of)
        return None if before is None else Reuse(before, self._store, self._options.page)

    async def _run_stages(self) -> None:
        runner, last = self._runner, next(reversed(self._pipeline.stages))
        assert runner is not None
        for name, stage in self._pipeline.stages.items():
            if self._saved.stage(name).is_final:
                await runner.scope.know(name)
            else:
                await self._run_stage(stage)
                if self._stopping is not None:
                    return
            if name == (self._pipeline.summary_after or last):
                self._saved.set(summary=summary.summarise(self._saved.record, self._clock.now()))

    async def _run_stage(self, stage: Stage) -> None:
        checkpoint, runner = self._saved, self._runner
        assert runner is not None
        try:
            skip = skip_of(stage, runner.scope.config, self._by_name())
        except Exception as error:
            self._end_stage(stage.name, StageStatus.FAILED, f"its flag failed: {error}")
            return
        if skip is not None:
            checkpoint.change(stage.name, counted=skip.counted and stage.info.counts)
            self._end_stage(stage.name, StageStatus.SKIPPED, skip.reason)
            return
        if await self._check_cancelled():
            return
        await self._start_stage(stage)
        await checkpoint.commit()
        if self._stopping is not None:  # the write brought the news
            checkpoint.change(stage.name, status=StageStatus.PENDING, started_at=None)
            return
        await self._perform(stage, runner)

    async def _start_stage(self, stage: Stage) -> None:
        checkpoint, name = self._saved, stage.name
        known = checkpoint.stage(name)
        checkpoint.change(
            name,
            status=StageStatus.RUNNING,
            started_at=self._clock.now() if known.started_at is None else known.started_at,
        )
        checkpoint.set(current_stage=name)
        checkpoint.happened(PipelineEventKind.STAGE_START, {"stage": name, "index": known.index})
        if stage.info.kind is StageKind.STEP and not known.listed:
            item = ItemRecord(seq=0, key="")
            if self._reuse is not None:
                before = [one for one in checkpoint.stages if one.index < known.index]
                item = await self._reuse.step(stage, tuple(before)) or item
            checkpoint.listed(name, [item])
            if self._reuse is not None and item.reused:
                checkpoint.tally(name).go_on_from(self._reuse.counted(stage))
            checkpoint.change(name, listed=True)
        checkpoint.tally(name).begin()
        self._tell.progress(self._fraction(name, 0.0), name)

    async def _perform(self, stage: Stage, runner: ItemRunner) -> None:
        self._stage = one = StageRun(
            stage,
            runner,
            self._saved,
            self._store,
            self._clock,
            self._options,
            spread=self._spread,
            reuse=self._reuse,
            grace=self._pipeline.cancel_grace,
        )
        self._abandoned.append(one.abandoned)
        if self._stopping is not None:
            one.halt(_HALTS[self._stopping[0]], self._stopping[1])
        try:
            await one.run()
        except StageFailed as failure:
            self._errors.append(StageError(stage.name, bounded(str(failure)), failure.code))
            self._end_stage(stage.name, StageStatus.FAILED, str(failure))
            return
        finally:
            self._stage = None
        if self._stopping is None:
            self._conclude(stage)

    def _conclude(self, stage: Stage) -> None:
        """How a stage ended, by its items."""
        info, tally = stage.info, self._saved.tally(stage.name)
        ended = status.stage_status(
            ok=tally.ok,
            failed=tally.failed,
            skipped=tally.skipped,
            total=tally.total,
            min_ok=info.min_ok,
            max_failed=info.max_failed,
            errors=0 if tally.failed or tally.skipped else len(tally.errors),
        )
        reason = ""
        if ended is StageStatus.SKIPPED:
            reason = "breaker_open"
        elif ended is StageStatus.FAILED:
            reason = _why_failed(stage, tally.ok, tally.failed, tally.total)
        self._errors += [StageError(stage.name, error) for error in tally.errors[:_ITEM_ERRORS]]
        self._saved.change(stage.name, empty=not tally.total)
        self._end_stage(stage.name, ended, reason)

    def _end_stage(self, name: str, ended: StageStatus, reason: str = "") -> None:
        checkpoint = self._saved
        tally = checkpoint.tally(name)
        tally.stand_still()
        if tally.fan is not None and self._runner is not None:
            self._runner.scope.fans[name] = tally.fan
        finished = None if ended is StageStatus.SKIPPED and not tally.total else self._clock.now()
        checkpoint.change(name, status=ended, reason=bounded(reason, 500), finished_at=finished)
        record = checkpoint.stage(name)
        data = {
            **progress_of(record),
            "reason": record.reason,
            "duration_ms": record.duration_ms,
            "metrics": record.metrics,
            "errors": list(record.errors),
        }
        checkpoint.happened(PipelineEventKind.STAGE_COMPLETE, data)
        if self._errors:
            checkpoint.set(errors=tuple(self._errors))
        self._tell.progress(self._fraction(name, 1.0), f"{name} {ended}")

    # -- the end ------------------------------------------------------------------

    def _gather_end(self, ended: PipelineJobStatus) -> None:
        checkpoint, now = self._saved, self._clock.now()
        names = dict.fromkeys(name for left in self._abandoned for name in left())
        if names:
            checkpoint.set(abandoned_items=tuple(names))
        if self._errors:
            checkpoint.set(errors=tuple(self._errors))
        record = replace(checkpoint.record, status=ended, finished_at=now)
        found = self._alerts(record)
        checkpoint.set(alerts=found, summary=summary.closed(record.summary, record, found))
        checkpoint.move(_ENDS[ended])
        checkpoint.happened(
            PipelineEventKind.JOB_COMPLETE,
            {
                "status": str(ended),
                "stage_progress": {stage.name: progress_of(stage) for stage in record.stages},
                "errors": msgspec.to_builtins(list(record.errors)),
                "alerts": [alert.code for alert in found],
            },
        )

    def _alerts(self, record: PipelineRecord) -> tuple[Alert, ...]:
        try:
            return alerts.evaluate(self._pipeline.alerts, record)
        except Exception as error:
            self._tell.log(f"the alert rules could not be evaluated: {error!r}", level="error")
            return ()

    def _cut_short(self, reason: str) -> None:
        """What had not ended when the job was stopped."""
        for stage in self._saved.stages:
            if stage.status is StageStatus.RUNNING:
                ended = StageStatus.PARTIAL if stage.ok else StageStatus.FAILED
                self._end_stage(stage.name, ended, reason)
            elif stage.status is StageStatus.PENDING:
                self._saved.change(stage.name, status=StageStatus.SKIPPED, reason=reason)

    def _fail(self, error: Exception) -> None:
        """The orchestrator itself went wrong."""
        stage, code = ORCHESTRATOR, type(error).__name__
        if isinstance(error, resume.DefinitionChanged):
            stage, code = error.stage, resume.DEFINITION_CHANGED
        self._errors.append(StageError(stage, bounded(str(error) or code), code))
        self._tell.log(f"the run failed: {error!r}", level="error")
        self._cut_short("the orchestrator failed")
        self._gather_end(PipelineJobStatus.FAILED)

    async def _give_back(self) -> None:
        """Leave it, so that another can go on at once."""
        if self._options.lease is not None:
            self._saved.set(lease_until=self._clock.now())
        await self._saved.commit()

    async def _ended_elsewhere(self) -> PipelineRecord:
        record = await self._store.get(self._record.id)
        if record is None or not record.is_final:
            raise IllegalMove("pipeline job", str(record and record.status), "execute")
        return record

    async def _call_hooks(self, record: PipelineRecord) -> None:
        """After the end is written. What goes wrong in them is told and changes nothing."""
        if self._pipeline.on_alert is not None:
            for alert in record.alerts:
                await self._call_hook(self._pipeline.on_alert, record, alert)
        if self._pipeline.on_end is not None:
            await self._call_hook(self._pipeline.on_end, record)

    async def _call_hook(
        self, hook: Callable[..., Any], record: PipelineRecord, *more: Alert
    ) -> None:
        try:
            if inspect.isawaitable(answer := hook(record, *more)):
                await answer
        except Exception as error:
            self._tell.log(f"a hook of {self._pipeline.name} failed: {error!r}", level="error")

    # -- while it runs ------------------------------------------------------------

    @property
    def _saved(self) -> Checkpoint:
        assert self._checkpoint is not None
        return self._checkpoint

    _reuse: Reuse | None = None

    @property
    def _current(self) -> str | None:
        return self._saved.record.current_stage

    def _by_name(self) -> dict[str, StageRecord]:
        return {stage.name: stage for stage in self._saved.stages}

    def _heard(self, saved: Saved) -> None:
        if saved.cancel_requested:
            self.stop(Stop.CANCEL, "Job was cancelled")

    def _progressed(self, stage: str, fraction: float | None, message: str) -> None:
        self._saved.touch()
        self._news = stage, fraction, message
        self._tell.progress(self._fraction(stage, fraction), message)

    _news: tuple[str, float | None, str] | None = None

    def _emitted(self, stage: str, key: str, data: dict[str, Any]) -> None:
        self._saved.happened(PipelineEventKind.CUSTOM, {"stage": stage, "key": key, "data": data})
        self._saved.wake()

    def _fraction(self, stage: str, part: float | None) -> float:
        names = list(self._pipeline.stages)
        if stage not in names:
            return 1.0
        return (names.index(stage) + min(max(part or 0.0, 0.0), 1.0)) / len(names)

    async def _look_after(self) -> None:
        """Keep the lease, write down that a long call lives, and see whether it is stuck."""
        while True:
            await self._clock.sleep(self._look_every())
            if self._news is not None:
                stage, fraction, message = self._news
                self._news = None
                data = {"stage": stage, "fraction": fraction, "message": message}
                self._saved.happened(PipelineEventKind.STAGE_PROGRESS, data)
                self._saved.wake()
            elif self._options.lease is not None:
                self._saved.wake()
            self._look_at_time()

    def _look_every(self) -> float:
        options, stale = self._options, self._pipeline.stale_after
        every = options.heartbeat if options.lease is None else options.lease / 3
        limits = [limit / 4 for limit in (stale, self._pipeline.timeout) if limit is not None]
        return max(0.01, min(every, *limits)) if limits else every

    def _look_at_time(self) -> None:
        pipeline, now = self._pipeline, self._clock.monotonic()
        name = self._current
        limit = pipeline.stale_after
        if limit is not None:
            own = pipeline.stages[name].info.timeout if name in pipeline.stages else None
            if now - self._saved.progress_at > max(limit, own or 0.0):
                self.stop(Stop.FAIL, STALE_MESSAGE)
        started = self._saved.record.started_at
        most = pipeline.timeout
        if most is not None and started is not None and self._clock.now() - started > most:
            self.stop(Stop.FAIL, f"the job took longer than its {most:g} s")


_HALTS = {
    Stop.CANCEL: Halt.CANCEL,
    Stop.FAIL: Halt.CANCEL,
    Stop.INTERRUPT: Halt.INTERRUPT,
}


def _why_failed(stage: Stage, ok: int, failed: int, total: int) -> str:
    info = stage.info
    if info.kind is StageKind.STEP:
        return ""
    if ok < info.min_ok:
        return f"{ok} of {total} items succeeded; {info.min_ok} must"
    if info.max_failed is not None and failed > info.max_failed * total:
        return f"{failed} of {total} items failed; at most {info.max_failed:.0%} may"
    return "no item succeeded"
