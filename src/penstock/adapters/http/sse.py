"""Reading server-sent events."""

from __future__ import annotations

from msgspec import Struct

_LARGEST = 16 << 20
"""Bytes of one event, beyond which the other end can't be an engine."""


class Event(Struct, frozen=True, gc=False):
    id: str
    """Where to resume after it."""
    kind: str
    """Empty for one that only tells how far the stream is."""
    data: bytes


class EventParser:
    """Cuts a stream of bytes into events, as they become whole."""

    def __init__(self, last_id: str = "") -> None:
        self.last_id = last_id
        self._rest = b""

    def feed(self, data: bytes) -> list[Event]:
        text = (self._rest + data).replace(b"\r\n", b"\n")
        *blocks, self._rest = text.split(b"\n\n")
        if len(self._rest) > _LARGEST:
            raise ValueError("an event without an end")
        return [event for block in blocks if (event := self._read(block)) is not None]

    def _read(self, block: bytes) -> Event | None:
        kind, data, told = "", [], False
        for line in block.split(b"\n"):
            name, _, value = line.partition(b":")
            value = value.removeprefix(b" ")
            match name:
                case b"id":
                    self.last_id, told = value.decode(), True
                case b"event":
                    kind = value.decode()
                case b"data":
                    data.append(value)
        if data:
            return Event(self.last_id, kind or "message", b"\n".join(data))
        return Event(self.last_id, "", b"") if told else None
