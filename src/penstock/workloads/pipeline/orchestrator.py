"""Runs one attempt of a run: its stages, one after the other, to an honest end.

The end of a stage and the beginning of the next are one checkpoint, and that is durable before
anything of the next one runs; so whenever the process dies, the rows say what is left to do.
Before every stage it is checked whether the run is to be cancelled. There is one end, and it is
written in one piece: status, errors, summary and alerts. The end of the job follows it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from penstock.core.errors import Superseded
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.executor import Interrupted
from penstock.workloads.pipeline import reuse, status, summary
from penstock.workloads.pipeline.context import RunScope
from penstock.workloads.pipeline.definition import Definition, Stage
from penstock.workloads.pipeline.distributed import DistributedItems
from penstock.workloads.pipeline.items import ItemRunner
from penstock.workloads.pipeline.records import (
    STALE_MESSAGE,
    Alert,
    OnChange,
    PipelineRecord,
    StageKind,
    StageRecord,
    StageStatus,
)
from penstock.workloads.pipeline.retrying import CANCELLED, bounded
from penstock.workloads.pipeline.reuse import Reuse
from penstock.workloads.pipeline.rows import STALE, WAS_CANCELLED, RunState, cut_short, emit_note
from penstock.workloads.pipeline.run_log import RunLog, Write, report_from
from penstock.workloads.pipeline.stage_run import StageFailed, StageRun, Stop
from penstock.workloads.pipeline.status import skip_of

WhenCancelled = Callable[[], tuple[Stop, str]]
"""How to stop a run whose task is cancelled, and why."""
ORCHESTRATOR = "orchestrator"
BREAKER_OPEN = "breaker_open"
_ITEM_ERRORS = 3
_LONGEST_REASON = 500
_SOON = 0.01
_RECORDED_EVERY = 60.0
"""Seconds between rows that tell of progress."""
_NOTHING_DONE: dict[str, Any] = {
    **dict.fromkeys(("done", "ok", "failed", "skipped", "reused", "output_count"), 0),
    "metrics": {},
    "errors": (),
}


class AsyncPipelineOrchestrator:
    """Runs one attempt of a run."""

    _reuse: Reuse | None = None
    _stage: StageRun | None = None
    _stopping: tuple[Stop, str] | None = None

    def __init__(
        self,
        scope: RunScope,
        state: RunState | None,
        write: Write,
        distributed: DistributedItems | None = None,
    ) -> None:
        """`state` is what earlier attempts left; `write` adds to the rows of its job."""
        self._scope, self._distributed = scope, distributed
        self._pipeline, self._record, self._rows = scope.pipeline, scope.record, scope.rows
        self._clock, self._ctx = scope.clock, scope.context
        self._log = RunLog(scope, state or RunState(), write)
        self._log.when_broken = self._stop_at_once
        self._runner = ItemRunner(scope)
        scope.on_progress, scope.on_emit = self._progressed, self._emitted
        scope.stage = self._log.stage
        self._positions = {name: index for index, name in enumerate(scope.pipeline.stages)}
        self._late_at = float("inf")
        """When it must have ended. Monotonic."""
        self._is_fresh = scope.record.attempt <= 1
        """Whether no stage of it has ended: then nothing that was done waits to be written."""

    # -- from outside -------------------------------------------------------------

    async def run(self, when_cancelled: WhenCancelled) -> PipelineRecord:
        """The record as it ended. Raises Interrupted after `Stop.INTERRUPT`, and Superseded when
        another attempt has taken over. Cancelling it stops the run in the way that
        `when_cancelled` says; the end is waited for.
        """
        running = asyncio.ensure_future(self._run())
        while not running.done():
            try:
                await asyncio.wait((running,))
            except asyncio.CancelledError:
                self.stop(*when_cancelled())
        return running.result()

    def stop(self, how: Stop, reason: str) -> None:
        """End it soon. Of several requests the first counts."""
        if self._stopping is None:
            self._stopping = how, reason or str(how)
            if self._stage is not None:
                if self._stage.halted is Stop.LOST:
                    self._stage.hurry()
                self._stage.halt(how, reason)

    @property
    def state(self) -> RunState:
        """The run's own row, as it is by now."""
        return self._log.state

    # -- the seed's names ---------------------------------------------------------

    async def _check_cancelled(self) -> bool:
        """Whether it is to end: checked before every stage."""
        return self._stopping is not None

    def _build_cancelled_result(self) -> None:
        """Gather what a cancelled run ends with: the stage that ran was cut short."""
        reason = self._stopping[1] if self._stopping is not None else WAS_CANCELLED
        self._end_early(PipelineJobStatus.CANCELLED, reason, CANCELLED, "cancelled")

    def _determine_overall_status(self) -> PipelineJobStatus:
        return status.overall(self._pipeline.policy, self._log.stages)

    # -- the run ------------------------------------------------------------------

    async def _run(self) -> PipelineRecord:
        watchdog = asyncio.ensure_future(self._watch())
        try:
            await self._go()
        finally:
            watchdog.cancel()
            await self._log.close()
            await self._runner.close()
        return self._log.record

    async def _go(self) -> None:
        """To the end of the run, or to where it is left."""
        failure: Exception | None = None
        try:
            await self._begin()
            await self._run_stages()
        except Superseded:
            raise
        except Exception as error:
            failure = error
        if failure is None and self._stopping is not None and self._stopping[0] is Stop.INTERRUPT:
            await self._log.write()
            raise Interrupted(self._stopping[1])
        self._finish(failure)
        await self._log.write()

    async def _begin(self) -> None:
        pipeline, log = self._pipeline, self._log
        if (limit := pipeline.timeout) is not None:
            began = self._record.started_at or self._clock.now()
            self._late_at = self._clock.monotonic() + began + limit - self._clock.now()
        log.put_all(self._prepared())
        if not self._is_fresh:
            await self._take_up_output()
            for stage in log.stages:
                if stage.status is StageStatus.RUNNING:
                    await self._take_up(stage)
        log.set(fingerprint=pipeline.fingerprint)
        self._reuse = await self._reused()

    def _prepared(self) -> tuple[StageRecord, ...]:
        record, pipeline = self._record, self._pipeline
        if self._is_fresh:
            return record.stages
        if pipeline.on_change is OnChange.RESTART and reuse.is_changed(record, pipeline):
            self._ctx.log("the pipeline was changed: every stage is run again", level="warning")
            return reuse.stages_anew(record, pipeline)
        return reuse.stages_to_go_on(record, pipeline)

    async def _take_up_output(self) -> None:
        """What the last step returned that succeeded in an earlier attempt."""
        steps = [one for one in self._log.stages if one.kind is StageKind.STEP and one.ok]
        if steps and (rows := await self._rows.ended(steps[-1], limit=1)) and rows[0].output:
            self._log.state.output = rows[0].output

    async def _take_up(self, stage: StageRecord) -> None:
        """A stage that an earlier attempt left. Its counters are made from its items; one that was
        not listed to the end is listed anew."""
        anew = {} if stage.listed else {"total": 0, "generation": stage.generation + 1}
        self._log.put(replace(stage, **_NOTHING_DONE, **anew))
        if not stage.listed:
            return
        if (report := await self._rows.list_report(stage)) is not None:
            self._log.report(stage.name, report)
        after = -1
        while rows := await self._rows.ended(stage, after=after):
            self._log.recount(stage.name, rows)
            after = rows[-1].n
            if stage.kind is StageKind.STEP and rows[-1].output:
                self._log.state.output = rows[-1].output

    async def _reused(self) -> Reuse | None:
        if self._record.retry_of is None:
            return None
        before = self._rows.of_run(self._record.retry_of)
        _, stages, _ = await before.head()
        return Reuse(stages, before, self._scope.options.page)

    # -- stages -------------------------------------------------------------------

    async def _run_stages(self) -> None:
        for name, stage in self._pipeline.stages.items():
            if not self._log.known[name].is_final:
                await self._run_stage(stage)
                if self._stopping is not None:
                    return
            self._scope.output_counts[name] = self._log.known[name].output_count
            if name == self._pipeline.summary_after:
                self._log.set(summary=summary.summarise(self._log.record, self._clock.now()))
        self._ctx.progress(1.0, "all stages have ended")

    async def _run_stage(self, stage: Stage) -> None:
        log, name = self._log, stage.name
        try:
            skip = skip_of(stage, self._scope.config, log.known)
        except Exception as error:
            self._fail_stage(stage, f"its flag failed: {error}", type(error).__name__)
            return
        if skip is not None:
            counted = skip.counted and stage.info.counts
            self._end_stage(name, StageStatus.SKIPPED, skip.reason, counted=counted)
            return
        if await self._check_cancelled():
            return
        before = log.known[name]
        await self._start_stage(stage)
        # What an earlier attempt did is durable already, and so is the acceptance of the job.
        if not self._is_fresh:
            await log.write()
        if self._stopping is not None:
            log.put(before)
            return
        await self._perform(stage)

    async def _start_stage(self, stage: Stage) -> None:
        log, name = self._log, stage.name
        known = log.known[name]
        started = self._clock.now() if known.started_at is None else known.started_at
        is_new_step = stage.info.kind is StageKind.STEP and not known.listed
        # A step is a stage of one item, and has no row in the list.
        listing = {"total": 1, "listed": True} if is_new_step else {}
        log.begin(name, started_at=started, **listing)
        log.state.current_stage = name
        log.note(f"stage_start {name}")
        if is_new_step and self._reuse is not None:
            before = tuple(one for one in log.known.values() if one.index < known.index)
            if (item := await self._reuse.step(stage, before)) is not None:
                report = report_from(self._reuse.counted(stage))
                log.end(name, item, report)
                log.state.output = item.output
        self._tell_progress(name, 0.0, name)

    async def _perform(self, stage: Stage) -> None:
        one = StageRun(stage, self._runner, self._log, self._distributed, self._reuse)
        self._stage = one
        try:
            await one.run()
        except StageFailed as failure:
            self._fail_stage(stage, str(failure), failure.code)
            return
        finally:
            self._stage = None
        self._log.check()
        if stage.info.kind is StageKind.STEP and one.output:
            self._log.state.output = one.output
        if self._stopping is None:
            self._conclude(stage)

    def _fail_stage(self, stage: Stage, reason: str, code: str) -> None:
        self._log.add_error(stage.name, reason, code)
        self._end_stage(stage.name, StageStatus.FAILED, reason)

    def _conclude(self, stage: Stage) -> None:
        """A stage ended by its items."""
        info, now = stage.info, self._log.known[stage.name]
        ended = status.stage_status(
            ok=now.ok,
            failed=now.failed,
            skipped=now.skipped,
            total=now.total,
            min_ok=info.min_ok,
            max_failed=info.max_failed,
            errors=0 if now.failed or now.skipped else len(now.errors),
        )
        reason = BREAKER_OPEN if ended is StageStatus.SKIPPED else ""
        if ended is StageStatus.FAILED:
            reason = _why_failed(stage, now.ok, now.failed, now.total)
        for error in now.errors[:_ITEM_ERRORS]:
            self._log.add_error(stage.name, error, "")
        self._end_stage(stage.name, ended, reason, empty=not now.total)

    def _end_stage(self, name: str, ended: StageStatus, reason: str = "", **more: Any) -> None:
        now, self._is_fresh = self._log.known[name], False
        was_run = ended is not StageStatus.SKIPPED or now.total > 0
        at = self._clock.now() if was_run else None
        reason = reason and bounded(reason, _LONGEST_REASON)
        self._log.end_stage(name, ended, reason=reason, finished_at=at, **more)
        self._note_end(self._log.known[name])

    def _note_end(self, stage: StageRecord) -> None:
        said = f": {stage.ok} ok, {stage.failed} failed" if stage.total else ""
        self._log.note(f"stage_complete {stage.name} {stage.status}{said}")

    # -- the end ------------------------------------------------------------------

    def _finish(self, failure: Exception | None) -> None:
        """Gather the end."""
        if failure is not None:
            self._fail(failure)
        elif self._stopping is None:
            try:
                ended = self._determine_overall_status()
            except Exception as error:
                self._fail(error)
            else:
                self._end(ended)
        elif self._stopping[0] is Stop.CANCEL:
            self._build_cancelled_result()
        else:
            reason = self._stopping[1]
            self._end_early(PipelineJobStatus.FAILED, reason, STALE, reason)

    def _fail(self, error: Exception) -> None:
        """The orchestrator itself went wrong."""
        stage, code = ORCHESTRATOR, type(error).__name__
        if isinstance(error, reuse.DefinitionChanged):
            stage, code = error.stage, reuse.DEFINITION_CHANGED
        self._ctx.log(f"the run failed: {error!r}", level="error")
        why = str(error) or code
        self._end_early(PipelineJobStatus.FAILED, why, code, "the run failed", stage)

    def _end_early(
        self, ended: PipelineJobStatus, error: str, code: str, reason: str, stage: str = ""
    ) -> None:
        """An end before that of its stages; `reason` is theirs."""
        log, now = self._log, self._clock.now()
        log.add_error(stage or self.state.current_stage or ORCHESTRATOR, error, code)
        for before in log.stages:
            if not before.is_final:
                after = cut_short(before, now, bounded(reason, _LONGEST_REASON))
                log.put(after)
                if before.status is StageStatus.RUNNING:
                    self._note_end(after)
        self._end(ended)

    def _end(self, ended: PipelineJobStatus) -> None:
        """The one end: status, summary and alerts."""
        log, now = self._log, self._clock.now()
        if names := self._runner.calls.abandoned():
            log.set(abandoned_items=names)
        record = replace(log.record, status=ended, finished_at=now)
        found = self._alerts(record)
        made = summary.closed(record, found)
        log.set(status=ended, alerts=found, summary=made)

    def _alerts(self, record: PipelineRecord) -> tuple[Alert, ...]:
        try:
            return summary.evaluate(self._pipeline.alerts, record)
        except Exception as error:
            self._ctx.log(f"the alert rules could not be evaluated: {error!r}", level="error")
            return ()

    def _stop_at_once(self) -> None:
        """Nothing can be written any more: another attempt has the run."""
        if self._stage is not None:
            self._stage.halt(Stop.LOST, "its run can't be recorded any more")

    # -- progress and the watchdog ------------------------------------------------

    def _progressed(self, stage: str, fraction: float | None, message: str) -> None:
        """A call reports how far it is. From any thread."""
        self._log.touch()
        self._tell_progress(stage, fraction or 0.0, message)

    def _emitted(self, stage: str, key: str, data: bytes) -> None:
        """A stage sends an event of its own."""
        self._log.note(emit_note(stage, key, data.decode()))
        self._log.wake()

    def _tell_progress(self, stage: str, part: float, message: str) -> None:
        """How far the run is, if every stage is as long as the others."""
        position = self._positions[stage] + min(max(part, 0.0), 1.0)
        self._ctx.progress(position / len(self._positions), message)

    async def _watch(self) -> None:
        """Tell of progress, and end a run that gets nowhere or takes too long."""
        told, recorded = -1, self._log.progress_at
        while True:
            left = min(self._until_stale(), self._late_at - self._clock.monotonic())
            if left <= 0:
                late = self._late_at <= self._clock.monotonic()
                limit = f"the run took longer than its {self._pipeline.timeout:g} s" if late else ""
                self.stop(Stop.FAIL, limit or STALE_MESSAGE)
                return
            await self._clock.sleep(min(left + _SOON, self._scope.options.progress_every))
            if self._log.progress_at > recorded + _RECORDED_EVERY:
                # What calls report is not a row; without one, the run looks stuck from outside.
                recorded = self._log.progress_at
                self._log.set()
            self._log.flush()  # such as the start of the first stage, which nobody waits for
            name = self.state.current_stage
            if name is not None and self._stage is not None:
                stage = self._log.known[name]
                if stage.total > 1 and stage.done != told:
                    told = stage.done
                    text = f"{name}: {told} of {stage.total}"
                    self._tell_progress(name, told / stage.total, text)

    def _until_stale(self) -> float:
        """Seconds until it counts as stuck; a call may take as long as it was given."""
        limit = self._pipeline.stale_after
        if limit is None:
            return float("inf")
        stage = self._pipeline.stages.get(self.state.current_stage or "")
        if stage is not None:
            limit = max(limit, stage.info.timeout or 0.0)
        return self._log.progress_at + limit - self._clock.monotonic()


async def call_hooks(
    pipeline: Definition, record: PipelineRecord, report: Callable[[str], None]
) -> None:
    """After the end is durable. What goes wrong in them is reported, and changes nothing."""
    calls = [(pipeline.on_alert, (record, alert)) for alert in record.alerts]
    for hook, arguments in (*calls, (pipeline.on_end, (record,))):
        try:
            if hook is not None and inspect.isawaitable(answer := hook(*arguments)):
                await answer
        except Exception as error:
            report(f"a hook of the pipeline failed: {error!r}")


def _why_failed(stage: Stage, ok: int, failed: int, total: int) -> str:
    info = stage.info
    if info.kind is StageKind.STEP:
        return ""
    if ok < info.min_ok:
        return f"{ok} of {total} items succeeded; {info.min_ok} must"
    if info.max_failed is not None and failed > info.max_failed * total:
        return f"{failed} of {total} items failed; at most {info.max_failed:.0%} may"
    return "no item succeeded"
