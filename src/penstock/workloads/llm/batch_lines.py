"""The lines of a batch's input: read, and checked before anything is submitted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import Raw, Struct

from penstock.core.errors import InvalidRequest, NotFound, PenstockError
from penstock.workloads.llm.batches import BatchError, BatchFormat

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


async def raw_lines(read: Read, longest: int) -> AsyncIterator[RawLine]:
    """The lines of a file. Blank ones at the end are none; of others that follow each other, the
    first is told. Raises InvalidRequest at a line longer than `longest`."""
    number = position = blank = 0
    pieces: list[bytes] = []
    """Of a line whose end has not come: joined once, for it may be many parts long."""
    while True:
        part = await read(position, _PART)
        position += len(part)
        *whole, last = part.split(b"\n") if part else (b"", b"")  # the end also ends a line
        if whole:
            whole[0], pieces = b"".join((*pieces, whole[0])), []
        pieces.append(last)
        for data in whole:
            number += 1
            data = data.removeprefix(_BOM) if number == 1 else data
            if not data.strip():
                blank = blank or number
                continue
            if blank:
                yield RawLine(blank, b"")
                blank = 0
            yield RawLine(number, data)
        if not part:
            return
        if sum(map(len, pieces)) > longest:
            raise InvalidRequest(f"line {number + 1}", f"is longer than {longest:,} bytes")


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
            line = read_line(number, raw, self._endpoint)
            if (first := self._seen.setdefault(line.custom_id, number)) != number:
                told = f"{_shown(line.custom_id)} is that of line {first} already"
                raise InvalidRequest("custom_id", told)
            self.topics.add(self._format.ask(self._endpoint, line.body).topic)
        except NotFound:
            pass  # no such model: this line fails, and the others go on
        except PenstockError as error:
            self.blame(error, number)
        except Exception as error:
            log.exception("line %d of a batch can't be checked", number)
            self.blame(InvalidRequest("body", f"can't be read: {type(error).__name__}"), number)

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
