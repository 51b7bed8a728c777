"""Runs one claimed job of a pipeline: its stages, one after the other, to an honest end.

The end of a stage and the beginning of the next are one write, and that is done before
anything of the next one runs; so whenever the process dies, the record says what is left to
do. Between stages, and with every write, the store is asked whether the job is to be
cancelled. There is one end, and it is written in one piece: status, errors, summary, alerts
and the last event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum

from penstock.core.errors import IllegalMove, Superseded, Unavailable
from penstock.lifecycles.pipeline import PipelineJobEvent, PipelineJobStatus
from penstock.ports.blobs import Blobs
from penstock.ports.clock import Clock
from penstock.ports.executor import CancelToken, Interrupted
from penstock.workloads.pipeline import resume, status, summary
from penstock.workloads.pipeline.calls import Pools
from penstock.workloads.pipeline.checkpoint import Checkpoint
from penstock.workloads.pipeline.closing import Closing, call_hooks
from penstock.workloads.pipeline.definition import Definition
from penstock.workloads.pipeline.items import ItemRunner
from penstock.workloads.pipeline.listing import StageFailed
from penstock.workloads.pipeline.options import DEFAULTS, RunOptions, Silent, Spread, Tell
from penstock.workloads.pipeline.patience import patient
from penstock.workloads.pipeline.records import (
    ItemRecord,
    OnChange,
    PipelineEventKind,
    PipelineRecord,
    StageKind,
    StageRecord,
    StageStatus,
)
from penstock.workloads.pipeline.reuse import Reuse
from penstock.workloads.pipeline.skipping import skip_of
from penstock.workloads.pipeline.stage import Stage
from penstock.workloads.pipeline.stage_run import Halt, StageRun
from penstock.workloads.pipeline.store import PipelineStore, Saved
from penstock.workloads.pipeline.upkeep import Upkeep

__all__ = ["AsyncPipelineOrchestrator", "RunOptions", "Spread", "Stop", "Tell"]

ORCHESTRATOR = "orchestrator"
CANCELLED = "CANCELLED"
STALE = "STALE"
_WAS_CANCELLED = "Job was cancelled"


class Stop(StrEnum):
    """How a run is ended from outside."""

    CANCEL = "cancel"
    """CANCELLED, once its work has stopped."""
    FAIL = "fail"
    """FAILED, with the reason."""
    INTERRUPT = "interrupt"
    """It stays RUNNING, for another to go on with."""


_HALTS = {
    Stop.CANCEL: Halt.CANCEL,
    Stop.FAIL: Halt.CANCEL,
    Stop.INTERRUPT: Halt.INTERRUPT,
}


class AsyncPipelineOrchestrator:
    """Runs one job that its caller has claimed."""

    _runner: ItemRunner
    _reuse: Reuse | None = None
    _stage: StageRun | None = None
    _stopping: tuple[Stop, str] | None = None

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
        pools: Pools | None = None,
    ) -> None:
        """`pools` are threads and processes that other jobs use, too; it makes its own if none
        are given."""
        self._pipeline, self._record, self._blobs = pipeline, record, blobs
        self._store = patient(store, clock, options.store_patience)
        self._clock, self._options = clock, options
        self._tell: Tell = tell or Silent()
        self._spread, self._pools = spread, pools
        self._token = CancelToken()
        self.output = ""
        """Where the output of the last step is that ran here."""
        self._saved = Checkpoint(record, store, clock, options, self._tell, self._heard)
        self._saved.when_broken = self._stop_at_once
        self._closing = Closing(pipeline, self._saved, clock, self._tell)
        self._upkeep = Upkeep(pipeline, self._saved, clock, options, self._tell, self._give_up)
        self._abandoned: list[Callable[[], tuple[str, ...]]] = []

    # -- from outside -------------------------------------------------------------

    async def run(self) -> PipelineRecord:
        """The record as it ended. Raises Interrupted after `Stop.INTERRUPT`, Superseded when
        another run has taken over, Unavailable when the store is lost: then it can be resumed.

        Cancelling it stops the run as CANCELLED and lets the cancellation pass; where a stop was
        asked for before, it only makes that shorter.
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
                if self._stage.halted is Halt.LOST:
                    self._stage.hurry()
                self._stage.halt(_HALTS[how], reason)

    # -- the seed's names ---------------------------------------------------------

    async def _check_cancelled(self) -> bool:
        """Whether it is to end: asked before every stage."""
        if self._stopping is None:
            seen = await self._store.glance(self._record.id)
            if seen is not None and seen.cancel_requested:
                self.stop(Stop.CANCEL, _WAS_CANCELLED)
        return self._stopping is not None

    def _build_cancelled_result(self) -> None:
        """Gather what a cancelled job ends with: the stage that ran was cut short."""
        reason = self._stopping[1] if self._stopping is not None else _WAS_CANCELLED
        self._closing.complain(self._saved.current_stage or ORCHESTRATOR, reason, CANCELLED)
        self._closing.cut_short("cancelled")
        self._end(PipelineJobStatus.CANCELLED)

    def _determine_overall_status(self) -> PipelineJobStatus:
        return status.overall(self._pipeline.policy, self._saved.stages)

    # -- the run ------------------------------------------------------------------

    async def _run(self) -> PipelineRecord:
        upkeep = asyncio.ensure_future(self._upkeep.run())
        try:
            await self._go()
        except IllegalMove:
            return await self._ended_elsewhere()
        finally:
            upkeep.cancel()
            await self._saved.close()
            if hasattr(self, "_runner"):
                await self._runner.close()
        record = await self._store.get(self._record.id)
        assert record is not None
        await call_hooks(self._pipeline, record, self._tell)
        return record

    async def _go(self) -> None:
        """To the end of the job, or to where it is left."""
        failure: Exception | None = None
        try:
            await self._begin()
            await self._run_stages()
        except (Superseded, Unavailable, IllegalMove):
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

    async def _begin(self) -> None:
        saved, pipeline = self._saved, self._pipeline
        if self._record.status is PipelineJobStatus.PENDING:
            saved.move(PipelineJobEvent.EXECUTE)
            saved.note_start()
            told = {"pipeline": pipeline.name, "stages": list(pipeline.stages)}
            saved.happened(PipelineEventKind.JOB_START, told)
        self._runner = ItemRunner(
            pipeline,
            self._record,
            self._store,
            self._blobs,
            self._clock,
            self._token,
            self._tell,
            self._options,
            pools=self._pools,
        )
        self._abandoned.append(self._runner.calls.abandoned)
        self._runner.scope.on_progress = self._upkeep.progressed
        self._runner.scope.on_emit = self._upkeep.emitted
        for stage in await self._prepared():
            saved.put(stage)
        saved.set(fingerprint=pipeline.fingerprint)
        self._reuse = await self._reused()
        if self._record.cancel_requested:
            self.stop(Stop.CANCEL, _WAS_CANCELLED)

    async def _prepared(self) -> tuple[StageRecord, ...]:
        record, pipeline = self._record, self._pipeline
        if pipeline.on_change is OnChange.RESTART and resume.is_changed(record, pipeline):
            self._tell.log("the pipeline was changed: every stage is run again", level="warning")
            names = [stage.name for stage in record.stages]
            await self._store.forget_stages(record.id, record.fence, names)
            return (*resume.first_stages(pipeline), *resume.removed_stages(record, pipeline))
        return resume.stages_to_go_on(record, pipeline)

    async def _reused(self) -> Reuse | None:
        if self._record.retry_of is None:
            return None
        before = await self._store.get(self._record.retry_of)
        if before is None or before.tenant != self._record.tenant:
            return None
        return Reuse(before, self._store, self._options.page)

    # -- stages -------------------------------------------------------------------

    async def _run_stages(self) -> None:
        last = next(reversed(self._pipeline.stages))
        for name, stage in self._pipeline.stages.items():
            if not self._saved.stage(name).is_final:
                await self._run_stage(stage)
                if self._stopping is not None:
                    return
            await self._count_outputs(name)
            if name == (self._pipeline.summary_after or last):
                self._saved.set(summary=summary.summarise(self._saved.record, self._clock.now()))
        self._upkeep.tell(last, 1.0, "all stages have ended")

    async def _run_stage(self, stage: Stage) -> None:
        saved, name = self._saved, stage.name
        try:
            known = {one.name: one for one in saved.stages}
            skip = skip_of(stage, self._runner.scope.config, known)
        except Exception as error:
            self._fail_stage(stage, f"its flag failed: {error}", type(error).__name__)
            return
        if skip is not None:
            saved.change(name, counted=skip.counted and stage.info.counts)
            self._closing.end_stage(name, StageStatus.SKIPPED, skip.reason)
            return
        if await self._check_cancelled():
            return
        await self._start_stage(stage)
        await saved.commit()
        if self._stopping is not None:  # the write brought the news
            saved.change(name, status=StageStatus.PENDING, started_at=None)
            return
        await self._perform(stage)

    async def _start_stage(self, stage: Stage) -> None:
        saved, name = self._saved, stage.name
        known = saved.stage(name)
        started = self._clock.now() if known.started_at is None else known.started_at
        saved.change(name, status=StageStatus.RUNNING, started_at=started)
        saved.set(current_stage=name)
        saved.happened(PipelineEventKind.STAGE_START, {"stage": name, "index": known.index})
        if stage.info.kind is StageKind.STEP and not known.listed:
            await self._list_step(stage, known.index)
        saved.tally(name).begin()
        self._upkeep.tell(name, 0.0, name)

    async def _list_step(self, stage: Stage, index: int) -> None:
        """A step is a stage of one item."""
        saved, item = self._saved, ItemRecord(seq=0, key="")
        if self._reuse is not None:
            before = tuple(one for one in saved.stages if one.index < index)
            item = await self._reuse.step(stage, before) or item
        saved.listed(stage.name, [item])
        if self._reuse is not None and item.reused:
            saved.tally(stage.name).go_on_from(self._reuse.counted(stage))
        saved.change(stage.name, listed=True)

    async def _perform(self, stage: Stage) -> None:
        self._stage = one = StageRun(
            stage,
            self._runner,
            self._saved,
            self._store,
            self._clock,
            self._options,
            spread=self._spread,
            reuse=self._reuse,
            grace=self._pipeline.cancel_grace,
        )
        self._abandoned.append(one.abandoned)
        try:
            await one.run()
        except StageFailed as failure:
            self._fail_stage(stage, str(failure), failure.code)
            return
        finally:
            self._stage = None
        self._saved.check()
        if stage.info.kind is StageKind.STEP and one.output:
            self.output = one.output
        if self._stopping is None:
            self._closing.conclude(stage)

    def _fail_stage(self, stage: Stage, reason: str, code: str) -> None:
        self._closing.complain(stage.name, reason, code)
        self._closing.end_stage(stage.name, StageStatus.FAILED, reason)

    async def _count_outputs(self, name: str) -> None:
        """So that later stages know how many there are; most were counted as they came."""
        known, fan = self._runner.scope.fans, self._saved.tally(name).fan
        if fan is not None:
            known[name] = fan
        elif name not in known:
            await self._saved.settle()
            await self._runner.scope.know(name)

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
            self._closing.complain(self._saved.current_stage or ORCHESTRATOR, reason, STALE)
            self._closing.cut_short(reason)
            self._end(PipelineJobStatus.FAILED)

    def _fail(self, error: Exception) -> None:
        """The orchestrator itself went wrong."""
        stage, code = ORCHESTRATOR, type(error).__name__
        if isinstance(error, resume.DefinitionChanged):
            stage, code = error.stage, resume.DEFINITION_CHANGED
        self._tell.log(f"the run failed: {error!r}", level="error")
        self._closing.complain(stage, str(error) or code, code)
        self._closing.cut_short("the run failed")
        self._end(PipelineJobStatus.FAILED)

    def _end(self, ended: PipelineJobStatus) -> None:
        self._closing.end_job(ended, (name for left in self._abandoned for name in left()))

    async def _give_back(self) -> None:
        """Leave it, so that another can go on at once."""
        if self._options.lease is not None:
            self._saved.set(lease_until=self._clock.now())
        await self._saved.commit()

    async def _ended_elsewhere(self) -> PipelineRecord:
        """It was cancelled before it began."""
        record = await self._store.get(self._record.id)
        if record is None or not record.is_final:
            raise IllegalMove("pipeline job", str(record and record.status), "execute")
        return record

    # -- news ---------------------------------------------------------------------

    def _heard(self, saved: Saved) -> None:
        if saved.cancel_requested:
            self.stop(Stop.CANCEL, _WAS_CANCELLED)

    def _give_up(self, reason: str) -> None:
        self.stop(Stop.FAIL, reason)

    def _stop_at_once(self) -> None:
        """Nothing can be written any more: another has the job, or the store is lost."""
        self._token.request("its run can't be recorded any more")
        if self._stage is not None:
            self._stage.halt(Halt.LOST, self._token.reason)
