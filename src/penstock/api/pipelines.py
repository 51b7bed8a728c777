"""Pipeline operations whose HTTP shape differs from the engine's API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.api.operation import route
from penstock.api.reply import JSON_HEADERS, AnyReply, Reply, encode, json_reply
from penstock.api.stream import STREAMS, cursor_of, resumed
from penstock.api.submit import agreed_key, header_key
from penstock.api.table import Seconds, bound
from penstock.core.errors import InvalidRequest
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.engine_api import Reason
from penstock.workloads.pipeline.interface import MAX_PAGE, RunQuery
from penstock.workloads.pipeline.records import PipelineRecord

if TYPE_CHECKING:
    from penstock.api.call import Call


class StartBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    config: dict[str, Any] = {}
    """As the pipeline's `config_schema` says; what is left out has its default."""
    idempotency_key: str | None = None
    """The same key within a tenant is the same run. May be the Idempotency-Key header."""
    tenant: str | None = None
    """Only for keys that are of no tenant; else it is the key's own."""
    retry_of: str | None = None
    """A run whose finished items this one takes over."""


class RunStarted(Struct, frozen=True):
    """A run that was accepted."""

    job_id: str
    trace_id: str
    pipeline: str
    status: PipelineJobStatus
    status_url: str
    """Where its record is."""
    stream_url: str
    """Where its events are."""


@bound("start_pipeline", body=StartBody, may_be_empty=True, answer=RunStarted)
async def start_pipeline(call: Call) -> Reply:
    given = await call.json(StartBody)
    record = await call.api.pipelines.start(
        call.params["name"],
        given.config,
        tenant=call.tenant(given.tenant),
        idempotency_key=agreed_key(given.idempotency_key, header_key(call)),
        retry_of=given.retry_of,
    )
    return started(record)


def started(record: PipelineRecord, here: str = "") -> Reply:
    """202, with where the run's record is: `here`, or its path under `/v1/runs`."""
    # An id has no character that a path would want escaped (penstock.core.check).
    here = here or f"/v1/runs/{record.id}"
    answer = RunStarted(
        record.id, record.trace_id, record.pipeline, record.status, here, f"{here}/stream"
    )
    return Reply(encode(answer), 202, (*JSON_HEADERS, (b"location", here.encode())))


class NoFields(Struct, frozen=True, forbid_unknown_fields=True):
    """An empty body."""


@bound("retry_failed", body=NoFields, may_be_empty=True, answer=RunStarted)
async def retry_failed(call: Call) -> Reply:
    await call.json(NoFields)
    return started(await call.api.pipelines.retry_failed(call.params["job_id"]))


# -- following --------------------------------------------------------------------


class RunStreamQuery(Struct, frozen=True):
    after: str | None = None
    """Only events after the one with this id. The header Last-Event-ID wins."""


_STREAM: dict[str, Any] = {
    **STREAMS,
    "query": RunStreamQuery,
    "others": {204: None},
    "refusals": (404, 422, 429),
}
_JOBS = "/v1/pipeline/jobs"
"""The paths of seed 002, over the same runs."""


@route("GET /v1/runs/{job_id}/stream", **_STREAM)
@route(
    f"GET {_JOBS}/{{job_id}}/stream",
    name="stream_pipeline_job",
    summary="Follow a run (seed 002)",
    description="As `GET /v1/runs/{job_id}/stream`.",
    **_STREAM,
)
async def stream_run(call: Call) -> AnyReply:
    """Follow a run.

    From its first event on, or after one: `job_start`, `stage_start`, `stage_progress`,
    `stage_complete`, `custom`; ends after `job_complete`. Ids are those of the history of the run's
    job; `stage_progress` is live only and has no id. 204 if nothing came after the id that was
    given and nothing will, so that a browser does not come back.
    """
    place = resumed(call, call.query(RunStreamQuery).after)
    after = 0 if place is None else cursor_of(place, "after")
    return await call.services.events.run(call.api, call.params["job_id"], after)


