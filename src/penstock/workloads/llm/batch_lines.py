"""The lines of a batch's files: requests are read and checked, answers are written."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Raw, Struct

from penstock.core.errors import InvalidRequest, JobEnded, NotFound, PenstockError
from penstock.core.job import Job
from penstock.lifecycles.canonical import JobState
from penstock.ports.blobs import Blobs
from penstock.workloads.llm.batches import BatchError, BatchFormat, LineRequest

log = logging.getLogger(__name__)

MAX_LINES = 50_000
MAX_TOLD = 100
"""Wrong lines that are told of; then it is enough."""
MAX_CUSTOM_ID = 512
_PART = 256 << 10
_SHORT = 64 << 10
_BOM = b"\xef\xbb\xbf"

R = TypeVar("R")
Read = Callable[[int, int], Awaitable[bytes]]
"""Reads so many bytes of the file from a place on; fewer only where it ends."""


class RawLine(NamedTuple):
    number: int
    """The first is 1."""
    at: int
    """Where in the file it begins."""
    end: int
    """Where the next one begins."""
    data: bytes
    """Without its end."""


class Line(Struct, frozen=True):
    number: int
    custom_id: str
    body: bytes


class _BatchLine(Struct, frozen=True):
    custom_id: str
    method: str
    url: str
    body: Raw


_decode = msgspec.json.Decoder(_BatchLine).decode


async def raw_lines(
    read: Read, longest: int, *, first: int = 1, at: int = 0, end: int | None = None
) -> AsyncIterator[RawLine]:
    """The lines of a file, or of the part from `at` to `end`, which begins with line `first`.

    Blank ones at the end are none; of others that follow each other, the first is told. Raises
    InvalidRequest at a line longer than `longest`."""
    number, position = first - 1, at
    pieces: list[bytes] = []
    """Of a line whose end has not come: joined once, for it may be many parts long."""
    blank: RawLine | None = None
    while part := await read(position, _PART if end is None else min(_PART, end - position)):
        position += len(part)
        *whole, last = part.split(b"\n")
        if whole:
            whole[0], pieces = b"".join((*pieces, whole[0])), []
        pieces.append(last)
        for data in whole:
            number += 1
            end_of_line = at + len(data) + 1
            line = RawLine(number, at, end_of_line, data if at else data.removeprefix(_BOM))
            at = end_of_line
            if not line.data.strip():
                blank = blank or line._replace(data=b"")
                continue
            if blank is not None:
                yield blank
                blank = None
            yield line
        if sum(map(len, pieces)) > longest:
            raise InvalidRequest(f"line {number + 1}", f"is longer than {longest:,} bytes")
    rest = b"".join(pieces)
    line = RawLine(number + 1, at, position, rest if at else rest.removeprefix(_BOM))
    if line.data.strip():
        if blank is not None:
            yield blank
        yield line


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
        raise InvalidRequest("body", "is not an object")
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
        self.topics: set[str] = set()
        """Of the jobs that the lines become."""
        self.errors: list[BatchError] = []

    @property
    def is_enough(self) -> bool:
        return len(self.errors) >= MAX_TOLD or self.count > MAX_LINES

    def look(self, number: int, raw: bytes) -> None:
        self.count += 1
        try:
            self.topics.add(self._asked(number, raw).topic)
        except NotFound:
            pass  # no such model: this line fails, and the others go on
        except PenstockError as error:
            self.blame(error, number)
        except Exception as error:
            log.exception("line %d of a batch can't be checked", number)
            self.blame(InvalidRequest("body", f"can't be read: {type(error).__name__}"), number)

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
    for name in _BatchLine.__struct_fields__:
        if f"`{name}`" in message or f"`$.{name}`" in message:
            return name
    return "line"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")


# -- answers ------------------------------------------------------------------------

LATE = "DEADLINE_EXCEEDED"
"""The error code of a job that ended because its batch's time was over."""

_encode = msgspec.json.Encoder().encode


def job_id_of(batch_id: str, number: int) -> str:
    """The id of a line's job: submitting it again finds the same job."""
    return f"{batch_id}.{number:05}"


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

    @property
    def is_answer(self) -> bool:
        return self.response is not None and self.response.status_code == 200

    def encode(self) -> bytes:
        return _encode(self) + b"\n"


EXPIRED = NotRun("batch_expired", "the batch's completion window ended before this request ran")
CANCELLED = NotRun("batch_cancelled", "the batch was cancelled before this request ran")


class LineWriter:
    """Writes what became of lines."""

    def __init__(
        self, batch_id: str, endpoint: str, blobs: Blobs, batch_format: BatchFormat
    ) -> None:
        self._batch_id, self._endpoint = batch_id, endpoint
        self._blobs, self._format = blobs, batch_format

    def not_run(self, line: Line, why: NotRun) -> OutputLine:
        return OutputLine(f"batch_req_{self._job_id(line)}", line.custom_id, None, why)

    def refused(self, line: Line, error: PenstockError) -> OutputLine:
        """Of a line that could not be made a job."""
        return self._told(line, self._job_id(line), *self._format.refuse(error))

    async def ended(self, line: Line, job: Job) -> OutputLine:
        """Of a line whose job has ended."""
        return self._told(line, job.job_id, *await self._answer(line, job))

    def _told(self, line: Line, job_id: str, status: int, body: bytes) -> OutputLine:
        response = LineResponse(status, job_id, Raw(body))
        return OutputLine(f"batch_req_{job_id}", line.custom_id, response, None)

    async def _answer(self, line: Line, job: Job) -> tuple[int, bytes]:
        if job.state is not JobState.SUCCEEDED:
            return self._format.refuse(JobEnded(job))
        try:
            pointer = job.result.result_ptr if job.result is not None else None
            result = await self._blobs.get(pointer) if pointer else b""
            size, tell = len(line.body) + len(result), self._format.tell
            return 200, await off_loop(size, tell, self._endpoint, line.body, job, result)
        except PenstockError as error:
            return self._format.refuse(error)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return self._format.refuse(InvalidRequest("result", f"can't be read: {error}"))

    def _job_id(self, line: Line) -> str:
        return job_id_of(self._batch_id, line.number)
