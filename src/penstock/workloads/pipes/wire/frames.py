"""Bytes to frames: a length (u32), a kind (u8), and that many bytes. All numbers little-endian."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

from penstock.workloads.pipes.wire.counters import Refused
from penstock.workloads.pipes.wire.kinds import Kind

_HEAD = struct.Struct("<IB")
_BUFFER = 64 << 10
_OWN = 16 << 10
"""From this size on, the rest of a frame is read into its own memory, not by way of the buffer."""


class BadFrame(Exception):
    """What came in can't be taken. `what` is for the counters."""

    def __init__(
        self, reason: str, what: str = Refused.BAD_FRAME, job_id: bytes | None = None
    ) -> None:
        super().__init__(reason)
        self.reason, self.what = reason, what
        self.job_id = job_id
        """The one job it is about; the others of its frame are well."""


def head_of(kind: Kind, size: int) -> bytes:
    return _HEAD.pack(size, kind)


class Splitter:
    """Takes bytes as they come and gives frames. A payload is its receiver's: memory of its own,
    which can be written to."""

    def __init__(self, limits: Mapping[int, int]) -> None:
        self.limits = limits
        """The kinds that may come, and how large. A change counts from the next frame on."""
        self._buffer = memoryview(bytearray(_BUFFER))
        self._filled = 0
        self._kind = Kind.HELLO
        self._own: memoryview | None = None
        self._at = 0

    def get_buffer(self) -> memoryview:
        """Where the next bytes are to be written; never empty."""
        if self._own is not None:
            return self._own[self._at :]
        return self._buffer[self._filled :]

    def written(self, count: int) -> Iterator[tuple[Kind, memoryview]]:
        """The frames that are whole now. To be read to its end; raises BadFrame after the last
        good one, and then nothing more can be taken."""
        if self._own is not None:
            self._at += count
            if self._at == len(self._own):
                own, self._own = self._own, None
                yield self._kind, own
            return
        self._filled += count
        yield from self._split()

    @property
    def within(self) -> bool:
        """Whether a frame has begun and is not whole."""
        return self._own is not None or self._filled > 0

    def _split(self) -> Iterator[tuple[Kind, memoryview]]:
        buffer, filled, at = self._buffer, self._filled, 0
        while filled - at >= _HEAD.size:
            size, number = _HEAD.unpack_from(buffer, at)
            kind = self._checked(number, size)
            begin, end = at + _HEAD.size, at + _HEAD.size + size
            if end <= filled:
                at = end
                yield kind, memoryview(bytearray(buffer[begin:end]))
            elif size >= _OWN:
                self._begin_own(kind, size, buffer[begin:filled])
                at = filled
            else:
                break
        left = filled - at
        if at and left:
            buffer[:left] = bytes(buffer[at:filled])
        self._filled = left

    def _begin_own(self, kind: Kind, size: int, have: memoryview) -> None:
        self._kind, self._at = kind, len(have)
        self._own = memoryview(bytearray(size))
        self._own[: len(have)] = have

    def _checked(self, number: int, size: int) -> Kind:
        limit = self.limits.get(number)
        if limit is None:
            known = number in Kind.__members__.values()
            name = Kind(number).name if known else f"kind {number}"
            raise BadFrame(f"a frame of {name} can't come here", Refused.UNKNOWN_KIND)
        if size > limit:
            raise BadFrame(
                f"{Kind(number).name} of {size} bytes: {limit} are allowed", Refused.OVERSIZED
            )
        return Kind(number)