# -- the paths of seed 002, over the same runs ---------------------------------------------

_MOST = 500
_Config = dict[str, Any]


class PipelineJobListing(Struct, frozen=True, kw_only=True):
    status: PipelineJobStatus | None = None
    limit: Annotated[int, Meta(ge=1, le=_MOST)] = 10


class PipelineJobList(Struct, frozen=True):
    jobs: list[PipelineRecord]
    """Newest first."""
    total: int
    """How many are in this answer."""
    running_count: int
    """How many are RUNNING, of all there are; counted up to 1000."""


@route(f"GET {_JOBS}", query=PipelineJobListing, answer=PipelineJobList, refusals=(422,))
async def list_pipeline_jobs(call: Call) -> Reply:
    """List runs (seed 002).

    The newest ones. `GET /v1/runs` has more conditions, and pages.
    """
    given, pipelines = call.query(PipelineJobListing), call.api.pipelines
    statuses = () if given.status is None else (given.status,)
    found = await pipelines.runs(RunQuery(statuses=statuses, limit=given.limit))
    running = RunQuery(statuses=(PipelineJobStatus.RUNNING,), limit=MAX_PAGE)
    count = len(await pipelines.runs(running))
    return json_reply(PipelineJobList(found, len(found), count))


class CancelBody(Struct, frozen=True, forbid_unknown_fields=True):
    reason: Reason = ""
    timeout: Seconds = 10.0
    """Seconds to wait for running work to end."""


class PipelineJobCancelled(Struct, frozen=True):
    cancelled: bool
    """Whether the request was accepted."""
    message: str | UnsetType = UNSET
    """With `cancelled` true: what became of it."""
    reason: str | UnsetType = UNSET
    """With `cancelled` false: why."""


@bound(
    "cancel_run",
    path=f"{_JOBS}/{{job_id}}/cancel",
    name="cancel_pipeline_job",
    body=CancelBody,
    may_be_empty=True,
    answer=PipelineJobCancelled,
    summary="Cancel a run (seed 002)",
    description="`cancelled` is false for a run that had ended, and `reason` says so.",
)
async def cancel_pipeline_job(call: Call) -> Reply:
    given = await call.json(CancelBody)
    with call.attending():
        answer = await call.api.pipelines.cancel(
            call.params["job_id"], reason=given.reason, timeout=given.timeout
        )
    if not answer.accepted:
        return json_reply(PipelineJobCancelled(False, reason=answer.reason))
    return json_reply(PipelineJobCancelled(True, message=f"job is {answer.status}"))


class ScheduledRunQuery(Struct, frozen=True):
    pipeline: str = ""
    """Its name. Required."""


@bound(
    "start_pipeline",
    path="/v1/pipeline/scheduled-run-async",
    name="start_scheduled_run",
    query=ScheduledRunQuery,
    body=_Config,
    may_be_empty=True,
    answer=RunStarted,
    summary="Start a pipeline (seed 002)",
    description="As `POST /v1/pipelines/{name}/runs`; the body is the config itself, and the URLs "
    "of the answer are those of `/v1/pipeline/jobs`.",
)
async def start_scheduled_run(call: Call) -> Reply:
    name, config = call.query(ScheduledRunQuery).pipeline, await call.json(_Config)
    if not name:
        raise InvalidRequest("pipeline", "is required", hint="GET /v1/pipelines lists them")
    record = await call.api.pipelines.start(name, config, tenant=call.tenant(None))
    return started(record, f"{_JOBS}/{record.id}")


@bound(
    "get_run",
    path=f"{_JOBS}/{{job_id}}",
    name="get_pipeline_job",
    answer=PipelineRecord,
    summary="Get a run's record (seed 002)",
    description="",
)
async def get_pipeline_job(call: Call) -> Reply:
    return json_reply(await call.api.pipelines.get(call.params["job_id"]))
