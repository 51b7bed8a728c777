"""The paths of seed 002, over the same runs: `/v1/pipeline/jobs` and `scheduled-run-async`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType
from msgspec.structs import replace

from penstock.api.operation import Operation
from penstock.api.pipelines import START, STREAM, started
from penstock.api.reply import Reply, json_reply
from penstock.api.table import derived
from penstock.api.views import Seconds
from penstock.core.errors import InvalidRequest
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.engine_api import Reason
from penstock.workloads.pipeline.interface import MAX_PAGE, RunQuery
from penstock.workloads.pipeline.records import PipelineRecord

if TYPE_CHECKING:
    from penstock.api.call import Call

_JOBS = "/v1/pipeline/jobs"
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


async def list_pipeline_jobs(call: Call) -> Reply:
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


async def start_scheduled_run(call: Call) -> Reply:
    name, config = call.query(ScheduledRunQuery).pipeline, await call.json(_Config)
    if not name:
        raise InvalidRequest("pipeline", "is required", hint="GET /v1/pipelines lists them")
    record = await call.api.pipelines.start(name, config, tenant=call.tenant(None))
    return started(record, f"{_JOBS}/{record.id}")


OPERATIONS = (
    replace(
        START,
        path="/v1/pipeline/scheduled-run-async",
        name="start_scheduled_run",
        handler=start_scheduled_run,
        query=ScheduledRunQuery,
        body=_Config,
        summary="Start a pipeline (seed 002)",
        description=(
            "As `POST /v1/pipelines/{name}/runs`; the body is the config itself, and the URLs of "
            "the answer are those of `/v1/pipeline/jobs`."
        ),
    ),
    Operation(
        "GET",
        _JOBS,
        list_pipeline_jobs,
        query=PipelineJobListing,
        answer=PipelineJobList,
        refusals=(422,),
        summary="List runs (seed 002)",
        description="The newest ones. `GET /v1/runs` has more conditions, and pages.",
    ),
    replace(
        derived("get_run"),
        path=f"{_JOBS}/{{job_id}}",
        name="get_pipeline_job",
        summary="Get a run's record (seed 002)",
        description="",
    ),
    replace(
        derived("cancel_run"),
        path=f"{_JOBS}/{{job_id}}/cancel",
        name="cancel_pipeline_job",
        handler=cancel_pipeline_job,
        body=CancelBody,
        answer=PipelineJobCancelled,
        summary="Cancel a run (seed 002)",
        description="`cancelled` is false for a run that had ended, and `reason` says so.",
    ),
    replace(
        STREAM,
        path=f"{_JOBS}/{{job_id}}/stream",
        name="stream_pipeline_job",
        summary="Follow a run (seed 002)",
        description="As `GET /v1/runs/{job_id}/stream`.",
    ),
)
