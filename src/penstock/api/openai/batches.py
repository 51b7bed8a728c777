"""Batches, as OpenAI has them: a file of requests, answered in its own time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct

from penstock.api.openai.errors import OpenAiOperation
from penstock.api.openai.files import Page
from penstock.api.reply import Reply, json_reply
from penstock.ports.engine_api import KeyRole
from penstock.workloads.llm.batches import Batch, BatchError, PageQuery, RequestCounts

if TYPE_CHECKING:
    from penstock.api.call import Call


class BatchErrors(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: tuple[BatchError, ...]


class BatchObject(Struct, frozen=True, kw_only=True):
    id: str
    """Also the `workflow_id` of its jobs."""
    object: Literal["batch"] = "batch"
    endpoint: str
    errors: BatchErrors | None
    """What is wrong with its input, line by line."""
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None

    @classmethod
    def of(cls, batch: Batch) -> BatchObject:
        fields: dict[str, Any] = {
            name: getattr(batch, name, None) for name in cls.__struct_fields__
        }
        times = {
            name: int(at) for name, at in fields.items() if name.endswith("_at") and at is not None
        }
        fields |= times | {"object": "batch"}
        if not batch.has_ended:
            fields["expired_at"] = None
        errors = BatchErrors(data=batch.errors) if batch.errors else None
        return cls(**fields | {"errors": errors})


class BatchList(Page, frozen=True, kw_only=True):
    data: tuple[BatchObject, ...]


class Lifetime(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)]


class BatchBody(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input_file_id: str
    """A file with the purpose `batch`: up to 50,000 lines, each with a `custom_id` of its own, the
    `method` POST, the batch's endpoint as `url`, and a `body`."""
    endpoint: str
    """`/v1/chat/completions`, `/v1/completions` or `/v1/embeddings`."""
    completion_window: str
    """As `24h`: what has not run by then never does."""
    metadata: dict[str, str] | None = None
    """Up to 16 pairs."""
    output_expires_after: Lifetime | None = None
    """For how long its files are kept."""


class BatchQuery(Struct, frozen=True):
    after: str | None = None
    """The id that ended the page before."""
    limit: Annotated[int, Meta(ge=1, le=100)] = 20


async def create_batch(call: Call) -> Reply:
    body = await call.json(BatchBody)
    kept = body.output_expires_after
    batch = await call.api.batches.create(
        body.input_file_id,
        body.endpoint,
        completion_window=body.completion_window,
        metadata=body.metadata,
        output_expires_after=None if kept is None else kept.seconds,
    )
    return json_reply(BatchObject.of(batch))


async def list_batches(call: Call) -> Reply:
    query = call.query(BatchQuery)
    found = await call.api.batches.list(PageQuery(after=query.after, limit=query.limit + 1))
    return json_reply(BatchList.of([*map(BatchObject.of, found)], query.limit))


async def get_batch(call: Call) -> Reply:
    return json_reply(BatchObject.of(await call.api.batches.get(call.params["batch_id"])))


async def cancel_batch(call: Call) -> Reply:
    return json_reply(BatchObject.of(await call.api.batches.cancel(call.params["batch_id"])))


OPERATIONS = (
    OpenAiOperation(
        "POST",
        "/v1/batches",
        create_batch,
        role=KeyRole.SUBMIT,
        body=BatchBody,
        answer=BatchObject,
        refusals=(404,),
        summary="Have the requests of a file answered",
        description=(
            "Each line becomes a job. A batch is durable: it survives any restart, is taken up "
            "where it stood, and no line is lost or answered twice. A wrong line fails it before "
            "anything is submitted, and `errors` names the line."
        ),
    ),
    OpenAiOperation(
        "GET",
        "/v1/batches",
        list_batches,
        query=BatchQuery,
        answer=BatchList,
        refusals=(404,),
        summary="List batches, newest first",
    ),
    OpenAiOperation(
        "GET",
        "/v1/batches/{batch_id}",
        get_batch,
        answer=BatchObject,
        refusals=(404,),
        summary="Get a batch",
        description="With how many of its requests have been answered, and its files in the end.",
    ),
    OpenAiOperation(
        "POST",
        "/v1/batches/{batch_id}/cancel",
        cancel_batch,
        role=KeyRole.SUBMIT,
        answer=BatchObject,
        refusals=(404, 409),
        summary="Cancel a batch",
        description="What runs is ended; what was answered is in its files.",
    ),
)
