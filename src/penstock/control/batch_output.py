"""What came of a batch, as files: one line for each line, in their order."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from penstock.control.batch_lines import Line, off_loop, raw_lines, read_line
from penstock.control.batch_progress import LATE, job_id_of
from penstock.core.errors import InvalidRequest, JobEnded, PenstockError
from penstock.core.job import Job
from penstock.lifecycles.canonical import JobState
from penstock.ports.batches import (
    Batch,
    BatchError,
    Dialect,
    Draft,
    Purpose,
    RequestCounts,
    Shelf,
    StoredFile,
)
from penstock.ports.blobs import Blobs
from penstock.ports.store import Store

_encode = msgspec.json.Encoder().encode
_BREATH = 50
"""Lines after which others get a turn."""


class Response(Struct, frozen=True):
    status_code: int
    request_id: str
    body: Raw


class NotRun(Struct, frozen=True):
    code: str
    message: str


class OutputLine(Struct, frozen=True):
    id: str
    custom_id: str
    response: Response | None
    error: NotRun | None


EXPIRED = NotRun("batch_expired", "the batch's completion window ended before this request ran")
CANCELLED = NotRun("batch_cancelled", "the batch was cancelled before this request ran")


class OutputWriter:
    """Writes the files of one batch, from the input file and the jobs alone."""

    def __init__(self, shelf: Shelf, store: Store, blobs: Blobs, dialect: Dialect) -> None:
        self._shelf, self._store, self._blobs, self._dialect = shelf, store, blobs, dialect

    async def write(self, batch: Batch, longest: int, now: float) -> Batch:
        """The record with its files and counts. The same however often it is done."""
        async with AsyncExitStack() as stack:
            good, bad = await self._shelf.draft(), await self._shelf.draft()
            stack.push_async_callback(good.drop)
            stack.push_async_callback(bad.drop)
            done = failed = 0
            refused = {error.line: error for error in batch.errors}
            async for number, raw in raw_lines(self._shelf, batch.input_file_id, longest):
                line = read_line(number, raw, batch.endpoint)
                told = await self._told(batch, line, refused.get(number))
                if told.response is not None and told.response.status_code == 200:
                    done += 1
                    await good.write(_encode(told) + b"\n")
                else:
                    failed += 1
                    await bad.write(_encode(told) + b"\n")
                if number % _BREATH == 0:
                    await asyncio.sleep(0)
            return replace(
                batch,
                output_file_id=await self._keep(good, batch, "output", now),
                error_file_id=await self._keep(bad, batch, "error", now),
                request_counts=RequestCounts(done + failed, done, failed),
            )

    async def _told(self, batch: Batch, line: Line, refusal: BatchError | None) -> OutputLine:
        job = await self._last(job_id_of(batch.id, line.number))
        if job is None:
            line_id = f"batch_req_{batch.id.removeprefix('batch_')}_{line.number}"
            if refusal is None:
                return OutputLine(line_id, line.custom_id, None, _why(batch))
            error = InvalidRequest(refusal.param or "body", refusal.message)
            status, body = self._dialect.refuse(error)
            return OutputLine(line_id, line.custom_id, Response(status, line_id, Raw(body)), None)
        line_id = f"batch_req_{job.job_id}"
        if _did_not_run(job, batch):
            return OutputLine(line_id, line.custom_id, None, _why(batch))
        status, body = await self._answered(batch, line, job)
        return OutputLine(line_id, line.custom_id, Response(status, job.job_id, Raw(body)), None)

    async def _last(self, job_id: str) -> Job | None:
        """The last of a chain of retries that has ended."""
        job = await self._store.get(job_id)
        while job is not None and job.successor is not None:
            after = await self._store.get(job.successor)
            if after is None or not after.is_final:
                break
            job = after
        return job

    async def _answered(self, batch: Batch, line: Line, job: Job) -> tuple[int, bytes]:
        if job.state is not JobState.SUCCEEDED:
            return self._dialect.refuse(JobEnded(job))
        try:
            pointer = job.result.result_ptr if job.result is not None else None
            result = await self._blobs.get(pointer) if pointer else b""
            size, tell = len(line.body) + len(result), self._dialect.tell
            return 200, await off_loop(size, tell, batch.endpoint, line.body, job, result)
        except PenstockError as error:
            return self._dialect.refuse(error)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return self._dialect.refuse(InvalidRequest("result", f"can't be read: {error}"))

    async def _keep(self, draft: Draft, batch: Batch, kind: str, now: float) -> str | None:
        """Under a name of its own for each batch: whoever does it again replaces it."""
        if not draft.size:
            return None
        kept = batch.output_expires_after
        file = StoredFile(
            id=f"file-{batch.id.removeprefix('batch_')}{kind[0]}",
            filename=f"{batch.id}_{kind}.jsonl",
            purpose=Purpose.BATCH_OUTPUT,
            created_at=now,
            tenant=batch.tenant,
            expires_at=None if kept is None else now + kept,
        )
        return (await draft.keep(file)).id


def _did_not_run(job: Job, batch: Batch) -> bool:
    if job.result is not None and job.result.error_code == LATE:
        return True
    stopped = batch.cancelling_at is not None or batch.expired_at is not None
    return not job.is_final or (job.state is JobState.CANCELLED and stopped)


def _why(batch: Batch) -> NotRun:
    return EXPIRED if batch.cancelling_at is None else CANCELLED
