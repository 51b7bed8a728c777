"""Where a page ended, as a text that says nothing to anybody else."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode

import msgspec
from msgspec import Struct

from penstock.core.errors import InvalidRequest


class Place(Struct, frozen=True, array_like=True):
    order: str
    """n: newest first, o: oldest first, w: in the order of a workflow, a: the audit log."""
    at: int


_decode = msgspec.msgpack.Decoder(Place).decode
_encode = msgspec.msgpack.Encoder().encode


def cursor(order: str, at: int) -> str:
    return urlsafe_b64encode(_encode(Place(order, at))).rstrip(b"=").decode("ascii")


def place_in(order: str, text: str | None) -> int | None:
    """Where to go on. Raises InvalidRequest for a cursor of another listing."""
    if text is None:
        return None
    try:
        place = _decode(urlsafe_b64decode(text.encode("ascii") + b"=" * (-len(text) % 4)))
    except (ValueError, msgspec.DecodeError):
        raise InvalidRequest("cursor", "is not one that a page gave", hint=_HINT) from None
    if place.order != order or not 0 <= place.at < 1 << 62:
        raise InvalidRequest("cursor", "belongs to another listing", hint=_HINT)
    return place.at


_HINT = "pass `next` of the page before, with the same filters and order"
