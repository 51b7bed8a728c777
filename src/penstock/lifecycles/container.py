"""The container job of seed 003: what a worker's own HTTP API says about a job.

A submission that fails validation is `rejected`: answered, never stored. A lookup of
an id that isn't stored is answered `not_found`. No stored job is in either.

The seed has no cancelled state. A job that is deleted, queued or running, ends
`failed` with the error code CANCELLED, and `canonical_end` reads that code again.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from penstock.core.machine import StateMachine
from penstock.lifecycles.canonical import CanonicalEnd, JobState


class ContainerJobState(StrEnum):
    """Where a container job is, or what is said of one that isn't stored."""

    QUEUED = "queued"
    """Accepted and stored; waits until fewer jobs run than may."""
    RUNNING = "running"
    """A container is executing it."""
    FINISHED = "finished"
    """Ended with exit code 0 and no runtime error."""
    FAILED = "failed"
    """Ended by a non-zero exit, a timeout, the engine, a broken limit, or a cancel."""
    REJECTED = "rejected"
    """Refused at submission (invalid, unsupported, not allowed); never stored."""
    NOT_FOUND = "not_found"
    """Not stored on this worker; only a lookup says so."""


class ContainerJobEvent(StrEnum):
    """What can happen to a container job."""

    ACCEPT = "accept"
    REJECT = "reject"
    START = "start"
    FINISH = "finish"
    FAIL = "fail"
    CANCEL = "cancel"


_S, _E = ContainerJobState, ContainerJobEvent

STORED = frozenset({_S.QUEUED, _S.RUNNING, _S.FINISHED, _S.FAILED})
"""What a job record can say; the other two are answers only."""

CONTAINER: StateMachine[ContainerJobState, ContainerJobEvent] = StateMachine(
    "container job",
    states=ContainerJobState,
    initial=(_E.ACCEPT, _S.QUEUED),
    refused=(_E.REJECT, _S.REJECTED),
    absent=_S.NOT_FOUND,
    moves={
        (_S.QUEUED, _E.START): _S.RUNNING,
        (_S.QUEUED, _E.CANCEL): _S.FAILED,
        (_S.RUNNING, _E.FINISH): _S.FINISHED,
        (_S.RUNNING, _E.FAIL): _S.FAILED,
        (_S.RUNNING, _E.CANCEL): _S.FAILED,
    },
)

CANONICAL_STATES: Mapping[ContainerJobState, tuple[JobState, ...]] = {
    _S.QUEUED: (JobState.PENDING, JobState.SCHEDULED, JobState.DISPATCHED),
    _S.RUNNING: (JobState.RUNNING,),
    _S.FINISHED: (JobState.SUCCEEDED,),
    _S.FAILED: (JobState.FAILED, JobState.TIMEOUT, JobState.CANCELLED, JobState.DENIED),
}
"""The states of the canonical job in which a stored container job is said to be in each."""

POLICY_CODES = frozenset({"IMAGE_NOT_ALLOWED"})
"""The error codes of a rejection by which the worker's policy speaks, not its parser."""


def canonical_end(state: ContainerJobState, error_code: str | None = None) -> CanonicalEnd:
    """Read a container job's end; only its error code tells a timeout from a crash."""
    if state is _S.FINISHED:
        return CanonicalEnd(JobState.SUCCEEDED)
    if state is _S.REJECTED:
        denied = error_code in POLICY_CODES
        return CanonicalEnd(JobState.DENIED if denied else JobState.FAILED, error_code)
    if state is _S.FAILED:
        code = error_code or "RUNTIME_ERROR"
        named = {"TIMEOUT": JobState.TIMEOUT, "CANCELLED": JobState.CANCELLED}
        return CanonicalEnd(named.get(code, JobState.FAILED), code)
    raise ValueError(f"a container job that is {state} has not ended")
