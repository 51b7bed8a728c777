"""Where a page ended, as a text that says nothing to anybody else."""

from __future__ import annotations

import math
from base64 import urlsafe_b64decode, urlsafe_b64encode
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from penstock.core.errors import InvalidRequest


class Place(Struct, frozen=True, array_like=True):
    order: str
    """n: newest first, o: oldest first, w: in the order of a workflow, a: the audit log."""
    at: int


class RunPlace(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Among runs of pipelines, newest first."""

    order: str
    """r"""
    created_at: float
    job_id: str


T = TypeVar("T")
_place = msgspec.msgpack.Decoder(Place)
_run_place = msgspec.msgpack.Decoder(RunPlace)
_encode = msgspec.msgpack.Encoder().encode
_LONGEST = 1000


def cursor(order: str, at: int) -> str:
    return _written(Place(order, at))


def run_cursor(created_at: float, job_id: str) -> str:
    return _written(RunPlace("r", created_at, job_id))


def _written(place: Any) -> str:
    return urlsafe_b64encode(_encode(place)).rstrip(b"=").decode("ascii")


def place_in(order: str, text: str | None) -> int | None:
    """Where to go on. Raises InvalidRequest for a cursor of another listing."""
    if text is None:
        return None
    place = _read(text, _place)
    if place.order != order or not 0 <= place.at < 1 << 62:
        raise InvalidRequest("cursor", "belongs to another listing", hint=_HINT)
    return place.at


def run_place(text: str | None) -> tuple[float, str] | None:
    """The same for runs: (created_at, job_id)."""
    if text is None:
        return None
    place = _read(text, _run_place)
    if place.order != "r" or not math.isfinite(place.created_at):
        raise InvalidRequest("cursor", "belongs to another listing", hint=_HINT)
    return place.created_at, place.job_id


def _read(text: str, decoder: msgspec.msgpack.Decoder[T]) -> T:
    try:
        if len(text) > _LONGEST:
            raise ValueError(text)
        return decoder.decode(urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4)))
    except (ValueError, msgspec.DecodeError, RecursionError):
        raise InvalidRequest("cursor", "is not one that a page gave", hint=_HINT) from None


_HINT = "pass `next` of the page before, with the same filters and order"
