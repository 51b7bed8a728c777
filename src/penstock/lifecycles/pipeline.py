"""The staged pipeline job of seed 002: six states, four of them ends.

The stages have statuses of their own; this is the job around them. Asking a running
job to stop (`request_cancel`) leaves it RUNNING until its items have stopped; only then
is it CANCELLED. A job that hasn't started is cancelled at once.

FAILED means that every counted stage failed, that a stage marked `critical` did, that
the orchestrator itself raised, or that the job was found stale (`clean_up`). Any other
mixture is PARTIAL.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from penstock.core.machine import StateMachine
from penstock.lifecycles.canonical import CanonicalEnd, JobState


class PipelineJobStatus(StrEnum):
    """Where a pipeline job is."""

    PENDING = "PENDING"
    """Recorded; its background task has not started."""
    RUNNING = "RUNNING"
    """Its stages are being executed, one after the other."""
    COMPLETED = "COMPLETED"
    """Ended; every counted stage completed."""
    PARTIAL = "PARTIAL"
    """Ended; some of its work succeeded and some did not."""
    FAILED = "FAILED"
    """Ended; nothing that counts succeeded, or it could not go on."""
    CANCELLED = "CANCELLED"
    """Ended because `cancel_job()` asked for it."""


class PipelineJobEvent(StrEnum):
    """What can happen to a pipeline job."""

    CREATE = "create"
    EXECUTE = "execute"
    COMPLETE = "complete"
    COMPLETE_PARTLY = "complete_partly"
    FAIL = "fail"
    REQUEST_CANCEL = "request_cancel"
    CANCEL = "cancel"
    CLEAN_UP = "clean_up"


_S, _E = PipelineJobStatus, PipelineJobEvent

ACTIVE = frozenset({_S.PENDING, _S.RUNNING})
"""What counts against the limit of a pipeline, and what may go stale."""

PIPELINE: StateMachine[PipelineJobStatus, PipelineJobEvent] = StateMachine(
    "pipeline job",
    states=PipelineJobStatus,
    initial=(_E.CREATE, _S.PENDING),
    moves={
        (_S.PENDING, _E.EXECUTE): _S.RUNNING,
        (_S.PENDING, _E.CANCEL): _S.CANCELLED,
        (_S.PENDING, _E.CLEAN_UP): _S.FAILED,
        (_S.RUNNING, _E.COMPLETE): _S.COMPLETED,
        (_S.RUNNING, _E.COMPLETE_PARTLY): _S.PARTIAL,
        (_S.RUNNING, _E.FAIL): _S.FAILED,
        (_S.RUNNING, _E.CANCEL): _S.CANCELLED,
        (_S.RUNNING, _E.CLEAN_UP): _S.FAILED,
        (_S.RUNNING, _E.REQUEST_CANCEL): _S.RUNNING,
    },
)

ENDS: Mapping[PipelineJobStatus, CanonicalEnd] = {
    _S.COMPLETED: CanonicalEnd(JobState.SUCCEEDED),
    _S.PARTIAL: CanonicalEnd(JobState.SUCCEEDED, "PARTIAL"),
    _S.FAILED: CanonicalEnd(JobState.FAILED, "PIPELINE_FAILED"),
    _S.CANCELLED: CanonicalEnd(JobState.CANCELLED, "CANCELLED"),
}
"""A PARTIAL job has a result worth reading, so it succeeds, and its code says how far."""
