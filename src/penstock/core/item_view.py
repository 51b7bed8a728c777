"""An item of a stage as it is shown: what it was given and what it gave as values, if small."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from penstock.core.errors import UnreadablePointer
from penstock.core.pointer import JSON, data_media_type, decode_data, encode_data
from penstock.core.stages import ErrorClass, ItemOutcome, ItemRecord

INLINE = 4096
"""Bytes of JSON that are shown as the value that they are."""
_LONGEST = len(encode_data(b"")) + 4 * (INLINE + 2) // 3


class ItemView(Struct, frozen=True, kw_only=True):
    """One item of one stage. Of a value and its pointer one is there; none if there is none."""

    seq: int
    """Its place in the stage, from 0."""
    key: str
    """What it is known by, in this run and in one that retries it."""
    outcome: ItemOutcome
    input: Raw | UnsetType = UNSET
    """What it was given, where that is JSON of at most 4 KiB."""
    input_ptr: str | UnsetType = UNSET
    """Where else it is: a `data:` URI or a blob."""
    output: Raw | UnsetType = UNSET
    """What it gave, where that is JSON of at most 4 KiB."""
    output_ptr: str | UnsetType = UNSET
    """Where else it is: a `data:` URI or a blob."""
    fan: int
    """How many items it gives a stage that maps over this one."""
    attempts: int
    error_class: ErrorClass | None
    error_code: str
    error: str
    duration_ms: float
    finished_at: float | None
    reused: bool
    """Whether it was taken over from the run that this one retries."""


_SAME = (
    "seq",
    "key",
    "outcome",
    "fan",
    "attempts",
    "error_class",
    "error_code",
    "error",
    "duration_ms",
    "finished_at",
    "reused",
)


def item_view(item: ItemRecord) -> ItemView:
    given, gave = _shown(item.input), _shown(item.output)
    return ItemView(
        input=UNSET if given is None else given,
        input_ptr=item.input if given is None and item.input else UNSET,
        output=UNSET if gave is None else gave,
        output_ptr=item.output if gave is None and item.output else UNSET,
        **{name: getattr(item, name) for name in _SAME},
    )


def item_of(view: ItemView) -> ItemRecord:
    """The record that a view was made of."""
    return ItemRecord(
        input=_pointer(view.input, view.input_ptr),
        output=_pointer(view.output, view.output_ptr),
        **{name: getattr(view, name) for name in _SAME},
    )


def _shown(pointer: str) -> Raw | None:
    """The value behind a pointer; None where there is none that can be shown."""
    if not pointer.startswith("data:") or len(pointer) > _LONGEST:
        return None
    try:
        data = decode_data(pointer) if data_media_type(pointer) == JSON else b""
        if not 0 < len(data) <= INLINE:
            return None
        msgspec.json.decode(data)  # or the whole answer would be no JSON
    except (UnreadablePointer, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return Raw(data)


def _pointer(value: Raw | UnsetType, pointer: str | UnsetType) -> str:
    if value is not UNSET:
        return encode_data(bytes(value))
    return "" if pointer is UNSET else pointer
