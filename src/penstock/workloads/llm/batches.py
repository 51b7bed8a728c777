"""OpenAI's files and batches: their values, and what an EngineApi offers for them.

A batch is a job of the topic `job.batch`; its input, its checkpoint and its result are a `Batch`
record each. Every line of its input file is a child job. Files are blobs; their records are shared
values of the engine.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Mapping
from enum import StrEnum
from hashlib import sha256
from secrets import token_hex
from typing import Protocol

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from penstock.core.errors import InvalidRequest, NotFound, PenstockError
from penstock.core.job import Job
from penstock.lifecycles.batch import BATCH, BatchStatus
from penstock.ports.operations import KeyRole, operation
from penstock.ports.shared_state import SharedState

TOPIC = "job.batch"
ROW = "batch"
"""The name of the row that has the record while the batch runs."""
_FILES = "openai.file/"
_PART = 1 << 20
"""Bytes of an upload that are sent at once."""


class FilePurpose(StrEnum):
    """What a file is for."""

    BATCH = "batch"
    """The requests of a batch; whoever uploads says this."""
    BATCH_OUTPUT = "batch_output"
    """What came of them."""


class StoredFile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    """`file-` and letters."""
    filename: str
    purpose: FilePurpose
    created_at: float
    tenant: str
    bytes: int = 0
    expires_at: float | None = None
    """When it is deleted, if that was said; else the retention is what counts."""
    pointer: str = ""
    """The blob that has its content."""


class RequestCounts(Struct, frozen=True):
    total: int = 0
    completed: int = 0
    """Lines of the output file."""
    failed: int = 0
    """Lines whose request failed. Lines that did not run, because the batch was cancelled or its
    time was over, are in the error file and count only in `total`."""


class BatchError(Struct, frozen=True, kw_only=True):
    """What is wrong with an input file."""

    code: str
    message: str
    line: int | None = None
    """The first line is 1."""
    param: str | None = None


class Batch(Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str = ""
    """That of its job, and the `workflow_id` of its lines' jobs."""
    endpoint: str
    input_file_id: str
    completion_window: str
    expires_at: float
    created_at: float = 0.0
    tenant: str = ""
    status: BatchStatus = BatchStatus.VALIDATING
    request_counts: RequestCounts = RequestCounts()
    errors: tuple[BatchError, ...] = ()
    unserved: tuple[str, ...] = ()
    """Topics that nobody served when its lines were checked: lines that need them fail."""
    metadata: Mapping[str, str] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    output_expires_after: int | None = None
    """Seconds for which its files are kept."""
    in_progress_at: float | None = None
    finalizing_at: float | None = None
    completed_at: float | None = None
    failed_at: float | None = None
    expired_at: float | None = None
    cancelling_at: float | None = None
    cancelled_at: float | None = None

    @property
    def has_ended(self) -> bool:
        return BATCH.is_final(self.status)

    @property
    def ended_at(self) -> float | None:
        if not self.has_ended:
            return None
        return self.completed_at or self.failed_at or self.cancelled_at or self.expired_at


def read_batch(record: bytes, job: Job | None = None) -> Batch:
    """The record of a batch; id and tenant are those of its job. Raises InvalidRequest."""
    try:
        batch = msgspec.json.decode(record, type=Batch)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("input", f"is not the record of a batch: {error}") from None
    if job is None:
        return batch
    created_at = batch.created_at or job.accepted_at
    return replace(batch, id=job.job_id, tenant=job.request.tenant, created_at=created_at)


class PageQuery(Struct, frozen=True, kw_only=True):
    """Which files or batches, newest first."""

    tenant: str | None = None
    purpose: str | None = None
    """Of files only."""
    after: str | None = None
    """The id that ended the page before."""
    limit: int = 20
    oldest_first: bool = False
    """Of files only."""


class FileRecords:
    """The records of files, as shared values of the engine."""

    def __init__(self, state: SharedState) -> None:
        self._state = state

    async def get(self, file_id: str) -> StoredFile | None:
        record = await self._state.read(_FILES + file_id[:200])
        return None if record is None else _decode(record)

    async def all(self) -> list[StoredFile]:
        return [*map(_decode, (await self._state.read_all(_FILES)).values())]

    async def page(self, query: PageQuery) -> list[StoredFile]:
        """Raises NotFound if there is no `after`."""
        found = [
            file
            for file in await self.all()
            if query.tenant in (None, file.tenant) and query.purpose in (None, file.purpose)
        ]
        found.sort(key=lambda file: (file.created_at, file.id), reverse=not query.oldest_first)
        start = 0
        if query.after is not None:
            ids = [file.id for file in found]
            if query.after not in ids:
                raise NotFound(f"after: there is no {query.after!r} here")
            start = ids.index(query.after) + 1
        return found[start : start + query.limit]

    async def put(self, file: StoredFile) -> None:
        """Keep the record, in the place of one with the same id."""
        await self._state.write(_FILES + file.id, msgspec.json.encode(file))

    async def delete(self, file_id: str) -> None:
        await self._state.write(_FILES + file_id, None)


