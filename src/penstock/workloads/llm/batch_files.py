"""The files of a batch: lines are read and checked, counted while their jobs run, and answered.

A line's job has the batch's id and the line's number in its own id, so that submitting it again
is harmless and asking for it needs no index. Retries follow it by `successor`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from penstock.core.errors import InvalidRequest, JobEnded, PenstockError
from penstock.core.job import Job
from penstock.lifecycles.canonical import JobState
from penstock.ports.blobs import Blobs
from penstock.workloads.llm.batches import (
    Batch,
    BatchError,
    BatchFormat,
    BatchStore,
    Draft,
    LineRequest,
    Purpose,
    RequestCounts,
    StoredFile,
)

if TYPE_CHECKING:
    from penstock.control.ledger import Ledger

MAX_LINES = 50_000
MAX_TOLD = 100
"""Wrong lines that are told of; then it is enough."""
MAX_CUSTOM_ID = 512
_PART = 256 << 10
_SHORT = 64 << 10
_BOM = b"\xef\xbb\xbf"

R = TypeVar("R")


class Line(Struct, frozen=True):
    number: int
    """The first is 1."""
    custom_id: str
    body: bytes


class _Said(Struct, frozen=True):
    custom_id: str
    method: str
    url: str
    body: Raw


_decode = msgspec.json.Decoder(_Said).decode


async def raw_lines(
    batch_store: BatchStore, file_id: str, longest: int
) -> AsyncIterator[tuple[int, bytes]]:
    """Numbered lines without their ends. Blank ones at the end of the file are none; of others
    that follow each other, the first is told.

    Raises InvalidRequest at a line longer than `longest`."""
    number, at = 0, 0
    pieces: list[bytes] = []
    """Of a line whose end has not come: joined once, for it may be many parts long."""
    blank: int | None = None
    while part := await batch_store.read(file_id, at, _PART):
        first, at = at == 0, at + len(part)
        *whole, last = (part.removeprefix(_BOM) if first else part).split(b"\n")
        if whole:
            whole[0], pieces = b"".join((*pieces, whole[0])), []
        pieces.append(last)
        for line in whole:
            number += 1
            if not line.strip():
                blank = blank or number
                continue
            if blank is not None:
                yield blank, b""
                blank = None
            yield number, line
        if sum(map(len, pieces)) > longest:
            raise InvalidRequest(f"line {number + 1}", f"is longer than {longest:,} bytes")
    rest = b"".join(pieces)
    if rest.strip():
        if blank is not None:
            yield blank, b""
        yield number + 1, rest


def read_line(number: int, raw: bytes, endpoint: str) -> Line:
    """Raises InvalidRequest, naming the field."""
    if not raw:
        raise InvalidRequest("line", "is empty")
    try:
        said = _decode(raw)
    except msgspec.ValidationError as error:
        raise InvalidRequest(_field(str(error)), f"is not as it must be: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest("line", f"is not JSON: {error}") from None
    if not said.custom_id:
        raise InvalidRequest("custom_id", "is empty")
    if len(said.custom_id) > MAX_CUSTOM_ID:
        raise InvalidRequest("custom_id", f"is longer than {MAX_CUSTOM_ID} characters")
    if said.method != "POST":
        raise InvalidRequest("method", f"is {_shown(said.method)}; it must be POST")
    if said.url != endpoint:
        raise InvalidRequest("url", f"is {_shown(said.url)}; the batch is for {endpoint}")
    if not bytes(said.body).startswith(b"{"):
        raise InvalidRequest("body", "is no object")
    return Line(number, said.custom_id, bytes(said.body))


async def off_loop(size: int, work: Callable[..., R], *args: Any) -> R:
    """Do what takes time in proportion to a line: for a long one in a thread."""
    return work(*args) if size <= _SHORT else await asyncio.to_thread(work, *args)


class LineCheck:
    """Looks at one line after another; `errors` has what is wrong, `count` how many there were."""

    def __init__(self, endpoint: str, batch_format: BatchFormat) -> None:
        self._endpoint, self._format = endpoint, batch_format
        self._seen: dict[str, int] = {}
        self.count = 0
        self.topics: dict[str, int] = {}
        """Each with the first line that asks for it."""
        self.errors: list[BatchError] = []

    @property
    def is_enough(self) -> bool:
        return len(self.errors) >= MAX_TOLD or self.count > MAX_LINES

    def look(self, number: int, raw: bytes) -> None:
        self.count += 1
        try:
            asked = self._asked(number, raw)
        except PenstockError as error:
            self.blame(error, number)
        else:
            self.topics.setdefault(asked.topic, number)

    def _asked(self, number: int, raw: bytes) -> LineRequest:
        line = read_line(number, raw, self._endpoint)
        first = self._seen.setdefault(line.custom_id, number)
        if first != number:
            raise InvalidRequest(
                "custom_id", f"{_shown(line.custom_id)} is that of line {first} already"
            )
        return self._format.ask(self._endpoint, line.body)

    def blame(self, error: PenstockError, number: int | None) -> None:
        field = error.field if isinstance(error, InvalidRequest) else None
        self.errors.append(
            BatchError(
                code="invalid_json_line" if field == "line" else _code(error),
                message=str(error),
                line=number,
                param=field,
            )
        )

    def conclude(self) -> tuple[BatchError, ...]:
        """What is wrong with the whole, and with its lines."""
        if self.count > MAX_LINES:
            message = f"the file has more than {MAX_LINES:,} lines"
            self.errors.insert(0, BatchError(code="too_many_requests", message=message))
        elif not self.count:
            self.errors.append(BatchError(code="empty_file", message="the file has no lines"))
        return tuple(self.errors)


def _code(error: PenstockError) -> str:
    return "invalid_request" if error.code == InvalidRequest.code else error.code.lower()


def _field(message: str) -> str:
    """The field that msgspec speaks of."""
    for name in _Said.__struct_fields__:
        if f"`{name}`" in message or f"`$.{name}`" in message:
            return name
    return "line"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


LATE = "DEADLINE_EXCEEDED"
"""The error code of a job that ended because its batch's time was over."""


