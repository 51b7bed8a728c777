"""What a worker and its child processes say to each other, over a socket.

A frame is four bytes of length and a msgpack message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from penstock.core.job import JobRequest
from penstock.ports.executor import Outcome

_LENGTH = struct.Struct(">I")


class Frame(Struct, frozen=True, array_like=True, tag=True):
    """One message."""


class Prepare(Frame, frozen=True):
    """To a child, first: how to be like its parent."""

    argv: tuple[str, ...]
    main: dict[str, str]
    """Where the parent's `__main__` comes from, as multiprocessing puts it."""
    log_level: int


class Run(Frame, frozen=True):
    """To a child: run this function."""

    module: str
    qualname: str
    payload: bytes
    request: JobRequest
    attempt: int
    remaining: float
    memory_limit: int | None
    max_result: int
    offline: bool = False
    """Only in a process that has left the network."""


class Cancel(Frame, frozen=True):
    """To a child: the running job should end."""

    reason: str


class Began(Frame, frozen=True):
    """From a child: from here on, the job's own code runs."""


class Log(Frame, frozen=True):
    text: str
    level: str


class Progress(Frame, frozen=True):
    fraction: float | None
    message: str


class Piece(Frame, frozen=True):
    text: str


class Done(Frame, frozen=True):
    """From a child: the job has ended. `clean`: it left nothing running."""

    outcome: Outcome
    clean: bool


ToChild = Prepare | Run | Cancel
FromChild = Began | Log | Progress | Piece | Done

_encoder = msgspec.msgpack.Encoder()
decode_to_child = msgspec.msgpack.Decoder(ToChild).decode
decode_from_child = msgspec.msgpack.Decoder(FromChild).decode


def encode(frame: Frame) -> bytes:
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Bytes as they arrive; whole messages as they are complete."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self._data += data
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            end = _LENGTH.size + length
            if len(self._data) < end:
                return
            body = bytes(self._data[_LENGTH.size : end])
            del self._data[:end]
            yield body
