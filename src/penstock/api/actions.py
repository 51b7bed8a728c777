"""Doing something to jobs: cancel, retry, approve, reject; one or many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct
from msgspec.structs import astuple

from penstock.api.jobs import CancelView, job_json, job_reply, located
from penstock.api.operation import Operation, Pace
from penstock.api.reply import Reply, json_reply
from penstock.api.selection import JobFilter, query_of
from penstock.core.errors import InvalidRequest
from penstock.core.job import Job
from penstock.ports.engine_api import Bulk, KeyRole
from penstock.ports.store import JobQuery

if TYPE_CHECKING:
    from penstock.api.call import Call

Reason = Annotated[str, Meta(max_length=1000)]


class CancelBody(Struct, frozen=True, forbid_unknown_fields=True):
    reason: Reason = ""
    children: bool = False
    """Whether its children are cancelled, too."""
    timeout: Annotated[float, Meta(ge=0, le=60)] = 10.0
    """Seconds to wait for running work to end."""


async def cancel_job(call: Call) -> Reply:
    given = await call.json(CancelBody)
    job_id = call.params["job_id"]
    with call.attending():
        done = await call.api.cancel(
            job_id, reason=given.reason, children=given.children, timeout=given.timeout
        )
    ended = b"true" if done.ended else b"false"
    return Reply(b'{"job":%b,"ended":%b}' % (job_json(done.job), ended))


class NoFields(Struct, frozen=True, forbid_unknown_fields=True):
    """Nothing needs to be said."""


async def retry_job(call: Call) -> Reply:
    await call.json(NoFields)
    job = await call.api.retry(call.params["job_id"])
    return Reply(job_json(job), 201, located(job))


class ApproveBody(Struct, frozen=True, forbid_unknown_fields=True):
    reason: Reason = ""
    snapshot: str = ""
    """Of the hold that was looked at: if the job waits under another one, it is a conflict."""


async def approve_job(call: Call) -> Reply:
    given = await call.json(ApproveBody)
    job_id = call.params["job_id"]
    approve = call.api.approvals.approve
    return job_reply(await approve(job_id, reason=given.reason, snapshot=given.snapshot))


class RejectBody(Struct, frozen=True, forbid_unknown_fields=True):
    reason: Reason = ""


async def reject_job(call: Call) -> Reply:
    given = await call.json(RejectBody)
    return job_reply(await call.api.approvals.reject(call.params["job_id"], reason=given.reason))


# -- many -------------------------------------------------------------------------


class BulkBody(JobFilter, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At least one filter, or `all`."""

    all: bool = False
    """Every job that the key can see is meant."""
    reason: Reason = ""


_NO_FILTER = astuple(JobFilter())


def _meant(given: BulkBody | RetryBulkBody, *, dead: bool) -> JobQuery:
    has_filter = astuple(given)[: len(_NO_FILTER)] != _NO_FILTER
    if has_filter == given.all:
        problem = "can't be given together with a filter" if has_filter else "no job is named"
        raise InvalidRequest("all", problem, hint="give a filter, or all: true for every job")
    return query_of(given, dead=dead)


async def cancel_jobs(call: Call) -> Reply:
    given = await call.json(BulkBody)
    return json_reply(await call.api.cancel_many(_meant(given, dead=False), reason=given.reason))


class RetryBulkBody(JobFilter, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At least one filter, or `all`."""

    all: bool = False
    """Every dead letter that the key can see is meant."""


async def retry_jobs(call: Call) -> Reply:
    given = await call.json(RetryBulkBody)
    return json_reply(await call.api.retry_many(_meant(given, dead=True)))


_ONE = (404, 409, 415, 422)

OPERATIONS = (
    Operation(
        "POST",
        "/v1/jobs/{job_id}/cancel",
        cancel_job,
        role=KeyRole.SUBMIT,
        body=CancelBody,
        may_be_empty=True,
        answer=CancelView,
        refusals=(404, 415, 422),
        pace=Pace.WAITS,
        summary="Cancel a job",
        description="Cancel and finish race; the job's state says which won.",
    ),
    Operation(
        "POST",
        "/v1/jobs/{job_id}/retry",
        retry_job,
        role=KeyRole.SUBMIT,
        body=NoFields,
        may_be_empty=True,
        answer=Job,
        status=201,
        refusals=_ONE,
        summary="Retry a job that ended badly",
        description="A new job with every field of the old one; it passes the rules again.",
    ),
    Operation(
        "POST",
        "/v1/jobs/{job_id}/approve",
        approve_job,
        role=KeyRole.APPROVE,
        body=ApproveBody,
        may_be_empty=True,
        answer=Job,
        refusals=_ONE,
        summary="Approve a job that is awaiting approval",
        description=(
            "409 if it is not awaiting approval, if this key has approved it already, or if the "
            "request or the rules have changed since. 403 if you submitted it or are not an "
            "approver."
        ),
    ),
    Operation(
        "POST",
        "/v1/jobs/{job_id}/reject",
        reject_job,
        role=KeyRole.APPROVE,
        body=RejectBody,
        may_be_empty=True,
        answer=Job,
        refusals=_ONE,
        summary="Reject a job that is awaiting approval",
        description="It ends DENIED.",
    ),
    Operation(
        "POST",
        "/v1/jobs:cancel",
        cancel_jobs,
        role=KeyRole.OPERATE,
        body=BulkBody,
        answer=Bulk,
        refusals=(415, 422),
        summary="Cancel many jobs",
        description="Every unfinished job that matches. Needs a filter, or `all`.",
    ),
    Operation(
        "POST",
        "/v1/jobs:retry",
        retry_jobs,
        role=KeyRole.OPERATE,
        body=RetryBulkBody,
        answer=Bulk,
        refusals=(415, 422),
        summary="Retry many dead letters",
        description="Each passes the rules again. Needs a filter, or `all`.",
    ),
)
