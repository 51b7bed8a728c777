"""How stages, and then the job, end: what is gathered for the write that says so."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from penstock.lifecycles.pipeline import PipelineJobEvent, PipelineJobStatus
from penstock.ports.clock import Clock
from penstock.workloads.pipeline import alerts, status, summary
from penstock.workloads.pipeline.checkpoint import Checkpoint
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.options import Tell
from penstock.workloads.pipeline.records import (
    Alert,
    PipelineEventKind,
    PipelineRecord,
    StageError,
    StageKind,
    StageStatus,
)
from penstock.workloads.pipeline.retrying import bounded
from penstock.workloads.pipeline.stage import Stage
from penstock.workloads.pipeline.summary import ending_of, progress_of

BREAKER_OPEN = "breaker_open"
_ITEM_ERRORS = 3
_LONGEST_REASON = 500
_MOVES = {
    PipelineJobStatus.COMPLETED: PipelineJobEvent.COMPLETE,
    PipelineJobStatus.PARTIAL: PipelineJobEvent.COMPLETE_PARTLY,
    PipelineJobStatus.FAILED: PipelineJobEvent.FAIL,
    PipelineJobStatus.CANCELLED: PipelineJobEvent.CANCEL,
}


class Closing:
    """Gathers the ends of one run. Writes nothing itself."""

    def __init__(
        self, pipeline: Definition, checkpoint: Checkpoint, clock: Clock, tell: Tell
    ) -> None:
        self._pipeline, self._checkpoint = pipeline, checkpoint
        self._clock, self._tell = clock, tell
        self._errors: list[StageError] = list(checkpoint.record.errors)

    # -- a stage ------------------------------------------------------------------

    def complain(self, stage: str, message: str, code: str) -> None:
        """An error of the job."""
        self._errors.append(StageError(stage, bounded(message), code))
        self._checkpoint.set(errors=tuple(self._errors))

    def conclude(self, stage: Stage) -> None:
        """A stage ended by its items."""
        info, tally = stage.info, self._checkpoint.tally(stage.name)
        ended = status.stage_status(
            ok=tally.ok,
            failed=tally.failed,
            skipped=tally.skipped,
            total=tally.total,
            min_ok=info.min_ok,
            max_failed=info.max_failed,
            errors=0 if tally.failed or tally.skipped else len(tally.errors),
        )
        reason = BREAKER_OPEN if ended is StageStatus.SKIPPED else ""
        if ended is StageStatus.FAILED:
            reason = _why_failed(stage, tally.ok, tally.failed, tally.total)
        for error in tally.errors[:_ITEM_ERRORS]:
            self.complain(stage.name, error, "")
        self._checkpoint.change(stage.name, empty=not tally.total)
        self.end_stage(stage.name, ended, reason)

    def end_stage(self, name: str, ended: StageStatus, reason: str = "") -> None:
        checkpoint = self._checkpoint
        tally = checkpoint.tally(name)
        tally.stand_still()
        was_run = ended is not StageStatus.SKIPPED or tally.total > 0
        checkpoint.change(
            name,
            status=ended,
            reason=bounded(reason, _LONGEST_REASON),
            finished_at=self._clock.now() if was_run else None,
        )
        record = checkpoint.stage(name)
        data = {
            **progress_of(record),
            "reason": record.reason,
            "duration_ms": record.duration_ms,
            "metrics": record.metrics,
            "errors": list(record.errors),
        }
        checkpoint.happened(PipelineEventKind.STAGE_COMPLETE, data)

    def cut_short(self, reason: str) -> None:
        """What had not ended when the job was stopped."""
        for stage in self._checkpoint.stages:
            if stage.status is StageStatus.RUNNING:
                ended = StageStatus.PARTIAL if stage.ok else StageStatus.FAILED
                self.end_stage(stage.name, ended, reason)
            elif stage.status is StageStatus.PENDING:
                reason = bounded(reason, _LONGEST_REASON)
                self._checkpoint.change(stage.name, status=StageStatus.SKIPPED, reason=reason)

    # -- the job ------------------------------------------------------------------

    def end_job(self, ended: PipelineJobStatus, abandoned: Iterable[str]) -> None:
        """The one end: status, summary, alerts and the last event."""
        checkpoint, now = self._checkpoint, self._clock.now()
        if names := tuple(dict.fromkeys(abandoned)):
            checkpoint.set(abandoned_items=names)
        record = replace(checkpoint.record, status=ended, finished_at=now)
        found = self._alerts(record)
        checkpoint.set(alerts=found, summary=summary.closed(record.summary, record, found))
        checkpoint.move(_MOVES[ended])
        checkpoint.happened(
            PipelineEventKind.JOB_COMPLETE, ending_of(replace(record, alerts=found))
        )

    def _alerts(self, record: PipelineRecord) -> tuple[Alert, ...]:
        try:
            return alerts.evaluate(self._pipeline.alerts, record)
        except Exception as error:
            self._tell.log(f"the alert rules could not be evaluated: {error!r}", level="error")
            return ()


async def call_hooks(pipeline: Definition, record: PipelineRecord, tell: Tell) -> None:
    """After the end is written. What goes wrong in them is told, and changes nothing."""
    if pipeline.on_alert is not None:
        for alert in record.alerts:
            await _call(pipeline.on_alert, tell, record, alert)
    if pipeline.on_end is not None:
        await _call(pipeline.on_end, tell, record)


async def _call(hook: Callable[..., Any], tell: Tell, *arguments: Any) -> None:
    try:
        if inspect.isawaitable(answer := hook(*arguments)):
            await answer
    except Exception as error:
        tell.log(f"a hook of the pipeline failed: {error!r}", level="error")


def _why_failed(stage: Stage, ok: int, failed: int, total: int) -> str:
    info = stage.info
    if info.kind is StageKind.STEP:
        return ""
    if ok < info.min_ok:
        return f"{ok} of {total} items succeeded; {info.min_ok} must"
    if info.max_failed is not None and failed > info.max_failed * total:
        return f"{failed} of {total} items failed; at most {info.max_failed:.0%} may"
    return "no item succeeded"
