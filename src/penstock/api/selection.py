"""Which jobs are meant: the filters of a listing, and of operations on many."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from penstock.api.paging import cursor, place_in
from penstock.core.errors import InvalidRequest
from penstock.core.job import Job
from penstock.lifecycles.canonical import JobState
from penstock.ports.store import JobQuery

if TYPE_CHECKING:
    from penstock.ports.desk import Desk

Limit = Annotated[int, Meta(ge=1, le=1000)]
Seq = Annotated[int, Meta(ge=0, lt=1 << 62)]
_FARTHEST = 100_000
"""How far into a workflow the pages go: each reads all that come before it."""


class Order(StrEnum):
    NEWEST = "newest"
    OLDEST = "oldest"


class JobFilter(Struct, frozen=True, kw_only=True):
    """All conditions must hold."""

    job_id: str | None = None
    """A glob, as in `*4cw6`."""
    state: tuple[JobState, ...] = ()
    """May come several times: any of them."""
    topic: str | None = None
    """A glob, as in `job.text.*`."""
    tenant: str | None = None
    parent_job_id: str | None = None
    workflow_id: str | None = None
    """Jobs of a workflow come in the order of their step_index instead."""
    label: tuple[str, ...] = ()
    """`name=value`; may come several times: all of them."""
    idempotency_key: str | None = None
    principal: str | None = None
    """Who submitted it."""
    schedule: str | None = None
    parked: bool | None = None
    """True: only jobs that wait for an approval; false: only those that don't."""
    accepted_from: float | None = None
    """Accepted at this time or later, in seconds since the epoch."""
    accepted_to: float | None = None
    """Accepted before this time."""


class JobListing(JobFilter, frozen=True, kw_only=True):
    dead: bool = False
    """Only what ended FAILED or TIMEOUT and was not retried."""
    before: Seq | None = None
    """Only jobs with a lower `seq`."""
    since: Seq | None = None
    """Only jobs with a higher `seq`."""
    order: Order = Order.NEWEST
    limit: Limit = 50
    cursor: str | None = None
    """`next` of the page before."""


class DeadListing(JobFilter, frozen=True, kw_only=True):
    order: Order = Order.NEWEST
    limit: Limit = 50
    cursor: str | None = None
    """`next` of the page before."""


def query_of(given: JobFilter, *, dead: bool = False) -> JobQuery:
    return JobQuery(
        job_id=given.job_id,
        states=given.state,
        topic=given.topic,
        tenant=given.tenant,
        parent_job_id=given.parent_job_id,
        workflow_id=given.workflow_id,
        labels=_labels(given.label),
        idempotency_key=given.idempotency_key,
        principal=given.principal,
        schedule=given.schedule,
        parked=given.parked,
        dead=dead,
        accepted_from=given.accepted_from,
        accepted_to=given.accepted_to,
    )


def _labels(pairs: tuple[str, ...]) -> dict[str, str]:
    labels: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise InvalidRequest("label", f"{pair[:60]!r} is not name=value")
        if labels.setdefault(name, value) != value:
            raise InvalidRequest("label", f"{name[:60]!r} can't have two values at once")
    return labels


async def page_of(
    desk: Desk, query: JobQuery, order: Order, limit: int, at: str | None
) -> tuple[list[Job], str | None]:
    """A page of jobs, and where the next one begins. Stable while jobs come in."""
    if query.by_step:
        return await _steps(desk, query, limit, at)
    kind = order.value[0]
    place = place_in(kind, at)
    query = replace(query, limit=limit + 1, oldest_first=order is Order.OLDEST)
    if place is not None:
        here = {"since": place} if order is Order.OLDEST else {"before": place}
        query = replace(query, **here)
    jobs = await desk.find(query)
    if len(jobs) <= limit:
        return jobs, None
    return jobs[:limit], cursor(kind, jobs[limit - 1].seq)


async def _steps(
    desk: Desk, query: JobQuery, limit: int, at: str | None
) -> tuple[list[Job], str | None]:
    """A workflow is ordered by its steps, so its pages are counted."""
    start = place_in("w", at) or 0
    if start > _FARTHEST:
        raise InvalidRequest(
            "cursor",
            f"pages in the order of steps end after {_FARTHEST:,} jobs",
            hint="pass since=0&order=oldest to list the workflow in the order of submission",
        )
    jobs = await desk.find(replace(query, limit=start + limit + 1))
    more = len(jobs) > start + limit
    return jobs[start : start + limit], cursor("w", start + limit) if more else None
