"""Pipeline operations whose HTTP shape differs from the engine's API."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import Struct

from penstock.api.operation import Operation, Pace
from penstock.api.reply import JSON_HEADERS, AnyReply, Reply, encode
from penstock.api.stream import cursor_of, resumed
from penstock.api.submit import agreed_key, header_key
from penstock.api.table import bound
from penstock.lifecycles.pipeline import PipelineJobStatus
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


async def retry_failed(call: Call) -> Reply:
    await call.json(NoFields)
    return started(await call.api.pipelines.retry_failed(call.params["job_id"]))


# -- following --------------------------------------------------------------------


class RunStreamQuery(Struct, frozen=True):
    after: str | None = None
    """Only events after the one with this id. The header Last-Event-ID wins."""


async def stream_run(call: Call) -> AnyReply:
    place = resumed(call, call.query(RunStreamQuery).after)
    after = 0 if place is None else cursor_of(place, "after")
    return await call.services.events.run(call.api, call.params["job_id"], after)


STREAM = Operation(
    "GET",
    "/v1/runs/{job_id}/stream",
    stream_run,
    query=RunStreamQuery,
    answer=bytes,
    answer_type="text/event-stream",
    others={204: None},
    refusals=(404, 422, 429),
    pace=Pace.STREAMS,
    summary="Follow a run",
    description=(
        "From its first event on, or after one: `job_start`, `stage_start`, `stage_progress`, "
        "`stage_complete`, `custom`; ends after `job_complete`. Ids are those of the history "
        "of the run's job; `stage_progress` is live only and has no id. 204 if nothing came "
        "after the id that was given and nothing will, so that a browser does not come back."
    ),
)

START = bound(
    "start_pipeline", start_pipeline, body=StartBody, may_be_empty=True, answer=RunStarted
)
OPERATIONS = (
    START,
    bound("retry_failed", retry_failed, body=NoFields, may_be_empty=True, answer=RunStarted),
    STREAM,
)
