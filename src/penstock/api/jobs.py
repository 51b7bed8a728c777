"""Job operations whose HTTP shape differs from the engine's API."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import astuple, replace

from penstock.api.operation import route
from penstock.api.reply import Reply, encode, json_reply
from penstock.api.table import CURSOR, NEXT, VIEWS, Seconds, bound, job_json, list_json
from penstock.core.errors import InvalidRequest, NotFound, WaitTimedOut
from penstock.core.job import Job
from penstock.core.ledger import Step
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import (
    MAX_WAITED,
    Bulk,
    Ended,
    EngineApi,
    JobTotal,
    Reason,
    newest_try,
)
from penstock.ports.operations import cursor, position
from penstock.ports.store import JobQuery, StepQuery

if TYPE_CHECKING:
    from penstock.api.call import Call

# -- which jobs ----------------------------------------------------------------------

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
    error: str | None = None
    """Text in the error code or message of a job that ended without success. The case of ASCII
    letters does not matter. It is looked for in the newest 20,000 that match all else."""
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


# -- operations ----------------------------------------------------------------------


class JobPage(Struct, frozen=True):
    jobs: tuple[Job, ...]
    next: Annotated[str | None, Meta(description=NEXT)]
    total: JobTotal | UnsetType = UNSET
    """Number of jobs on all pages, if asked for."""
    why: dict[str, str] | UnsetType = UNSET
    """By id, for unfinished jobs, if it was asked for."""


@bound("list_jobs", query=JobListing, answer=JobPage)
async def list_jobs(call: Call) -> Reply:
    given = call.query(JobListing)
    return await _page(call, query_of(given, dead=given.dead), given)


@route("GET /v1/dead", query=DeadListing, answer=JobPage, refusals=(422,))
async def list_dead(call: Call) -> Reply:
    """List dead letters.

    What ended FAILED or TIMEOUT and was not retried.
    """
    given = call.query(DeadListing)
    return await _page(call, query_of(given, dead=True), given)


async def _page(call: Call, query: JobQuery, paging: DeadListing) -> Reply:
    jobs, following = await page_of(call.api, query, paging.order, paging.limit, paging.cursor)
    body = b'{"jobs":%b,"next":%b' % (list_json(jobs), encode(following))
    if paging.total:
        body += b',"total":%b' % encode(await call.api.count(query))
    if isinstance(paging, JobListing) and paging.why:
        body += b',"why":%b' % encode(await _reasons(call.api, jobs))
    return Reply(body + b"}")


async def _reasons(api: EngineApi, jobs: Sequence[Job]) -> dict[str, str]:
    found = {}
    for job in jobs:
        if not job.is_final:
            with suppress(NotFound):  # it was deleted by now
                found[job.job_id] = await api.why(job.job_id)
    return found


class GetQuery(Struct, frozen=True):
    why: bool = False
    """Whether to say, in `why`, what it waits for or what is happening to it."""


@bound("get_job", query=GetQuery, answer=Job)
async def get_job(call: Call) -> Reply:
    job_id = call.params["job_id"]
    if not call.scope["query_string"] or not call.query(GetQuery).why:
        return Reply(job_json(await call.api.get(job_id)))
    job = await call.api.get(job_id)
    why = encode(await call.api.why(job_id))
    return Reply(b'%b,"why":%b}' % (job_json(job)[:-1], why))


class Why(Struct, frozen=True):
    job_id: str
    why: str
    """What it waits for, or what is happening to it, in one sentence."""


@bound("why_job", answer=Why)
async def why_job(call: Call) -> Reply:
    job_id = call.params["job_id"]
    return json_reply(Why(job_id, await call.api.why(job_id)))


class StepListing(Struct, frozen=True):
    name: str | None = None
    """Only rows of this name."""
    limit: Limit = 1000
    cursor: Annotated[str | None, Meta(description=CURSOR)] = None


class Steps(Struct, frozen=True):
    steps: list[Step]
    next: Annotated[str | None, Meta(description=NEXT)]


@bound("get_steps", query=StepListing, answer=Steps)
async def get_steps(call: Call) -> Reply:
    query = call.query(StepListing)
    after = position("get_steps", tuple[str, int], query.cursor)
    wanted = StepQuery(name=query.name, after=after, limit=query.limit)
    page = await call.api.read_steps(call.params["job_id"], wanted)
    following = None if page.last is None else cursor("get_steps", page.last)
    return json_reply(Steps(page.steps, following))


class WaitQuery(Struct, frozen=True):
    timeout: Seconds = 30.0
    """Seconds, at most 60."""


@bound("wait_job", query=WaitQuery, answer=Job, others={202: Job})
async def wait_job(call: Call) -> Reply:
    job_id, timeout = call.params["job_id"], call.query(WaitQuery).timeout
    try:
        with call.attending():
            job = await call.api.wait(job_id, timeout)
    except WaitTimedOut:
        return Reply(job_json(await newest_try(call.api, await call.api.get(job_id))), 202)
    return Reply(job_json(job))


class WaitManyBody(Struct, frozen=True, forbid_unknown_fields=True):
    job_ids: Annotated[list[str], Meta(min_length=1, max_length=MAX_WAITED)]
    count: Annotated[int, Meta(ge=1)] = 1
    """How many must have ended; all, if there are fewer."""
    or_failure: bool = False
    """Answer as well when one has ended without success."""
    timeout: Seconds = 30.0
    """Seconds, at most 60."""


class WaitManyView(Struct, frozen=True):
    ended: list[Ended]
    """In the order of their ends; maybe none when the time is over, maybe fewer than have ended if
    their results are large."""


@bound("wait_jobs", body=WaitManyBody, answer=WaitManyView)
async def wait_jobs(call: Call) -> Reply:
    given = await call.json(WaitManyBody)
    with call.attending():
        ended = await call.api.wait_many(
            given.job_ids, given.count, or_failure=given.or_failure, timeout=given.timeout
        )
    _, view = VIEWS[Ended]
    return json_reply({"ended": [view(one) for one in ended]})


# -- operations on many -----------------------------------------------------------


class RetryBulkBody(JobFilter, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At least one filter, or `all`."""

    all: bool = False
    """Every job that the key can see, and that can be retried or cancelled."""


class BulkBody(RetryBulkBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """At least one filter, or `all`."""

    reason: Reason = ""


_NO_FILTER = astuple(JobFilter())


def _meant(given: RetryBulkBody, *, dead: bool) -> JobQuery:
    has_filter = astuple(given)[: len(_NO_FILTER)] != _NO_FILTER
    if has_filter == given.all:
        problem = "can't be given together with a filter" if has_filter else "no job is named"
        raise InvalidRequest("all", problem, hint="give a filter, or all: true for every job")
    return query_of(given, dead=dead)


@bound("cancel_jobs", body=BulkBody, answer=Bulk)
async def cancel_jobs(call: Call) -> Reply:
    given = await call.json(BulkBody)
    return json_reply(await call.api.cancel_many(_meant(given, dead=False), reason=given.reason))


@bound("retry_jobs", body=RetryBulkBody, answer=Bulk)
async def retry_jobs(call: Call) -> Reply:
    given = await call.json(RetryBulkBody)
    return json_reply(await call.api.retry_many(_meant(given, dead=True)))
