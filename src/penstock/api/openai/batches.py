"""Files and batches, as OpenAI has them: a file of requests, answered in its own time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from msgspec import UNSET, Meta, Struct, UnsetType, field

from penstock.api.decoding import decoder
from penstock.api.openai.answers import JobOrigin
from penstock.api.openai.endpoints import BATCHED
from penstock.api.openai.errors import ModelNotFound, OpenAiError, tell
from penstock.api.openai.form import FORM, read_form
from penstock.api.openai.images import refuse_urls
from penstock.api.openai.requests import Generating, read_request
from penstock.api.operation import route
from penstock.api.ranges import download
from penstock.api.reply import AnyReply, Reply, encode, json_reply
from penstock.core.errors import InvalidRequest, PenstockError, UnknownTopic
from penstock.core.job import Job
from penstock.ports.engine_api import KeyRole
from penstock.workloads.llm.batches import (
    Batch,
    BatchError,
    FileUpload,
    LineRequest,
    PageQuery,
    RequestCounts,
    StoredFile,
)
from penstock.workloads.llm.values import is_model_name, topic_of

if TYPE_CHECKING:
    from penstock.api.call import Call

# -- files --------------------------------------------------------------------------

_LINES = "application/jsonl"


class FileObject(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    expires_at: int | UnsetType = UNSET

    @classmethod
    def of(cls, file: StoredFile) -> FileObject:
        return cls(
            id=file.id,
            bytes=file.bytes,
            created_at=int(file.created_at),
            filename=file.filename,
            purpose=file.purpose,
            expires_at=UNSET if file.expires_at is None else int(file.expires_at),
        )


class Page(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: tuple[Any, ...]
    first_id: str | None
    last_id: str | None
    has_more: bool

    @classmethod
    def of(cls, found: Sequence[Any], limit: int) -> Self:
        """The first of what was found; there are more if more were found."""
        data = tuple(found[:limit])
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return cls(data=data, first_id=first, last_id=last, has_more=len(found) > limit)


class FileList(Page, frozen=True, kw_only=True):
    data: tuple[FileObject, ...]


class FileDeleted(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class FileForm(Struct, frozen=True, kw_only=True):
    file: Annotated[str, Meta(extra_json_schema={"format": "binary"})]
    """For a batch: one request a line (JSONL)."""
    purpose: Literal["batch"]
    anchor: Literal["created_at"] | None = field(name="expires_after[anchor]", default=None)
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)] | None = field(
        name="expires_after[seconds]", default=None
    )
    """For how long it is kept; else it is what the engine's retention says."""


class FileQuery(Struct, frozen=True):
    purpose: str | None = None
    after: str | None = None
    """The id that ended the page before."""
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"


@route(
    "POST /v1/files",
    role=KeyRole.SUBMIT,
    body=FileForm,
    body_type=FORM,
    large=True,
    answer=FileObject,
    refusals=(404,),
)
async def create_file(call: Call) -> Reply:
    """Upload a file for a batch.

    Of any size up to the setting `openai.max_file`; it is written as it comes.
    """
    upload = FileUpload(call.api.batches)
    try:
        form = await read_form(call, FileForm, upload.write)
        if (form.anchor is None) != (form.seconds is None):
            raise InvalidRequest("expires_after", "needs anchor and seconds")
        file = await upload.keep(
            form.file, form.purpose, tenant=call.tenant(), expires_after=form.seconds
        )
    finally:
        await upload.drop()
    return json_reply(FileObject.of(file))


@route("GET /v1/files", query=FileQuery, answer=FileList, refusals=(404,))
async def list_files(call: Call) -> Reply:
    """List files, newest first."""
    query = call.query(FileQuery)
    limit = query.limit
    found = await call.api.batches.files(
        PageQuery(
            purpose=query.purpose,
            after=query.after,
            limit=limit + 1,
            oldest_first=query.order == "asc",
        )
    )
    return json_reply(FileList.of([*map(FileObject.of, found)], limit))


@route("GET /v1/files/{file_id}", answer=FileObject, refusals=(404,))
async def get_file(call: Call) -> Reply:
    """Get a file's record."""
    return json_reply(FileObject.of(await call.api.batches.file(call.params["file_id"])))


