"""Runs of pipelines: their records and items, their events, and ending and repeating them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct

from penstock.api.actions import NoFields, Reason
from penstock.api.events import resumed
from penstock.api.jobs import Seconds
from penstock.api.operation import Operation, Pace
from penstock.api.pipelines import RunStarted, started
from penstock.api.reply import AnyReply, Reply, json_reply
from penstock.api.selection import Limit, run_cursor, run_place
from penstock.api.stream import cursor_of
from penstock.core.errors import InvalidRequest
from penstock.lifecycles.pipeline import PipelineJobStatus
from penstock.ports.engine_api import KeyRole
from penstock.workloads.pipeline.interface import CancelAnswer, ItemView, RunQuery, item_view
from penstock.workloads.pipeline.records import ItemOutcome, PipelineRecord

if TYPE_CHECKING:
    from penstock.api.call import Call

_MOST = 500


class RunListing(Struct, frozen=True, kw_only=True):
    """All conditions must hold."""

    pipeline: str | None = None
    status: tuple[PipelineJobStatus, ...] = ()
    """May come several times: any of them."""
    tenant: str | None = None
    retry_of: str | None = None
    """Only those that retry this run."""
    before: float | None = None
    """Created before this time, in seconds since the epoch."""
    before_id: str | None = None
    """With `before`: of those created at that very time, the ids before this one, too."""
    limit: Annotated[int, Meta(ge=1, le=_MOST)] = 50
    cursor: str | None = None
    """`next` of the page before."""


class RunPage(Struct, frozen=True):
    runs: list[PipelineRecord]
    """Newest first."""
    next: str | None
    """The `cursor` of the next page; null on the last."""


async def list_runs(call: Call) -> Reply:
    given = call.query(RunListing)
    query = RunQuery(
        pipeline=given.pipeline,
        statuses=given.status,
        tenant=given.tenant,
        retry_of=given.retry_of,
        before=run_place(given.cursor) or _before(given),
        limit=given.limit + 1,
    )
    found = await call.api.pipelines.runs(query)
    shown, following = found[: given.limit], None
    if len(found) > given.limit:
        following = run_cursor(shown[-1].created_at, shown[-1].id)
    return json_reply(RunPage(shown, following))


def _before(given: RunListing) -> tuple[float, str] | None:
    if given.before is None:
        if given.before_id is not None:
            raise InvalidRequest("before_id", "can't be given without before")
        return None
    return given.before, given.before_id or ""


async def get_run(call: Call) -> Reply:
    return json_reply(await call.api.pipelines.get(call.params["job_id"]))


# -- items ------------------------------------------------------------------------


class ItemListing(Struct, frozen=True, kw_only=True):
    outcome: tuple[ItemOutcome, ...] = ()
    """May come several times: any of them."""
    after: Annotated[int, Meta(ge=-1, le=(1 << 53))] = -1
    """The `seq` of the last item that is known."""
    limit: Limit = 100


class ItemList(Struct, frozen=True):
    items: list[ItemView]
    """In their order; ask again after the last one, until there are fewer than `limit`."""


async def list_items(call: Call) -> Reply:
    given = call.query(ItemListing)
    items = await call.api.pipelines.items(
        call.params["job_id"],
        call.params["stage"],
        after=given.after,
        limit=given.limit,
        outcomes=given.outcome,
    )
    return json_reply(ItemList([item_view(item) for item in items]))


# -- ending, repeating, following -------------------------------------------------


class CancelRunBody(Struct, frozen=True, forbid_unknown_fields=True):
    reason: Reason = ""
    timeout: Seconds = 10.0
    """Seconds to wait for running work to end."""


async def cancel_answer(call: Call) -> CancelAnswer:
    given = await call.json(CancelRunBody)
    with call.attending():
        return await call.api.pipelines.cancel(
            call.params["job_id"], reason=given.reason, timeout=given.timeout
        )


async def cancel_run(call: Call) -> Reply:
    return json_reply(await cancel_answer(call))


async def retry_failed(call: Call) -> Reply:
    await call.json(NoFields)
    return started(await call.api.pipelines.retry_failed(call.params["job_id"]))


class RunStreamQuery(Struct, frozen=True):
    after: str | None = None
    """Only events after the one with this id. The header Last-Event-ID wins."""


async def stream_run(call: Call) -> AnyReply:
    place = resumed(call, call.query(RunStreamQuery).after)
    after = 0 if place is None else cursor_of(place, "after")
    return await call.services.events.run(call.api, call.params["job_id"], after)


_PATH = "/v1/runs/{job_id}"

GET = Operation(
    "GET",
    _PATH,
    get_run,
    answer=PipelineRecord,
    refusals=(404,),
    summary="Get a run's record",
    description="Of one shape while it runs and after.",
)
CANCEL = Operation(
    "POST",
    _PATH + "/cancel",
    cancel_run,
    role=KeyRole.SUBMIT,
    body=CancelRunBody,
    may_be_empty=True,
    answer=CancelAnswer,
    refusals=(404, 415, 422),
    pace=Pace.WAITS,
    summary="Cancel a run",
    description=(
        "Cancel and finish race; `status` says which won. `accepted` is false for a run that "
        "had ended, and `reason` says so."
    ),
)
STREAM = Operation(
    "GET",
    _PATH + "/stream",
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

OPERATIONS = (
    Operation(
        "GET",
        "/v1/runs",
        list_runs,
        query=RunListing,
        answer=RunPage,
        refusals=(422,),
        summary="List runs of pipelines",
        description=(
            "A page at a time; `next` of a page is the `cursor` of the following one. Pages are "
            "stable: a run that comes in between shifts nothing and is not shown twice."
        ),
    ),
    GET,
    Operation(
        "GET",
        _PATH + "/stages/{stage}/items",
        list_items,
        query=ItemListing,
        answer=ItemList,
        refusals=(404, 422),
        summary="List the items of a stage",
        description="Each with its outcome, attempts and error.",
    ),
    CANCEL,
    Operation(
        "POST",
        _PATH + "/retry-failed",
        retry_failed,
        role=KeyRole.SUBMIT,
        body=NoFields,
        may_be_empty=True,
        answer=RunStarted,
        status=202,
        refusals=(404, 409, 415, 422, 429),
        summary="Run again what failed in a run",
        description=(
            "A new run, linked by `retry_of`, of the items that failed and what depends on them. "
            "409 unless the run has ended; 422 if nothing failed in it."
        ),
    ),
    STREAM,
)
