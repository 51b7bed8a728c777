"""Looking at jobs: one, many, their history and logs, and waiting for their end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from penstock.api.operation import Operation, Pace
from penstock.api.records import JobPage, job_json, job_reply, list_json
from penstock.api.reply import Reply, encode, json_reply
from penstock.api.selection import DeadListing, JobListing, Limit, page_of, query_of
from penstock.core.errors import WaitTimedOut
from penstock.core.job import Job
from penstock.core.transition import Transition
from penstock.ports.store import JobQuery, LogLine

if TYPE_CHECKING:
    from penstock.api.call import Call

MAX_WAIT = 60.0
Seconds = Annotated[float, Meta(ge=0, le=MAX_WAIT)]


async def list_jobs(call: Call) -> Reply:
    given = call.query(JobListing)
    query = replace(query_of(given, dead=given.dead), before=given.before, since=given.since)
    return await _page(call, query, given)


async def list_dead(call: Call) -> Reply:
    given = call.query(DeadListing)
    return await _page(call, query_of(given, dead=True), given)


async def _page(call: Call, query: JobQuery, paging: JobListing | DeadListing) -> Reply:
    jobs, following = await page_of(call.desk, query, paging.order, paging.limit, paging.cursor)
    return Reply(b'{"jobs":%b,"next":%b}' % (list_json(jobs), encode(following)))


class GetQuery(Struct, frozen=True):
    why: bool = False
    """Whether to say, in `why`, what it waits for or what is happening to it."""


async def get_job(call: Call) -> Reply:
    job_id = call.params["job_id"]
    if not call.scope["query_string"] or not call.query(GetQuery).why:
        return Reply(job_json(await call.desk.get(job_id)))
    job = await call.desk.get(job_id)
    why = encode(await call.desk.why(job_id))
    return Reply(b'%b,"why":%b}' % (job_json(job)[:-1], why))


class Why(Struct, frozen=True):
    job_id: str
    why: str
    """What it waits for, or what is happening to it, in one sentence."""


async def why_job(call: Call) -> Reply:
    job_id = call.params["job_id"]
    return json_reply(Why(job_id, await call.desk.why(job_id)))


class History(Struct, frozen=True):
    transitions: list[Transition]


async def get_history(call: Call) -> Reply:
    return json_reply(History(await call.desk.history(call.params["job_id"])))


class LogQuery(Struct, frozen=True):
    after: Annotated[int, Meta(ge=0, le=(1 << 53))] = 0
    """The `n` of the last line that is known."""
    limit: Limit = 1000


class Log(Struct, frozen=True):
    lines: list[LogLine]


async def get_logs(call: Call) -> Reply:
    query = call.query(LogQuery)
    lines = await call.desk.read_log(call.params["job_id"], query.after, query.limit)
    return json_reply(Log(lines))


class WaitQuery(Struct, frozen=True):
    timeout: Seconds = 30.0
    """Seconds, at most 60."""


async def wait_job(call: Call) -> Reply:
    job_id, timeout = call.params["job_id"], call.query(WaitQuery).timeout
    try:
        with call.attending():
            job = await call.desk.wait(job_id, timeout)
    except WaitTimedOut:
        return job_reply(await call.desk.get(job_id), 202)
    return job_reply(job)


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
            "A page at a time; `next` of a page is the `cursor` of the following one. Pages are "
            "stable: a job that comes in between shifts nothing and is not shown twice."
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
    ),
    Operation(
        "GET",
        "/v1/jobs/{job_id}/why",
        why_job,
        answer=Why,
        refusals=(404,),
        summary="Why a job is where it is",
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
            "record as it is when the time ran out first. Ask again then."
        ),
    ),
)