@route(
    "GET /v1/files/{file_id}/content",
    answer=bytes,
    answer_type=_LINES,
    others={206: bytes, 304: None},
    refusals=(404, 416),
)
async def get_file_content(call: Call) -> AnyReply:
    """Download a file.

    Whole, or in parts with `Range`.
    """
    file = await call.api.batches.file(call.params["file_id"])
    etag = b'"%b-%d"' % (file.id.encode(), int(file.created_at * 1e6))
    headers = ((b"content-type", _LINES.encode()), (b"content-disposition", b"attachment"))
    return download(call, file.bytes, etag, headers, partial(call.api.batches.read_file, file.id))


@route(
    "DELETE /v1/files/{file_id}",
    role=KeyRole.SUBMIT,
    answer=FileDeleted,
    refusals=(404, 409),
)
async def delete_file(call: Call) -> Reply:
    """Delete a file.

    Not while it is the input of a batch that has not ended.
    """
    file_id = call.params["file_id"]
    await call.api.batches.delete_file(file_id)
    return json_reply(FileDeleted(id=file_id))


# -- batches ------------------------------------------------------------------------


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


@route(
    "POST /v1/batches",
    role=KeyRole.SUBMIT,
    body=BatchBody,
    answer=BatchObject,
    refusals=(404,),
)
async def create_batch(call: Call) -> Reply:
    """Have the requests of a file answered.

    Each line becomes a job. A batch is durable: it survives any restart, is taken up where it
    stood, and no line is lost or answered twice. A wrong line fails it before anything is
    submitted, and `errors` names the line.
    """
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


@route("GET /v1/batches", query=BatchQuery, answer=BatchList, refusals=(404,))
async def list_batches(call: Call) -> Reply:
    """List batches, newest first."""
    query = call.query(BatchQuery)
    found = await call.api.batches.list(PageQuery(after=query.after, limit=query.limit + 1))
    return json_reply(BatchList.of([*map(BatchObject.of, found)], query.limit))


@route("GET /v1/batches/{batch_id}", answer=BatchObject, refusals=(404,))
async def get_batch(call: Call) -> Reply:
    """Get a batch.

    With how many of its requests have been answered, and its files in the end.
    """
    return json_reply(BatchObject.of(await call.api.batches.get(call.params["batch_id"])))


@route(
    "POST /v1/batches/{batch_id}/cancel",
    role=KeyRole.SUBMIT,
    answer=BatchObject,
    refusals=(404, 409),
)
async def cancel_batch(call: Call) -> Reply:
    """Cancel a batch.

    What runs is ended; what was answered is in its files.
    """
    return json_reply(BatchObject.of(await call.api.batches.cancel(call.params["batch_id"])))


# -- lines: each is a request to one of the endpoints -------------------------------


class OpenAiBatchFormat:
    """See `penstock.workloads.llm.batches.BatchFormat`."""

    endpoints = tuple(BATCHED)

    def __init__(self, topic_for: Callable[[str], str] = topic_of) -> None:
        """`topic_for` names the topic of a model's jobs, whether it is served or not."""
        self._topic_for = topic_for

    def ask(self, endpoint: str, body: bytes) -> LineRequest:
        table = BATCHED[endpoint]
        parsed = read_request(body, table.body, prefix="body")
        asked = parsed.body
        if not asked.model:
            raise InvalidRequest("body.model", "is missing", hint="it is required")
        if not is_model_name(asked.model):
            raise ModelNotFound(f"the model {asked.model[:120]!r} does not exist")
        if isinstance(asked, Generating) and asked.stream:
            raise InvalidRequest("stream", "can't be used in a batch")
        request = table.request(asked, parsed.options)
        refuse_urls(request)
        return LineRequest(self._topic_for(asked.model), encode(request))

    def tell(self, endpoint: str, body: bytes, job: Job, result: bytes) -> bytes:
        table = BATCHED[endpoint]
        asked = read_request(body, table.body, prefix="body").body
        origin = JobOrigin(job.job_id, job.accepted_at, asked.model)
        return encode(table.whole(asked, origin, decoder(table.result).decode(result)))

    def refuse(self, error: PenstockError) -> tuple[int, bytes]:
        if isinstance(error, UnknownTopic):
            error = ModelNotFound(error.problem)
        refusal = tell(error)
        return refusal.status, encode(OpenAiError(refusal.fault))
