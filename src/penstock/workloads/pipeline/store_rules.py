"""What each write does to a run: the rules that every `PipelineStore` asks.

Pure, so that stores in memory and in files can't come to differ. A `Head` is the part of a
record that moves; a store reads it, asks here what becomes of it, and writes that back.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, Struct
from msgspec.structs import replace

from penstock.core.errors import Superseded
from penstock.core.machine import Step
from penstock.lifecycles.pipeline import PIPELINE, PipelineJobEvent, PipelineJobStatus
from penstock.workloads.pipeline.alerts import evaluate
from penstock.workloads.pipeline.records import (
    PipelineInfo,
    PipelineRecord,
    StageError,
    StageRecord,
    StageStatus,
    first_stages,
)
from penstock.workloads.pipeline.store import CancelAnswer, Claim, Save
from penstock.workloads.pipeline.summary import closed

_S, _E = PipelineJobStatus, PipelineJobEvent
STALE = "STALE"
"""The code of the error that a stale job ends with."""
CANCELLED = "CANCELLED"
WAS_CANCELLED = "Job was cancelled"
_LONGEST_REASON = 500


class Head(Struct, frozen=True, gc=False):
    """Where a run is."""

    status: PipelineJobStatus
    fence: int
    version: int
    cancel_requested: bool
    cancel_effective: bool | None
    current_stage: str | None
    started_at: float | None
    finished_at: float | None
    lease_until: float | None
    progress_at: float | None
    owner: str
    resumes: int

    @classmethod
    def of(cls, record: PipelineRecord) -> Head:
        return cls(*(getattr(record, name) for name in cls.__struct_fields__))

    def onto(self, record: PipelineRecord, **others: Any) -> PipelineRecord:
        return replace(record, **{n: getattr(self, n) for n in self.__struct_fields__}, **others)


def advance(job_id: str, head: Head, save: Save) -> Head | None:
    """The head after a save; None where it repeats what ended the job and changes nothing.

    Raises Superseded for another run's fence, IllegalMove for what the table does not have.
    """
    check_fence(job_id, head.fence, save.fence)
    status, event = head.status, save.event
    if event is not None:
        status = PIPELINE.after(head.status, event)
        if head.status in PIPELINE.final and PIPELINE.judge(head.status, event) is Step.REPEAT:
            return None
    ends = status in PIPELINE.final and head.status is not status
    requested = head.cancel_requested or event is _E.REQUEST_CANCEL
    effective = head.cancel_effective
    if save.cancel_effective is not UNSET:
        effective = save.cancel_effective
    elif ends and requested:
        effective = status is _S.CANCELLED
    return Head(
        status,
        head.fence,
        head.version + 1,
        requested,
        effective,
        head.current_stage if save.current_stage is UNSET else save.current_stage,
        save.at if event is _E.EXECUTE and head.started_at is None else head.started_at,
        save.at if ends else head.finished_at,
        _lease(head, save, status),
        save.at if _is_progress(save) else head.progress_at,
        head.owner,
        head.resumes,
    )


def _lease(head: Head, save: Save, status: PipelineJobStatus) -> float | None:
    if status in PIPELINE.final:
        return None
    return head.lease_until if save.lease_until is UNSET else save.lease_until


def _is_progress(save: Save) -> bool:
    """A heartbeat alone is none: it says that the runner lives, not that it gets anywhere."""
    return bool(
        save.event
        or save.stages
        or save.listed
        or save.ended
        or save.happened
        or save.current_stage is not UNSET
    )


def check_fence(job_id: str, live: int, fence: int) -> None:
    if fence != live:
        raise Superseded(
            f"run {fence} of job {job_id} is not the live one: that is run {live}",
            hint="stop working on it; what it wrote before is kept",
        )


def take(head: Head, claim: Claim) -> Head | None:
    """The head that a claimer gets, or None: somebody else has it, or it has ended."""
    if head.status in PIPELINE.final:
        return None
    if claim.fence is not None:
        if claim.fence <= head.fence:
            return None
        fence = claim.fence
    else:
        lease = head.lease_until
        if head.fence and (lease is None or lease > claim.now):
            return None
        fence = head.fence + 1
    return replace(
        head,
        fence=fence,
        owner=claim.owner,
        lease_until=claim.lease_until,
        progress_at=claim.now,
        resumes=head.resumes + (head.status is _S.RUNNING),
        version=head.version + 1,
    )


def ask_to_stop(head: Head, now: float) -> tuple[Head, CancelAnswer]:
    """The head after a wish to cancel (the same one, if nothing changed) and the answer."""
    if head.status in PIPELINE.final:
        return head, CancelAnswer(False, head.status, f"the job has ended: {head.status}")
    if head.status is _S.PENDING:
        head = _end(head, _E.CANCEL, now, cancel_requested=True, cancel_effective=True)
    elif not head.cancel_requested:
        status = PIPELINE.after(head.status, _E.REQUEST_CANCEL)
        head = replace(head, status=status, cancel_requested=True, version=head.version + 1)
    return head, CancelAnswer(True, head.status)


def give_up(head: Head, now: float, version: int) -> Head | None:
    """The head of a stale run that is cleaned up; None if it has moved or ended meanwhile.

    The fence goes up, so that a runner which comes back is refused.
    """
    if head.version != version or head.status in PIPELINE.final:
        return None
    effective = False if head.cancel_requested else head.cancel_effective
    return _end(head, _E.CLEAN_UP, now, fence=head.fence + 1, cancel_effective=effective)


def _end(head: Head, event: PipelineJobEvent, now: float, **others: Any) -> Head:
    return replace(
        head,
        status=PIPELINE.after(head.status, event),
        version=head.version + 1,
        finished_at=now,
        lease_until=None,
        progress_at=now,
        **others,
    )


def ended_alone(
    record: PipelineRecord, info: PipelineInfo | None, reason: str, code: str
) -> PipelineRecord:
    """A run that ended without its runner, complete: every stage has an end, and there are the
    error, the summary and the alerts. It has its final status and times already; `info` is its
    pipeline as declared, if anybody knows it."""
    stages = record.stages or (() if info is None else first_stages(info.stages))
    at = record.finished_at or record.created_at
    error = StageError(record.current_stage or "", reason, code)
    why = "cancelled" if code == CANCELLED else reason[:_LONGEST_REASON]
    record = replace(
        record,
        stages=tuple(_cut_short(stage, at, why) for stage in stages),
        errors=(*record.errors, error),
    )
    try:
        alerts = evaluate(() if info is None else info.alerts, record)
    except Exception:  # of a metric that no rule expects: the run ends all the same
        alerts = ()
    return replace(record, alerts=alerts, summary=closed(record.summary, record, alerts))


def _cut_short(stage: StageRecord, at: float, reason: str) -> StageRecord:
    if stage.status is StageStatus.RUNNING:
        status = StageStatus.PARTIAL if stage.ok else StageStatus.FAILED
        return replace(stage, status=status, reason=reason, finished_at=at, rate=None, eta=None)
    if stage.status is StageStatus.PENDING:
        return replace(stage, status=StageStatus.SKIPPED, reason=reason)
    return stage