def job_id_of(batch_id: str, number: int) -> str:
    return f"{batch_id}.{number:05}"


class BatchProgress:
    """Knows the jobs that have not ended by their ids: no other job can pass for one."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.completed = self.failed = 0
        self.live: dict[str, int] = {}
        """The line of each job that was looked for or submitted, and is not known to have ended."""
        self.refused: list[BatchError] = []
        """Lines that could not be made jobs."""
        self.was_late = False

    @property
    def counts(self) -> RequestCounts:
        return RequestCounts(self.total, self.completed, self.failed)

    def expect(self, number: int, job_id: str) -> None:
        """Before the job is asked for or submitted, so that no news of it is missed."""
        self.live[job_id] = number

    def is_not_there(self, job_id: str) -> None:
        self.live.pop(job_id, None)

    def note(self, job: Job) -> bool:
        """Take notice of a job's end; False if it was known, or it has not ended."""
        if not job.is_final or (number := self.live.pop(job.job_id, None)) is None:
            return False
        if job.successor is not None:
            self.live[job.successor] = number
        elif job.state is JobState.SUCCEEDED:
            self.completed += 1
        else:
            self.failed += 1
            self.was_late |= job.result is not None and job.result.error_code == LATE
        return True

    def refuse(self, number: int, job_id: str, error: PenstockError) -> None:
        self.live.pop(job_id, None)
        self.failed += 1
        field = error.field if isinstance(error, InvalidRequest) else None
        self.refused.append(
            BatchError(code=error.code.lower(), message=str(error), line=number, param=field)
        )


_encode = msgspec.json.Encoder().encode
_BREATH = 50
"""Lines after which others get a turn."""


class LineResponse(Struct, frozen=True):
    status_code: int
    request_id: str
    body: Raw


class NotRun(Struct, frozen=True):
    code: str
    message: str


class OutputLine(Struct, frozen=True):
    id: str
    custom_id: str
    response: LineResponse | None
    error: NotRun | None


EXPIRED = NotRun("batch_expired", "the batch's completion window ended before this request ran")
CANCELLED = NotRun("batch_cancelled", "the batch was cancelled before this request ran")


class OutputWriter:
    """Writes the files of one batch, from the input file and the jobs alone."""

    def __init__(
        self, batch_store: BatchStore, store: Ledger, blobs: Blobs, batch_format: BatchFormat
    ) -> None:
        self._batch_store, self._store, self._blobs, self._format = (
            batch_store,
            store,
            blobs,
            batch_format,
        )

    async def write(self, batch: Batch, longest: int, now: float) -> Batch:
        """The record with its files and counts. The same however often it is done."""
        async with AsyncExitStack() as stack:
            good, bad = await self._batch_store.draft(), await self._batch_store.draft()
            stack.push_async_callback(good.drop)
            stack.push_async_callback(bad.drop)
            done = failed = 0
            refused = {error.line: error for error in batch.errors}
            async for number, raw in raw_lines(self._batch_store, batch.input_file_id, longest):
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
            status, body = self._format.refuse(error)
            return OutputLine(
                line_id, line.custom_id, LineResponse(status, line_id, Raw(body)), None
            )
        line_id = f"batch_req_{job.job_id}"
        if _did_not_run(job, batch):
            return OutputLine(line_id, line.custom_id, None, _why(batch))
        status, body = await self._answered(batch, line, job)
        return OutputLine(
            line_id, line.custom_id, LineResponse(status, job.job_id, Raw(body)), None
        )

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
            return self._format.refuse(JobEnded(job))
        try:
            pointer = job.result.result_ptr if job.result is not None else None
            result = await self._blobs.get(pointer) if pointer else b""
            size, tell = len(line.body) + len(result), self._format.tell
            return 200, await off_loop(size, tell, batch.endpoint, line.body, job, result)
        except PenstockError as error:
            return self._format.refuse(error)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return self._format.refuse(InvalidRequest("result", f"can't be read: {error}"))

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
