"""The spooled job of seed 004: the folder a job's directory lies in is its state.

Every move is one atomic rename, and the process whose rename succeeds made the move. So this is
the one lifecycle with a way back: a job found RUNNING when no server runs is an orphan,
and is renamed to QUEUED again (`recover`).

MISSING is the answer about an id that lies in no folder. STAGING is answered MISSING
too: a job that is still being written is nobody's business but its writer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from penstock.core.machine import StateMachine
from penstock.lifecycles.canonical import CanonicalEnd, JobState


class Status(StrEnum):
    """Where a spooled job is, or what is said of one that is nowhere."""

    STAGING = "STAGING"
    """Being written by its client; the queue can't see it yet."""
    QUEUED = "QUEUED"
    """Complete, and waiting for a worker thread."""
    RUNNING = "RUNNING"
    """Claimed by a worker; inference is in progress."""
    DONE = "DONE"
    """Ended; its result lies in the job's directory."""
    FAILED = "FAILED"
    """Ended; its error lies in the job's directory."""
    MISSING = "MISSING"
    """In no folder: never submitted, mistyped, or cleaned away; only a lookup says so."""


class SpoolEvent(StrEnum):
    """What can happen to a spooled job."""

    STAGE = "stage"
    SUBMIT = "submit"
    CLAIM = "claim"
    FINISH = "finish"
    FAIL = "fail"
    RECOVER = "recover"


_S, _E = Status, SpoolEvent

FOLDERS: Mapping[Status, str] = {
    _S.STAGING: "input/writing",
    _S.QUEUED: "input/ready",
    _S.RUNNING: "processing",
    _S.DONE: "output",
    _S.FAILED: "failed",
}
"""Each state's folder, relative to the workspace. The folder is the state."""

VISIBLE = (_S.QUEUED, _S.RUNNING, _S.DONE, _S.FAILED)
"""What a lookup finds."""

SPOOL: StateMachine[Status, SpoolEvent] = StateMachine(
    "spooled job",
    states=Status,
    initial=(_E.STAGE, _S.STAGING),
    absent=_S.MISSING,
    moves={
        (_S.STAGING, _E.SUBMIT): _S.QUEUED,
        (_S.QUEUED, _E.CLAIM): _S.RUNNING,
        (_S.RUNNING, _E.FINISH): _S.DONE,
        (_S.RUNNING, _E.FAIL): _S.FAILED,
        (_S.RUNNING, _E.RECOVER): _S.QUEUED,
    },
)

ENDS: Mapping[Status, CanonicalEnd] = {
    _S.DONE: CanonicalEnd(JobState.SUCCEEDED),
    _S.FAILED: CanonicalEnd(JobState.FAILED, "INFERENCE_FAILED"),
}