_decode = msgspec.json.Decoder(StoredFile).decode


# -- what lines say -----------------------------------------------------------------


class LineRequest(Struct, frozen=True):
    """What a line asks for, as a job."""

    topic: str
    payload: bytes


class BatchFormat(Protocol):
    """How requests and answers are written in the files of batches."""

    endpoints: tuple[str, ...]

    def ask(self, endpoint: str, body: bytes) -> LineRequest:
        """Raises PenstockError if this can't be asked."""

    def tell(self, endpoint: str, body: bytes, job: Job, result: bytes) -> bytes:
        """The body of the answer, as JSON: what the job gave to whoever sent this body."""

    def refuse(self, error: PenstockError) -> tuple[int, bytes]:
        """The status and the body, as JSON, of the answer to a line that failed."""


# -- what an EngineApi offers -------------------------------------------------------------


class Batches(Protocol):
    @operation("write_upload", role=KeyRole.SUBMIT, action="file.create")
    async def write_upload(self, upload: str, start: int, data: bytes) -> None:
        """Write a part of a file; `upload` is a name that the caller made at random
        (32 hexadecimal digits). An upload that nobody keeps is deleted. Raises TooLarge."""

    @operation("keep_upload", role=KeyRole.SUBMIT, action="file.create", once=True)
    async def keep_upload(
        self,
        upload: str,
        digest: str,
        size: int,
        filename: str,
        purpose: str,
        *,
        tenant: str = "default",
        expires_after: int | None = None,
    ) -> StoredFile:
        """The file, durable. `digest` is the SHA-256 of its content; `expires_after`: seconds for
        which it is kept."""

    async def drop_upload(self, upload: str) -> None: ...

    async def file(self, file_id: str) -> StoredFile: ...

    async def files(self, query: PageQuery) -> builtins.list[StoredFile]: ...

    async def read_file(self, file_id: str, start: int, length: int) -> bytes:
        """A part of its content; short only where it ends."""

    @operation("delete_file", role=KeyRole.SUBMIT, once=True)
    async def delete_file(self, file_id: str) -> None:
        """Raises Conflict for the input of a batch that has not ended."""

    @operation("create_batch", role=KeyRole.SUBMIT, once=True)
    async def create(
        self,
        input_file_id: str,
        endpoint: str,
        *,
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
        output_expires_after: int | None = None,
    ) -> Batch:
        """Durable when this returns; its lines are checked and submitted afterwards."""

    async def get(self, batch_id: str) -> Batch: ...

    async def list(self, query: PageQuery) -> builtins.list[Batch]: ...

    @operation("cancel_batch", role=KeyRole.SUBMIT)
    async def cancel(self, batch_id: str) -> Batch:
        """End it; what runs is ended, what is done is kept. Raises Conflict."""


class FileUpload:
    """A file that is being uploaded, part by part."""

    def __init__(self, batches: Batches) -> None:
        self._batches, self._name = batches, token_hex(16)
        self._hash, self._sent = sha256(), 0
        self._gathered = bytearray()

    async def write(self, data: bytes) -> None:
        """Raises TooLarge."""
        self._gathered += data
        if len(self._gathered) >= _PART:
            await self._send()

    async def _send(self) -> None:
        part, self._gathered = bytes(self._gathered), bytearray()
        if part:
            await asyncio.to_thread(self._hash.update, part)
            await self._batches.write_upload(self._name, self._sent, part)
            self._sent += len(part)

    async def keep(
        self,
        filename: str,
        purpose: str = FilePurpose.BATCH,
        *,
        tenant: str = "default",
        expires_after: int | None = None,
    ) -> StoredFile:
        await self._send()
        digest = self._hash.hexdigest()
        facts = (self._name, digest, self._sent, filename, purpose)
        return await self._batches.keep_upload(*facts, tenant=tenant, expires_after=expires_after)

    async def drop(self) -> None:
        """Forget it; without effect on one that was kept."""
        await self._batches.drop_upload(self._name)
