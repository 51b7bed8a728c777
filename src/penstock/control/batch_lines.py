"""The lines of an input file: how they are read, and what each must be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import msgspec
from msgspec import Raw, Struct

from penstock.core.errors import InvalidRequest, PenstockError
from penstock.ports.batches import Asked, BatchError, Dialect, Shelf

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


async def raw_lines(shelf: Shelf, file_id: str, longest: int) -> AsyncIterator[tuple[int, bytes]]:
    """Numbered lines without their ends. Blank ones at the end of the file are none; of others
    that follow each other, the first is told.

    Raises InvalidRequest at a line longer than `longest`."""
    number, at, rest = 0, 0, b""
    blank: int | None = None
    while part := await shelf.read(file_id, at, _PART):
        first, at = at == 0, at + len(part)
        *whole, rest = (rest + (part.removeprefix(_BOM) if first else part)).split(b"\n")
        for line in whole:
            number += 1
            if not line.strip():
                blank = blank or number
                continue
            if blank is not None:
                yield blank, b""
                blank = None
            yield number, line
        if len(rest) > longest:
            raise InvalidRequest(f"line {number + 1}", f"is longer than {longest:,} bytes")
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

    def __init__(self, endpoint: str, dialect: Dialect) -> None:
        self._endpoint, self._dialect = endpoint, dialect
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

    def _asked(self, number: int, raw: bytes) -> Asked:
        line = read_line(number, raw, self._endpoint)
        first = self._seen.setdefault(line.custom_id, number)
        if first != number:
            raise InvalidRequest(
                "custom_id", f"{_shown(line.custom_id)} is that of line {first} already"
            )
        return self._dialect.ask(self._endpoint, line.body)

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
