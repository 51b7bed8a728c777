"""Files of many requests, and what becomes of them: batches.

A batch is a file with one request a line. Each line becomes a canonical job, and when all have
ended their answers become a file again, in the order of the lines. A `BatchStore` keeps files and
the records of batches; everything about the lines is in the store of jobs, so that a batch is taken
up where it stood from these two alone.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Protocol, TypeVar

from msgspec import Struct

from penstock.core.errors import NotFound, PenstockError
from penstock.core.job import Job
from penstock.lifecycles.batch import BATCH, BatchStatus


class Purpose(StrEnum):
    """What a file is for."""

    BATCH = "batch"
    """The requests of a batch; whoever uploads says this."""
    BATCH_OUTPUT = "batch_output"
    """What came of them."""


class StoredFile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    """`file-` and letters."""
    filename: str
    purpose: Purpose
    created_at: float
    tenant: str
    bytes: int = 0
    expires_at: float | None = None
    """When it is deleted, if that was said; else the retention is what counts."""


class RequestCounts(Struct, frozen=True):
    total: int = 0
    completed: int = 0
    """Lines of the output file."""
    failed: int = 0
    """Lines of the error file."""


class BatchError(Struct, frozen=True, kw_only=True):
    """What is wrong with an input file."""

    code: str
    message: str
    line: int | None = None
    """The first line is 1."""
    param: str | None = None


class Batch(Struct, frozen=True, kw_only=True, omit_defaults=True):
    id: str
    """`batch_` and letters; the `workflow_id` of its jobs."""
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: float
    expires_at: float
    tenant: str
    principal: str
    """On whose word its jobs are submitted."""
    status: BatchStatus = BatchStatus.VALIDATING
    request_counts: RequestCounts = RequestCounts()
    errors: tuple[BatchError, ...] = ()
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


# -- where they are kept ------------------------------------------------------------


class BatchStoreQuery(Struct, frozen=True, kw_only=True):
    """Which files or batches, newest first."""

    tenant: str | None = None
    purpose: str | None = None
    """Of files only."""
    after: str | None = None
    """The id that ended the page before."""
    limit: int = 20
    oldest_first: bool = False


class Draft(Protocol):
    """A file that is being written: nobody sees it, and a crash takes it away."""

    @property
    def size(self) -> int: ...

    async def write(self, data: bytes) -> None: ...

    async def keep(self, file: StoredFile) -> StoredFile:
        """Make it that file, whole and durable, in the place of one with the same id.

        Answers it with its size. After that the draft is used up."""

    async def drop(self) -> None:
        """Forget it; without effect on one that is used up."""


class BatchStore(Protocol):
    """Whatever was kept or put is there after any crash; whatever was not is not."""

    async def open(self) -> None:
        """Take up what is there, and clear away what a crash left half-made."""

    async def draft(self) -> Draft: ...

    async def file(self, file_id: str) -> StoredFile | None: ...

    async def files(self, query: BatchStoreQuery) -> builtins.list[StoredFile]: ...

    async def read(self, file_id: str, start: int, length: int) -> bytes:
        """A part of its content; short only where it ends. Raises NotFound."""

    async def remove_file(self, file_id: str) -> bool:
        """False if there was none."""

    async def put_batch(self, batch: Batch) -> None:
        """Keep the record, in the place of one with the same id."""

    async def batch(self, batch_id: str) -> Batch | None: ...

    async def batches(self, query: BatchStoreQuery) -> builtins.list[Batch]: ...

    async def remove_batch(self, batch_id: str) -> bool: ...


S = TypeVar("S", StoredFile, Batch)


def page_of(kept: Iterable[S], query: BatchStoreQuery) -> list[S]:
    """What a query asks for, of all there is. Raises NotFound if its `after` is not among it."""
    found = [one for one in kept if query.tenant in (None, one.tenant)]
    if query.purpose is not None:
        found = [one for one in found if getattr(one, "purpose", None) == query.purpose]
    found.sort(key=lambda one: (one.created_at, one.id), reverse=not query.oldest_first)
    start = 0
    if query.after is not None:
        ids = [one.id for one in found]
        if query.after not in ids:
            raise NotFound(f"after: there is no {query.after!r} here")
        start = ids.index(query.after) + 1
    return found[start : start + query.limit]


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
    async def begin_upload(self) -> str:
        """A file that is going to be written in parts; the answer names it until it is kept."""

    async def write_upload(self, upload_id: str, data: bytes) -> None:
        """The next part. Raises TooLarge."""

    async def keep_upload(
        self,
        upload_id: str,
        filename: str,
        purpose: str,
        *,
        tenant: str = "default",
        expires_after: int | None = None,
    ) -> StoredFile:
        """The file, durable. `expires_after`: seconds for which it is kept."""

    async def drop_upload(self, upload_id: str) -> None: ...

    async def file(self, file_id: str) -> StoredFile: ...

    async def files(self, query: BatchStoreQuery) -> builtins.list[StoredFile]: ...

    async def read_file(self, file_id: str, start: int, length: int) -> bytes:
        """A part of its content; short only where it ends."""

    async def delete_file(self, file_id: str) -> None:
        """Raises Conflict for the input of a batch that has not ended."""

    async def create(
        self,
        input_file_id: str,
        endpoint: str,
        *,
        completion_window: str = "24h",
        metadata: Mapping[str, str] | None = None,
        output_expires_after: int | None = None,
    ) -> Batch:
        """Durable when this returns; its lines are looked at and submitted afterwards."""

    async def get(self, batch_id: str) -> Batch: ...

    async def list(self, query: BatchStoreQuery) -> builtins.list[Batch]: ...

    async def cancel(self, batch_id: str) -> Batch:
        """Ask for its end; what runs is ended, what is done is kept. Raises Conflict."""
