"""What CAP messages (`cordum.agent.v1`) mean here: jobs, results and errors. Pure.

The message types are those of the package `cap-sdk-python`, whose top-level package is `cap`.
"""

from __future__ import annotations

import base64
import json
from typing import Any

import msgspec
from cap.pb.cordum.agent.v1 import buspacket_pb2, job_pb2

from penstock.core.artifact import Artifact
from penstock.core.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    NotPermitted,
    PenstockError,
    TooMany,
    Unavailable,
    UnreadablePointer,
)
from penstock.core.job import RETRY_REQUESTED, JobRequest, JobResult, Priority
from penstock.core.verdict import Constraints
from penstock.lifecycles.canonical import JobState

VERSION = 1
TRACE, REST = "cap.trace_id", "cap.request"
"""In `env` of a job that came over CAP: its trace, and the fields that have no other place."""
_MAX_REST = 3000
"""Bytes of those fields."""
CONSTRAINTS = "CAP_CONSTRAINTS"
"""In `env` of what is sent to a CAP worker: what the safety rules want of it, as JSON."""

VERSION_MISMATCH, MALFORMED, UNKNOWN_PAYLOAD, BAD_SIGNATURE, NO_SIGNATURE = range(100, 105)
TIMEOUT, EXHAUSTED, DENIED, INVALID, NOT_FOUND, DUPLICATE, NO_WORKER = range(200, 207)
SAFETY_DENIED = 300


class Rejected(Exception):
    """A packet that is dropped, and the alert that says so."""

    def __init__(self, code: int, message: str, sender: str = "") -> None:
        super().__init__(message)
        self.code, self.message, self.sender = code, message, sender


def code_of(error: PenstockError) -> int:
    """The CAP code of an error of ours."""
    match error:
        case UnreadablePointer() | NotFound():
            return NOT_FOUND
        case InvalidRequest():
            return INVALID
        case Conflict():
            return DUPLICATE
        case NotPermitted():
            return DENIED
        case TooMany() | Unavailable():
            return EXHAUSTED
    return INVALID


# -- jobs ----------------------------------------------------------------------------

_PRIORITIES = {
    job_pb2.JOB_PRIORITY_INTERACTIVE: Priority.INTERACTIVE,
    job_pb2.JOB_PRIORITY_CRITICAL: Priority.CRITICAL,
}
_CAP_PRIORITIES = {
    Priority.INTERACTIVE: job_pb2.JOB_PRIORITY_INTERACTIVE,
    Priority.BATCH: job_pb2.JOB_PRIORITY_BATCH,
    Priority.CRITICAL: job_pb2.JOB_PRIORITY_CRITICAL,
}
_OURS = frozenset(
    {
        *("job_id", "topic", "priority", "adapter_id", "env", "parent_job_id"),
        *("workflow_id", "step_index", "tenant_id", "labels"),
    }
)
"""Fields that a JobRequest of ours has too."""


def request_of(packet: buspacket_pb2.BusPacket, context_ptr: str | None, now: float) -> JobRequest:
    """The job that a packet asks for. `context_ptr`: the input, if we keep it ourselves.

    Raises InvalidRequest."""
    asked = packet.job_request
    env = {name: value for name, value in asked.env.items() if not name.startswith("cap.")}
    env[TRACE] = packet.trace_id
    if kept := _rest_of(packet, is_input_kept=context_ptr is not None):
        if len(kept) > _MAX_REST:
            problem = f"{len(kept)} bytes of meta, hints, budget and pointers"
            raise InvalidRequest("job_request", f"{problem}; at most {_MAX_REST} are allowed")
        env[REST] = base64.b64encode(kept).decode()
    meta = asked.meta
    deadline = asked.budget.deadline_ms / 1000
    return JobRequest(
        job_id=asked.job_id,
        topic=asked.topic,
        priority=_PRIORITIES.get(asked.priority, Priority.BATCH),
        context_ptr=context_ptr or "",
        adapter_id=asked.adapter_id or None,
        env=env,
        parent_job_id=asked.parent_job_id or None,
        workflow_id=asked.workflow_id or None,
        step_index=asked.step_index if asked.workflow_id else None,
        tenant=tenant_of(packet),
        labels=dict(asked.labels),
        idempotency_key=meta.idempotency_key or None,
        capability=meta.capability or None,
        risk_tags=tuple(meta.risk_tags),
        # Milliseconds from its acceptance, or the time itself.
        deadline=(deadline if deadline > 1e9 else now + deadline) if deadline else None,
    )


def _rest_of(packet: buspacket_pb2.BusPacket, *, is_input_kept: bool) -> bytes:
    """The fields of a packet's job that have no place in a JobRequest of ours."""
    asked = packet.job_request
    names = {field.name for field, _ in asked.ListFields()} - _OURS
    if is_input_kept:
        names.discard("context_ptr")
    is_signed_for = bool(packet.identity.tenant_id)
    if not (names or is_signed_for):
        return b""
    rest = job_pb2.JobRequest()
    rest.CopyFrom(asked)
    for name in _OURS:
        rest.ClearField(name)
    if is_signed_for:
        rest.identity.CopyFrom(packet.identity)
    if is_input_kept:
        rest.ClearField("context_ptr")
    kept: bytes = rest.SerializeToString(deterministic=True)
    return kept


def tenant_of(packet: buspacket_pb2.BusPacket) -> str:
    """The tenant of the job that a packet asks for."""
    asked = packet.job_request
    named = asked.tenant_id or asked.meta.tenant_id
    return str(named or packet.identity.tenant_id or asked.identity.tenant_id or "default")


