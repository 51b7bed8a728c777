"""Pipelines that can be started, starting them, and their circuit breakers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from penstock.api.operation import Operation
from penstock.api.reply import NO_STORE, Reply, encode, json_reply
from penstock.api.submit import agreed_key, header_key
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.engine_api import KeyRole
from penstock.workloads.pipeline.records import Breaker, PipelineInfo, PipelineRecord

if TYPE_CHECKING:
    from penstock.api.call import Call


class PipelineList(Struct, frozen=True):
    pipelines: list[PipelineInfo]


async def list_pipelines(call: Call) -> Reply:
    return json_reply(PipelineList(await call.api.pipelines.list()))


async def get_pipeline(call: Call) -> Reply:
    return json_reply(await call.api.pipelines.show(call.params["name"]))


# -- starting ---------------------------------------------------------------------


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
    location = (b"location", here.encode())
    return Reply(encode(answer), 202, ((b"content-type", b"application/json"), NO_STORE, location))


# -- breakers ---------------------------------------------------------------------


class BreakerList(Struct, frozen=True):
    breakers: list[Breaker]


async def list_breakers(call: Call) -> Reply:
    return json_reply(BreakerList(await call.api.pipelines.breakers()))


async def reset_breaker(call: Call) -> Reply:
    return json_reply(await call.api.pipelines.reset_breaker(call.params["name"]))


START = Operation(
    "POST",
    "/v1/pipelines/{name}/runs",
    start_pipeline,
    role=KeyRole.SUBMIT,
    body=StartBody,
    may_be_empty=True,
    answer=RunStarted,
    status=202,
    refusals=(404, 409, 415, 422, 429),
    summary="Start a pipeline",
    description=(
        "A canonical job, accepted durably. 422 names the field, as `config.max_items`. 409 "
        "with the code PIPELINE_BUSY and the id of the job that runs, in `running`, for a "
        "pipeline that runs once at a time."
    ),
)

OPERATIONS = (
    Operation(
        "GET",
        "/v1/pipelines",
        list_pipelines,
        answer=PipelineList,
        summary="List pipelines",
        description="What can be started.",
    ),
    Operation(
        "GET",
        "/v1/pipelines/{name}",
        get_pipeline,
        answer=PipelineInfo,
        refusals=(404,),
        summary="Get a pipeline's definition",
        description="Its stages in their order, and the JSON schema of its config.",
    ),
    START,
    Operation(
        "GET",
        "/v1/breakers",
        list_breakers,
        role=KeyRole.OPERATE,
        answer=BreakerList,
        summary="List circuit breakers",
    ),
    Operation(
        "POST",
        "/v1/breakers/{name}/reset",
        reset_breaker,
        role=KeyRole.OPERATE,
        answer=Breaker,
        refusals=(404,),
        summary="Close a circuit breaker by hand",
    ),
)
