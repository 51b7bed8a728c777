"""The canonical job of seed 001: nine states, and who may move them.

Jobs only go forward. Some events happen *within* a state and change the record but
not the state: `park` holds a job until people approve it and `approve` is one person's
yes; `redispatch` gives a job whose worker was lost to another worker, with the next
attempt number; `request_cancel` asks the worker that holds the job to end it. `note`
keeps in the log what was refused (a late result, say) and changes nothing else, which
is why a final state may still be noted upon.

A result may reach a DISPATCHED job before the news that it started; the start is then
implied, and both moves are logged (see `penstock.core.journal`).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from penstock.core.machine import StateMachine


class JobState(StrEnum):
    """Where a canonical job is."""

    PENDING = "PENDING"
    """Accepted and durable; the safety kernel has not let it pass yet."""
    SCHEDULED = "SCHEDULED"
    """Let pass; waits for its time, for a worker with room, or for an approval."""
    DISPATCHED = "DISPATCHED"
    """Given to one worker, which has not said yet that it started."""
    RUNNING = "RUNNING"
    """A worker said that it started."""
    SUCCEEDED = "SUCCEEDED"
    """Ended with a result."""
    FAILED = "FAILED"
    """Ended with an error."""
    CANCELLED = "CANCELLED"
    """Ended because a user or the control plane asked for it."""
    DENIED = "DENIED"
    """Ended because the safety kernel refused it; it never ran."""
    TIMEOUT = "TIMEOUT"
    """Ended because it did not start, did not end, or lost its worker, in time."""


class JobEvent(StrEnum):
    """What can happen to a canonical job."""

    ACCEPT = "accept"
    SCHEDULE = "schedule"
    DENY = "deny"
    PARK = "park"
    APPROVE = "approve"
    DISPATCH = "dispatch"
    REDISPATCH = "redispatch"
    START = "start"
    SUCCEED = "succeed"
    FAIL = "fail"
    EXPIRE = "expire"
    REQUEST_CANCEL = "request_cancel"
    CANCEL = "cancel"
    NOTE = "note"


class Role(StrEnum):
    """Who moves a job."""

    GATEWAY = "gateway"
    SCHEDULER = "scheduler"
    WORKER = "worker"
    RECONCILER = "reconciler"


_S, _E = JobState, JobEvent

WAITING = frozenset({_S.PENDING, _S.SCHEDULED})
"""Not with any worker yet."""
HELD = frozenset({_S.DISPATCHED, _S.RUNNING})
"""With a worker."""

CANONICAL: StateMachine[JobState, JobEvent] = StateMachine(
    "canonical job",
    states=JobState,
    initial=(_E.ACCEPT, _S.PENDING),
    moves={
        (_S.PENDING, _E.SCHEDULE): _S.SCHEDULED,
        (_S.SCHEDULED, _E.DISPATCH): _S.DISPATCHED,
        (_S.SCHEDULED, _E.DENY): _S.DENIED,
        (_S.DISPATCHED, _E.START): _S.RUNNING,
        (_S.DISPATCHED, _E.EXPIRE): _S.TIMEOUT,
        (_S.RUNNING, _E.SUCCEED): _S.SUCCEEDED,
        (_S.RUNNING, _E.FAIL): _S.FAILED,
        (_S.RUNNING, _E.EXPIRE): _S.TIMEOUT,
        (_S.PENDING, _E.CANCEL): _S.CANCELLED,
        (_S.SCHEDULED, _E.CANCEL): _S.CANCELLED,
        (_S.DISPATCHED, _E.CANCEL): _S.CANCELLED,
        (_S.RUNNING, _E.CANCEL): _S.CANCELLED,
        (_S.SCHEDULED, _E.PARK): _S.SCHEDULED,
        (_S.SCHEDULED, _E.APPROVE): _S.SCHEDULED,
        (_S.DISPATCHED, _E.REDISPATCH): _S.DISPATCHED,
        (_S.RUNNING, _E.REDISPATCH): _S.RUNNING,
        (_S.DISPATCHED, _E.REQUEST_CANCEL): _S.DISPATCHED,
        (_S.RUNNING, _E.REQUEST_CANCEL): _S.RUNNING,
        **{(state, _E.NOTE): state for state in _S},
    },
)

TERMINAL = CANONICAL.final
"""SUCCEEDED, FAILED, CANCELLED, DENIED, TIMEOUT: nothing leaves them."""

ACTORS: Mapping[JobEvent, frozenset[Role]] = {
    _E.ACCEPT: frozenset({Role.GATEWAY, Role.SCHEDULER, Role.RECONCILER}),
    _E.SCHEDULE: frozenset({Role.SCHEDULER}),
    _E.DENY: frozenset({Role.SCHEDULER}),
    _E.PARK: frozenset({Role.SCHEDULER}),
    _E.APPROVE: frozenset({Role.GATEWAY}),
    _E.DISPATCH: frozenset({Role.SCHEDULER}),
    _E.REDISPATCH: frozenset({Role.SCHEDULER}),
    _E.START: frozenset({Role.WORKER}),
    _E.SUCCEED: frozenset({Role.WORKER}),
    _E.FAIL: frozenset({Role.WORKER}),
    _E.EXPIRE: frozenset({Role.RECONCILER}),
    _E.REQUEST_CANCEL: frozenset({Role.GATEWAY, Role.RECONCILER}),
    _E.CANCEL: frozenset({Role.GATEWAY, Role.RECONCILER}),
    _E.NOTE: frozenset(Role),
}
"""Who may cause what. ACCEPT by the scheduler or reconciler is a retry they emit."""


class CanonicalEnd(NamedTuple):
    """The canonical end of a lifecycle that runs inside RUNNING (a pipeline, a container …).

    A terminal state, and the error code to use where the inner job gave none.
    """

    state: JobState
    error_code: str | None = None
