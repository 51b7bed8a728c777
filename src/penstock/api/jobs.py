"""Jobs, one and many: their records, and what is asked of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Raw, Struct
from msgspec.structs import replace

from penstock.api.operation import Operation, Pace
from penstock.api.reply import Headers, Reply, encode, json_reply
from penstock.api.selection import DeadListing, JobListing, Limit, page_of, query_of
from penstock.core.errors import InvalidRequest, WaitTimedOut
from penstock.core.job import Job
from penstock.core.journal import Transition
from penstock.core.ledger import Step
from penstock.lifecycles.canonical import JobState
from penstock.ports.engine_api import MAX_WAITED, Ended, newest_try
from penstock.ports.store import JobQuery, LogLine, StepCount, StepQuery

if TYPE_CHECKING:
    from penstock.api.call import Call

_PAGES = b',"pages":'


def job_json(job: Job) -> bytes:
    # An id has no character that JSON would want escaped (penstock.core.check). Its journal
    # pages, the last field, are the engine's own business.
    body = encode(job)
    return b'{"job_id":"%b",%b}' % (job.request.job_id.encode(), body[1 : body.rindex(_PAGES)])


def raw(job: Job) -> Raw:
    """For an answer that has a job within it."""
    return Raw(job_json(job))


def list_json(jobs: Iterable[Job]) -> bytes:
    return b"[%b]" % b",".join([job_json(job) for job in jobs])


def job_reply(job: Job, status: int = 200) -> Reply:
    return Reply(job_json(job), status)


class JobPage(Struct, frozen=True):
    jobs: tuple[Job, ...]
    next: str | None
    """The `cursor` of the next page; null on the last."""


class CancelView(Struct, frozen=True):
    job: Job
    ended: bool
    """False while a worker still holds work that was asked to end."""


def located(job: Job) -> Headers:
    return (
        (b"content-type", b"application/json"),
        (b"cache-control", b"no-store"),
        (b"location", b"/v1/jobs/" + job.request.job_id.encode()),
    )


MAX_WAIT = 60.0
Seconds = Annotated[float, Meta(ge=0, le=MAX_WAIT)]


async def list_jobs(call: Call) -> Reply:
    given = call.query(JobListing)
    query = query_of(given, dead=given.dead)
    query = replace(query, tries=given.tries, before=given.before, since=given.since)
    return await _page(call, query, given)


async def list_dead(call: Call) -> Reply:
    given = call.query(DeadListing)
    return await _page(call, query_of(given, dead=True), given)


async def _page(call: Call, query: JobQuery, paging: JobListing | DeadListing) -> Reply:
    jobs, following = await page_of(call.api, query, paging.order, paging.limit, paging.cursor)
    return Reply(b'{"jobs":%b,"next":%b}' % (list_json(jobs), encode(following)))


class GetQuery(Struct, frozen=True):
    why: bool = False
    """Whether to say, in `why`, what it waits for or what is happening to it."""


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


async def why_job(call: Call) -> Reply:
    job_id = call.params["job_id"]
    return json_reply(Why(job_id, await call.api.why(job_id)))


class History(Struct, frozen=True):
    transitions: list[Transition]


async def get_history(call: Call) -> Reply:
    return json_reply(History(await call.api.history(call.params["job_id"])))


class LogQuery(Struct, frozen=True):
    after: Annotated[int, Meta(ge=0, le=(1 << 53))] = 0
    """The `n` of the last line that is known."""
    limit: Limit = 1000


class Log(Struct, frozen=True):
    lines: list[LogLine]


async def get_logs(call: Call) -> Reply:
    query = call.query(LogQuery)
    lines = await call.api.read_log(call.params["job_id"], query.after, query.limit)
    return json_reply(Log(lines))


class StepListing(Struct, frozen=True):
    name: str | None = None
    """Only rows of this name."""
    cursor: str | None = None
    """`next` of the page before."""
    limit: Limit = 1000


class Steps(Struct, frozen=True):
    steps: list[Step]
    next: str | None
    """The `cursor` of the following page; null where there is none."""


async def get_steps(call: Call) -> Reply:
    query = call.query(StepListing)
    after = None if query.cursor is None else _step_after(query.cursor)
    wanted = StepQuery(name=query.name, after=after, limit=query.limit)
    page = await call.api.read_steps(call.params["job_id"], wanted)
    last = page.last
    return json_reply(Steps(page.steps, last and f"{last[1]}:{last[0]}"))


def _step_after(cursor: str) -> tuple[str, int]:
    number, _, name = cursor.partition(":")
    if not (name and number.isascii() and number.isdigit() and len(number) < 17):
        raise InvalidRequest("cursor", "must be the `next` of an earlier page")
    return name, int(number)


class StepCounts(Struct, frozen=True):
    counts: list[StepCount]


async def count_steps(call: Call) -> Reply:
    return json_reply(StepCounts(await call.api.count_steps(call.params["job_id"])))


class ChildCounts(Struct, frozen=True):
    counts: dict[JobState, int]


async def count_children(call: Call) -> Reply:
    return json_reply(ChildCounts(await call.api.count_children(call.params["job_id"])))


class WaitQuery(Struct, frozen=True):
    timeout: Seconds = 30.0
    """Seconds, at most 60."""


async def wait_job(call: Call) -> Reply:
    job_id, timeout = call.params["job_id"], call.query(WaitQuery).timeout
    try:
        with call.attending():
            job = await call.api.wait(job_id, timeout)
    except WaitTimedOut:
        return job_reply(await newest_try(call.api, await call.api.get(job_id)), 202)
    return job_reply(job)


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


async def wait_jobs(call: Call) -> Reply:
    given = await call.json(WaitManyBody)
    with call.attending():
        ended = await call.api.wait_many(
            given.job_ids, given.count, or_failure=given.or_failure, timeout=given.timeout
        )
    parts = [b'{"job_id":%b,"job":%b}' % (encode(one.job_id), job_json(one.job)) for one in ended]
    return Reply(b'{"ended":[%b]}' % b",".join(parts))


OPERATIONS = (
    Operation(
        "GET",
        "/v1/jobs",
        list_jobs,
        query=JobListing,
        answer=JobPage,
        refusals=(422,),
        summary="List jobs",
        description=(
            "A job and its retries are one: the record of the newest try. A page at a time; `next` "
            "of a page is the `cursor` of the following one. Pages are stable: a job that comes in "
            "between shifts nothing and is not shown twice; one that is retried in between moves "
            "to where new jobs are."
        ),
    ),
    Operation(
        "GET",
        "/v1/dead",
        list_dead,
        query=DeadListing,
        answer=JobPage,
        refusals=(422,),
        summary="List dead letters",
        description="What ended FAILED or TIMEOUT and was not retried.",
    ),
    Operation(
        "GET",
        "/v1/jobs/{job_id}",
        get_job,
        query=GetQuery,
        answer=Job,
        refusals=(404,),
        summary="Get a job's record",
        description="Of the try with this id. If it was retried, `successor` names the retry.",
    ),
    Operation(
        "GET",
        "/v1/jobs/{job_id}/why",
        why_job,
        answer=Why,
        refusals=(404,),
        summary="Why a job is where it is",
        description=(
            "If the try with this id was retried, how it ended, and what is happening to the "
            "newest try."
        ),
    ),
    Operation(
        "GET",
        "/v1/jobs/{job_id}/history",
        get_history,
        answer=History,
        refusals=(404,),
        summary="Get a job's history",
        description="Every transition, oldest first.",
    ),
    Operation(
        "GET",
        "/v1/jobs/{job_id}/logs",
        get_logs,
        query=LogQuery,
        answer=Log,
        refusals=(404, 422),
        summary="Get what a job logged",
    ),
    Operation(
        "GET",
        "/v1/jobs/{job_id}/steps",
        get_steps,
        query=StepListing,
        answer=Steps,
        refusals=(404, 422),
        summary="List the rows that a job checkpointed",
        description=(
            "In the order of name and number, a page at a time; a page of long rows may have fewer "
            "than `limit`."
        ),
    ),
    Operation(
        "GET",
        "/v1/jobs/{job_id}/steps/counts",
        count_steps,
        answer=StepCounts,
        refusals=(404,),
        summary="Count the rows that a job checkpointed",
        description="By name and outcome.",
    ),
    Operation(
        "GET",
        "/v1/jobs/{job_id}/children/counts",
        count_children,
        answer=ChildCounts,
        refusals=(404,),
        summary="Count the jobs that were submitted inside a job",
        description=(
            "By state, each with its retries as one. `GET /v1/jobs?child_of=` lists them, by the "
            "first try of the parent."
        ),
    ),
    Operation(
        "GET",
        "/v1/jobs/{job_id}/wait",
        wait_job,
        query=WaitQuery,
        answer=Job,
        others={202: Job},
        refusals=(404, 422),
        pace=Pace.WAITS,
        summary="Wait for a job's end",
        description=(
            "200 with the final record, following retries, as soon as it has ended; 202 with the "
            "record of the newest try as it is when the time ran out first. Ask again then."
        ),
    ),
    Operation(
        "POST",
        "/v1/jobs:wait",
        wait_jobs,
        body=WaitManyBody,
        answer=WaitManyView,
        refusals=(404, 415, 422),
        pace=Pace.WAITS,
        summary="Wait for the ends of many jobs",
        description=(
            "Answers when `count` of them have ended, following retries, and tells of all that "
            "have; with none when the time ran out first. Ask again for the others."
        ),
    ),
)
