"""Filters of job lists and bulk operations."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from penstock.core.errors import InvalidRequest
from penstock.core.job import Job
from penstock.lifecycles.canonical import JobState
from penstock.ports.operations import cursor, position
from penstock.ports.store import JobQuery

if TYPE_CHECKING:
    from penstock.ports.engine_api import EngineApi

Limit = Annotated[int, Meta(ge=1, le=1000)]
Seq = Annotated[int, Meta(ge=0, lt=1 << 62)]
_FARTHEST = 100_000
"""Maximum offset in a workflow's pages: each page reads all before it."""
_STEPS = "list_jobs by step"


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
    """The job that made it, or that it retries."""
    child_of: str | None = None
    """The first try of the job that it is a child of."""
    first_try: str | None = None
    """The tries of one job: that with this id and its retries."""
    workflow_id: str | None = None
    """Jobs of a workflow come in the order of their step_index instead."""
    label: tuple[str, ...] = ()
    """`name=value`; may come several times: all of them."""
    idempotency_key: str | None = None
    principal: str | None = None
    """Principal that submitted it."""
    schedule: str | None = None
    awaiting_approval: bool | None = None
    """True: only jobs that are awaiting approval; false: only those that are not."""
    accepted_from: float | None = None
    """Accepted at this time or later, in seconds since the epoch."""
    accepted_to: float | None = None
    """Accepted before this time."""


class DeadListing(JobFilter, frozen=True, kw_only=True):
    order: Order = Order.NEWEST
    limit: Limit = 50
    cursor: str | None = None
    """`next` of the page before."""
    total: bool = False
    """Whether to count all that match: exact up to 1,000, or if only states and a tenant are
    asked for."""


class JobListing(DeadListing, frozen=True, kw_only=True):
    dead: bool = False
    """Only what ended FAILED or TIMEOUT and was not retried."""
    tries: bool = False
    """Every try. Without it, the newest try of a job stands for all of them, and the filters are
    applied to it, unless they ask by `job_id`, `parent_job_id`, `first_try` or
    `idempotency_key`."""
    before: Seq | None = None
    """Only jobs with a lower `seq`."""
    since: Seq | None = None
    """Only jobs with a higher `seq`."""
    why: bool = False
    """Whether to say what each unfinished job of the page waits for, or what happens to it."""


def query_of(given: JobFilter, *, dead: bool = False) -> JobQuery:
    """The fields of the same name, and those that HTTP names in the singular."""
    own = set(given.__struct_fields__) & set(JobQuery.__struct_fields__) - {"dead", "limit"}
    return JobQuery(
        **{name: getattr(given, name) for name in own},
        states=given.state,
        labels=_labels(given.label),
        dead=dead,
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
    api: EngineApi, query: JobQuery, order: Order, limit: int, at: str | None
) -> tuple[list[Job], str | None]:
    """A page of jobs, and where the next one begins. Stable while jobs come in."""
    if query.by_step:
        return await _steps(api, query, limit, at)
    kind = f"list_jobs {order}"
    place = position(kind, int, at)
    query = replace(query, limit=limit + 1, oldest_first=order is Order.OLDEST)
    if place is not None:
        here = {"since": place} if order is Order.OLDEST else {"before": place}
        query = replace(query, **here)
    jobs = await api.find(query)
    if len(jobs) <= limit:
        return jobs, None
    return jobs[:limit], cursor(kind, jobs[limit - 1].seq)


async def _steps(
    api: EngineApi, query: JobQuery, limit: int, at: str | None
) -> tuple[list[Job], str | None]:
    """A workflow is ordered by its steps, so its pages are counted."""
    start = position(_STEPS, int, at) or 0
    if start > _FARTHEST:
        raise InvalidRequest(
            "cursor",
            f"pages in the order of steps end after {_FARTHEST:,} jobs",
            hint="pass since=0&order=oldest to list the workflow in the order of submission",
        )
    jobs = await api.find(replace(query, limit=start + limit + 1))
    more = len(jobs) > start + limit
    return jobs[start : start + limit], cursor(_STEPS, start + limit) if more else None
