"""What a caller may say of a job, and the JobRequest that it becomes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import UNSET, Raw, Struct, UnsetType
from msgspec.structs import astuple

from penstock.core.errors import Conflict, InvalidRequest
from penstock.core.job import (
    NO_RETRY,
    JobRequest,
    ParentPolicy,
    Priority,
    RetryPolicy,
    Unique,
)
from penstock.core.pointer import encode_data

if TYPE_CHECKING:
    from penstock.api.call import Call

INLINE = 4096
"""Bytes of input that ride in the pointer; more become a blob."""


class RetryFields(RetryPolicy, frozen=True, forbid_unknown_fields=True):
    """Which failures are tried again, how often, and after how long."""


class UniqueFields(Unique, frozen=True, forbid_unknown_fields=True):
    """At most one job with this key at a time, within a tenant."""


class Submission(Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """A job to be done. Only `topic` is required."""

    topic: str
    """What is to be done: `job.` and words with dots between."""
    input: Raw | UnsetType = UNSET
    """Its input, a JSON object; or say where it is, with `context_ptr`."""
    context_ptr: str = ""
    """A pointer to the input: what POST /v1/blobs answered, or a place that is allowed."""
    job_id: str = ""
    """An id of your own; else one is made."""
    priority: Priority = Priority.BATCH
    adapter_id: str | None = None
    env: dict[str, str] = {}
    labels: dict[str, str] = {}
    parent_job_id: str | None = None
    workflow_id: str | None = None
    step_index: int | None = None
    tenant: str | None = None
    """Only for keys that are of no tenant; else it is the key's own."""
    idempotency_key: str | None = None
    """The same key within a tenant is the same job. May be the Idempotency-Key header."""
    timeout: float | None = None
    """Seconds one attempt may run."""
    dispatch_timeout: float | None = None
    """Seconds a worker may hold the job before it starts."""
    deadline: float | None = None
    """The time by which it must have ended, in seconds since the epoch."""
    run_at: float | None = None
    """The time before which it must not start."""
    delay: float | None = None
    """Seconds from now before which it must not start; instead of `run_at`."""
    retry: RetryFields | None = None
    idempotent: bool = False
    """Whether it may safely run again after its worker was lost mid-run."""
    capability: str | None = None
    """What it is going to do, in a word that safety rules know."""
    risk_tags: tuple[str, ...] = ()
    estimated_cost: float | None = None
    after: tuple[str, ...] = ()
    """Jobs that must have ended before this one may start."""
    if_parent_fails: ParentPolicy = ParentPolicy.CANCEL
    unique: UniqueFields | None = None
    complete: bool = False
    """Do not apply the topic's defaults."""


async def request_of(call: Call, given: Submission, where: str = "", key: str = "") -> JobRequest:
    """The request as the Desk wants it; `where` it stands in the body, for errors."""
    pointer = given.context_ptr
    if given.input is not UNSET:
        pointer = await _pointer(call, given, where)
    run_at = given.run_at
    if given.delay is not None:
        if run_at is not None:
            raise InvalidRequest(f"{where}delay", "can't be given together with run_at")
        run_at = call.services.clock.now() + given.delay
    return JobRequest(
        job_id=given.job_id,
        topic=given.topic,
        priority=given.priority,
        context_ptr=pointer,
        adapter_id=given.adapter_id,
        env=given.env,
        parent_job_id=given.parent_job_id,
        workflow_id=given.workflow_id,
        step_index=given.step_index,
        tenant=given.tenant or call.tenant(),
        labels=given.labels,
        idempotency_key=agreed_key(given.idempotency_key, key),
        timeout=given.timeout,
        dispatch_timeout=given.dispatch_timeout,
        deadline=given.deadline,
        run_at=run_at,
        retry=NO_RETRY if given.retry is None else RetryPolicy(*astuple(given.retry)),
        idempotent=given.idempotent,
        capability=given.capability,
        risk_tags=given.risk_tags,
        estimated_cost=given.estimated_cost,
        after=given.after,
        if_parent_fails=given.if_parent_fails,
        unique=None if given.unique is None else Unique(*astuple(given.unique)),
        complete=given.complete,
    )


async def _pointer(call: Call, given: Submission, where: str) -> str:
    """Where the input is from now on: in the pointer itself, or in a blob."""
    assert isinstance(given.input, Raw)
    payload = bytes(given.input)
    if payload[:1] != b"{":
        if payload == b"null":
            return given.context_ptr
        raise InvalidRequest(f"{where}input", "is not a JSON object")
    if given.context_ptr:
        raise InvalidRequest(f"{where}input", "can't be given together with context_ptr")
    return await pointer_to(call, payload)


async def pointer_to(call: Call, payload: bytes) -> str:
    """A pointer to JSON: with the JSON in it, if that is small."""
    if len(payload) <= INLINE:
        return encode_data(payload)
    return await call.desk.put_blob(payload)


def header_key(call: Call) -> str:
    """What the Idempotency-Key header says; empty without one."""
    value = call.headers.get(b"idempotency-key")
    if value is None:
        return ""
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest("Idempotency-Key", "is not UTF-8") from None


def agreed_key(in_body: str | None, in_header: str) -> str | None:
    """The idempotency key, wherever it was given. Raises Conflict for two different ones."""
    if not in_header:
        return in_body
    if in_body not in (None, in_header):
        raise Conflict(
            "the Idempotency-Key header and idempotency_key in the body differ",
            hint="give one of them, or the same",
        )
    return in_header
