"""Files, as OpenAI has them: what batches are made of, and what comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from msgspec import UNSET, Meta, Struct, UnsetType, field

from penstock.api.openai.errors import OpenAiOperation
from penstock.api.openai.form import FORM, Form, read_form
from penstock.api.ranges import download
from penstock.api.reply import AnyReply, Reply, json_reply
from penstock.core.errors import InvalidRequest
from penstock.ports.engine_api import KeyRole
from penstock.workloads.llm.batches import FileUpload, PageQuery, StoredFile

if TYPE_CHECKING:
    from penstock.api.call import Call

_LINES = "application/jsonl"
CREATED = "created_at"
"""What a lifetime counts from; OpenAI has no other word."""


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
    anchor: Literal["created_at"] | UnsetType = field(name="expires_after[anchor]", default=UNSET)
    seconds: Annotated[int, Meta(ge=3600, le=2_592_000)] | UnsetType = field(
        name="expires_after[seconds]", default=UNSET
    )
    """For how long it is kept; else it is what the engine's retention says."""


class FileQuery(Struct, frozen=True):
    purpose: str | None = None
    after: str | None = None
    """The id that ended the page before."""
    limit: Annotated[int, Meta(ge=1, le=10_000)] = 10_000
    order: Literal["asc", "desc"] = "desc"


async def create_file(call: Call) -> Reply:
    upload = FileUpload(call.api.batches)
    try:
        form = await read_form(call, upload.write)
        if form.filename is None:
            raise InvalidRequest("file", "is missing", hint="it is required")
        file = await upload.keep(
            form.filename,
            form.field("purpose"),
            tenant=call.tenant(),
            expires_after=_lifetime(form),
        )
    finally:
        await upload.drop()
    return json_reply(FileObject.of(file))


def _lifetime(form: Form) -> int | None:
    anchor = form.fields.get("expires_after[anchor]")
    seconds = form.fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != CREATED:
        raise InvalidRequest("expires_after.anchor", f"must be {CREATED}")
    if seconds is None or not (seconds.isascii() and seconds.isdigit() and len(seconds) < 10):
        raise InvalidRequest("expires_after.seconds", "is not a number of seconds")
    return int(seconds)


async def list_files(call: Call) -> Reply:
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


async def get_file(call: Call) -> Reply:
    return json_reply(FileObject.of(await call.api.batches.file(call.params["file_id"])))


async def get_file_content(call: Call) -> AnyReply:
    file = await call.api.batches.file(call.params["file_id"])
    etag = b'"%b-%d"' % (file.id.encode(), int(file.created_at * 1e6))
    headers = ((b"content-type", _LINES.encode()), (b"content-disposition", b"attachment"))
    return download(call, file.bytes, etag, headers, partial(call.api.batches.read_file, file.id))


async def delete_file(call: Call) -> Reply:
    file_id = call.params["file_id"]
    await call.api.batches.delete_file(file_id)
    return json_reply(FileDeleted(id=file_id))


OPERATIONS = (
    OpenAiOperation(
        "POST",
        "/v1/files",
        create_file,
        role=KeyRole.SUBMIT,
        body=FileForm,
        body_type=FORM,
        large=True,
        answer=FileObject,
        refusals=(404,),
        summary="Upload a file for a batch",
        description="Of any size up to the setting `openai.max_file`; it is written as it comes.",
    ),
    OpenAiOperation(
        "GET",
        "/v1/files",
        list_files,
        query=FileQuery,
        answer=FileList,
        refusals=(404,),
        summary="List files, newest first",
    ),
    OpenAiOperation(
        "GET",
        "/v1/files/{file_id}",
        get_file,
        answer=FileObject,
        refusals=(404,),
        summary="Get a file's record",
    ),
    OpenAiOperation(
        "GET",
        "/v1/files/{file_id}/content",
        get_file_content,
        answer=bytes,
        answer_type=_LINES,
        others={206: bytes, 304: None},
        refusals=(404, 416),
        summary="Download a file",
        description="Whole, or in parts with `Range`.",
    ),
    OpenAiOperation(
        "DELETE",
        "/v1/files/{file_id}",
        delete_file,
        role=KeyRole.SUBMIT,
        answer=FileDeleted,
        refusals=(404, 409),
        summary="Delete a file",
        description="Not while it is the input of a batch that has not ended.",
    ),
)
