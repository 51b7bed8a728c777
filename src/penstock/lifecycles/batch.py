"""A batch of OpenAI's API: the words are OpenAI's, for the file as a whole.

What happens to its lines is the canonical job's business. A batch that is cancelled is told of
its end while it is CANCELLING, and has files like any other; one whose time is over is
FINALIZING first.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from penstock.core.machine import StateMachine
from penstock.lifecycles.canonical import CanonicalEnd, JobState


class BatchStatus(StrEnum):
    VALIDATING = "validating"
    """Its lines are being looked at; nothing was submitted yet."""
    FAILED = "failed"
    """A line was wrong: nothing was submitted."""
    IN_PROGRESS = "in_progress"
    """Its lines are jobs, or are going to be."""
    FINALIZING = "finalizing"
    """Every line has ended; its files are being written."""
    COMPLETED = "completed"
    """Every line has ended by itself; its files tell how."""
    EXPIRED = "expired"
    """Its time was over before all lines had run; what was done is in its files."""
    CANCELLING = "cancelling"
    """Its end was asked for; what runs is being ended, and its files written."""
    CANCELLED = "cancelled"
    """Ended on request; what was done is in its files."""


class BatchEvent(StrEnum):
    """What can happen to a batch."""

    CREATE = "create"
    REFUSE = "refuse"
    ACCEPT = "accept"
    FINALIZE = "finalize"
    COMPLETE = "complete"
    EXPIRE = "expire"
    CANCEL = "cancel"
    END = "end"


_S, _E = BatchStatus, BatchEvent

BATCH: StateMachine[BatchStatus, BatchEvent] = StateMachine(
    "batch",
    states=BatchStatus,
    initial=(_E.CREATE, _S.VALIDATING),
    moves={
        (_S.VALIDATING, _E.REFUSE): _S.FAILED,
        (_S.VALIDATING, _E.ACCEPT): _S.IN_PROGRESS,
        (_S.VALIDATING, _E.CANCEL): _S.CANCELLING,
        (_S.IN_PROGRESS, _E.FINALIZE): _S.FINALIZING,
        (_S.IN_PROGRESS, _E.CANCEL): _S.CANCELLING,
        (_S.FINALIZING, _E.COMPLETE): _S.COMPLETED,
        (_S.FINALIZING, _E.EXPIRE): _S.EXPIRED,
        (_S.CANCELLING, _E.END): _S.CANCELLED,
    },
)

ENDS: Mapping[BatchStatus, CanonicalEnd] = {
    _S.COMPLETED: CanonicalEnd(JobState.SUCCEEDED),
    _S.FAILED: CanonicalEnd(JobState.FAILED, "INVALID_BATCH"),
    _S.EXPIRED: CanonicalEnd(JobState.TIMEOUT, "BATCH_EXPIRED"),
    _S.CANCELLED: CanonicalEnd(JobState.CANCELLED, "CANCELLED"),
}