def trace_of(request: JobRequest) -> str:
    return request.env.get(TRACE) or request.job_id


def dispatched(
    request: JobRequest,
    *,
    attempt: int,
    worker_id: str,
    seconds: float,
    context_ptr: str,
    constraints: Constraints | None,
    dispatch_id: str,
) -> Any:
    """The CAP JobRequest for a worker: as its client wrote it, and what the engine adds."""
    cap = job_pb2.JobRequest()
    if REST in request.env:
        cap.ParseFromString(base64.b64decode(request.env[REST]))
    cap.job_id, cap.topic = request.job_id, request.topic
    cap.priority = _CAP_PRIORITIES[request.priority]
    cap.adapter_id = request.adapter_id or ""
    cap.env.update({k: v for k, v in request.env.items() if not k.startswith("cap.")})
    cap.parent_job_id = request.parent_job_id or ""
    cap.workflow_id, cap.step_index = request.workflow_id or "", request.step_index or 0
    cap.tenant_id = request.tenant
    cap.labels.update(request.labels)
    if context_ptr:
        cap.context_ptr = context_ptr
    cap.budget.deadline_ms = max(1, int(seconds * 1000))
    cap.dispatch.dispatch_id = dispatch_id
    cap.dispatch.attempt, cap.dispatch.assigned_worker_id = attempt, worker_id
    if constraints is not None:
        cap.env[CONSTRAINTS] = json.dumps(msgspec.to_builtins(constraints))
    return cap


def identity_of(request: JobRequest) -> Any:
    """For whom a job runs: the identity that its submission was signed with, or else its fields."""
    cap = job_pb2.JobRequest()
    if REST in request.env:
        cap.ParseFromString(base64.b64decode(request.env[REST]))
    identity = cap.identity
    identity.tenant_id = request.tenant
    identity.principal_id = identity.principal_id or cap.principal_id
    identity.actor_id = identity.actor_id or cap.meta.actor_id
    return identity


_FATAL = "FATAL"
_STATES = {
    job_pb2.JOB_STATUS_SUCCEEDED: JobState.SUCCEEDED,
    job_pb2.JOB_STATUS_CANCELLED: JobState.CANCELLED,
    job_pb2.JOB_STATUS_TIMEOUT: JobState.TIMEOUT,
}
_NOT_ENDED = frozenset(
    {
        job_pb2.JOB_STATUS_PENDING,
        job_pb2.JOB_STATUS_SCHEDULED,
        job_pb2.JOB_STATUS_DISPATCHED,
        job_pb2.JOB_STATUS_RUNNING,
    }
)


def has_ended(result: Any) -> bool:
    return result.status not in _NOT_ENDED


def result_of(
    cap: Any,
    *,
    attempt: int,
    worker_id: str,
    result_ptr: str | None,
    artifacts: tuple[Artifact, ...] = (),
) -> JobResult:
    """What a CAP worker says came of a job."""
    status = _STATES.get(cap.status, JobState.FAILED)
    code: str | None = None
    if status is not JobState.SUCCEEDED:
        code = cap.error_code or (str(cap.error_code_enum) if cap.error_code_enum else "FAILED")
        if cap.status == job_pb2.JOB_STATUS_FAILED_RETRYABLE:
            code = RETRY_REQUESTED
        elif cap.status == job_pb2.JOB_STATUS_FAILED_FATAL:
            code = _FATAL
    return JobResult(
        job_id=cap.job_id,
        status=status,
        result_ptr=result_ptr,
        worker_id=worker_id,
        execution_ms=float(cap.execution_ms),
        error_code=code[:128] if code else None,
        error_message=cap.error_message[:2000] or None,
        attempt=attempt,
        artifacts=artifacts,
    )


_CAP_STATES = {
    JobState.SUCCEEDED: job_pb2.JOB_STATUS_SUCCEEDED,
    JobState.FAILED: job_pb2.JOB_STATUS_FAILED,
    JobState.CANCELLED: job_pb2.JOB_STATUS_CANCELLED,
    JobState.DENIED: job_pb2.JOB_STATUS_DENIED,
    JobState.TIMEOUT: job_pb2.JOB_STATUS_TIMEOUT,
}
_CAP_CODES = {JobState.DENIED: SAFETY_DENIED, JobState.TIMEOUT: TIMEOUT}


def ended(job_id: str, state: JobState, sender_id: str, result: JobResult | None, ptr: str) -> Any:
    """The CAP JobResult that says how a job ended, in our own name."""
    said = job_pb2.JobResult(
        job_id=job_id,
        status=_CAP_STATES[state],
        worker_id=sender_id,
        result_ptr=ptr,
        error_code_enum=_CAP_CODES.get(state, 0),
    )
    if result is not None:
        said.execution_ms = int(result.execution_ms or 0)
        said.error_code = result.error_code or ""
        said.error_message = result.error_message or ""
    return said


def refused(job_id: str, sender_id: str, code: int, message: str) -> Any:
    """The CAP JobResult for a job that was not accepted."""
    return job_pb2.JobResult(
        job_id=job_id,
        status=job_pb2.JOB_STATUS_FAILED,
        worker_id=sender_id,
        error_code=job_pb2.ErrorCode.Name(code).removeprefix("ERROR_CODE_"),
        error_code_enum=code,
        error_message=message,
    )
