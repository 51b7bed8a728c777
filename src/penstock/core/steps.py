"""Limits of checkpointed rows, and the check that every row passes before it is written."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from penstock.core.errors import InvalidRequest, TooLarge
from penstock.core.ledger import Step

MAX_ROW = 64 << 10
"""Bytes of one row; larger values belong in a blob that the row points to."""
MAX_ROWS = 250
"""Rows of one message, and of one commit: it delays other jobs by about a millisecond."""
MAX_BYTES = 256 << 10
"""Bytes of one message, and of one commit."""
MAX_PAGE_ROWS = 1000
MAX_PAGE_BYTES = 1 << 20
"""What is read back at once; at least one row, however long."""
_STAMP = 20
"""Bytes of a row's time and attempt, which are not the caller's."""
MAX_NOTES = 100
"""Notes of one checkpoint."""
MAX_NOTE = 4000
"""Characters of a note."""
_MAX_NAME = 200
_MAX_N = 1 << 53

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Step).decode
_decode_all = msgspec.msgpack.Decoder(list[Step]).decode


def size_of(row: Step) -> int:
    """Bytes of a row as it is stored."""
    return len(_encode(row))


def check_row(row: Step, field: str = "row") -> int:
    """The size of a row; raises InvalidRequest or TooLarge if it can't be kept."""
    try:
        data = _encode(row)
        _decode(data)  # a Step that Python code makes is not checked otherwise
    except (msgspec.ValidationError, TypeError) as error:
        raise InvalidRequest(field, f"must be a penstock.Step: {error}") from None
    except (UnicodeEncodeError, OverflowError) as error:
        raise InvalidRequest(field, f"holds a value that can't be stored: {error}") from None
    if not 0 < len(row.name) <= _MAX_NAME:
        raise InvalidRequest(f"{field}.name", f"must have 1 to {_MAX_NAME} characters")
    if not 0 <= row.n < _MAX_N:
        raise InvalidRequest(f"{field}.n", f"must be from 0 to {_MAX_N - 1}")
    if not math.isfinite(row.at):
        raise InvalidRequest(f"{field}.at", "must be a time in seconds")
    if len(data) > MAX_ROW:
        raise TooLarge(
            field,
            f"has {len(data)} bytes; a checkpointed row may have {MAX_ROW}",
            hint="store a large value as a blob and keep its pointer in the row",
        )
    return len(data)


def split_rows(rows: Sequence[Step]) -> list[tuple[list[Step], int]]:
    """The rows, checked, as messages with their sizes. Raises InvalidRequest or TooLarge."""
    if len(rows) <= MAX_ROWS and (size := _size_if_small(rows)) is not None:
        return [([*rows], size)] if rows else []
    sizes = [check_row(row, f"rows[{index}]") for index, row in enumerate(rows)]
    messages: list[tuple[list[Step], int]] = []
    some: list[Step] = []
    total = 0
    for row, size in zip(rows, sizes, strict=True):
        if some and (len(some) == MAX_ROWS or total + size > MAX_BYTES):
            messages.append((some, total))
            some, total = [], 0
        some.append(row)
        total += size
    return [*messages, (some, total)] if some else messages


def _size_if_small(rows: Sequence[Step]) -> int | None:
    """The size of rows that together are no larger than one may be, and nothing is wrong with
    them; None if that must be looked at row by row."""
    try:
        data = _encode(rows)
        if len(data) > MAX_ROW or len(_decode_all(data)) != len(rows):
            return None
    except (msgspec.ValidationError, TypeError, UnicodeEncodeError, OverflowError):
        return None
    for row in rows:
        if not (0 < len(row.name) <= _MAX_NAME and 0 <= row.n < _MAX_N and math.isfinite(row.at)):
            return None
    return len(data)


def check_notes(notes: Sequence[str]) -> tuple[str, ...]:
    """The notes, if they can be kept. Raises InvalidRequest or TooLarge."""
    if len(notes) > MAX_NOTES:
        raise TooLarge("notes", f"a checkpoint may have {MAX_NOTES} notes, got {len(notes)}")
    for index, note in enumerate(notes):
        if not note:
            raise InvalidRequest(f"notes[{index}]", "must be text that is not empty")
        if len(note) > MAX_NOTE:
            raise TooLarge(f"notes[{index}]", f"may have {MAX_NOTE} characters, has {len(note)}")
    return tuple(
        note if note.isascii() else note.encode("utf-8", "replace").decode() for note in notes
    )


def check_message(rows: Sequence[Step], notes: Sequence[str] = ()) -> int:
    """The size of the rows of one message, which the engine does not take a worker's word for."""
    if len(rows) > MAX_ROWS:
        raise TooLarge("rows", f"a message may have {MAX_ROWS} rows, this one has {len(rows)}")
    if len(notes) > MAX_NOTES:
        raise TooLarge("notes", f"a message may have {MAX_NOTES} notes, this one has {len(notes)}")
    if max(map(len, notes), default=0) > MAX_NOTE:
        raise TooLarge("notes", f"a note may have {MAX_NOTE} characters")
    if (size := len(_encode(rows))) <= MAX_ROW:
        return size
    sizes = [len(_encode(row)) for row in rows]
    if max(sizes, default=0) > MAX_ROW + _STAMP:
        raise TooLarge("rows", f"a row may have {MAX_ROW} bytes, one has {max(sizes)}")
    if sum(sizes) > MAX_BYTES + _STAMP * len(rows):
        raise TooLarge("rows", f"a message may have {MAX_BYTES} bytes, this one has {sum(sizes)}")
    return sum(sizes)
