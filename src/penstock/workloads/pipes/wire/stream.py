"""Frames over TLS, independent of the transport."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.ports.tls import Tls
from penstock.workloads.pipes.wire.frames import Splitter, head_of
from penstock.workloads.pipes.wire.kinds import HELLO_LIMITS, Kind

_JOIN = 16 << 10
"""Up to this size, parts of a frame become one record of TLS: copying them together costs less
than one record more."""
_PIECE = 256 << 10
"""How much of a larger part is encrypted before it is handed on."""


class Stream:
    """Both directions of one connection."""

    def __init__(self, tls: Tls) -> None:
        self.sent = self.received = 0
        """Bytes of all frames, without what TLS adds."""
        self._tls, self._splitter = tls, Splitter(HELLO_LIMITS)

    @property
    def within(self) -> bool:
        """Whether a frame has begun to come and is not whole."""
        return self._splitter.within

    def expect(self, limits: Mapping[int, int]) -> None:
        """What may come from now on, and how large. At first it is HELLO or BYE."""
        self._splitter.limits = limits

    def frames(self) -> Iterator[tuple[Kind, memoryview]]:
        """Those that are whole, of what was fed to TLS. Raises BadFrame and ssl.SSLError."""
        while count := self._tls.read(self._splitter.get_buffer()):
            self.received += count
            yield from self._splitter.written(count)

    def pack(self, kind: Kind, buffers: tuple[bytes | memoryview, ...]) -> Iterator[bytes]:
        """What to send for a frame, encrypted. To be read to its end."""
        size = sum(map(len, buffers))
        head = head_of(kind, size)
        self.sent += len(head) + size
        small: list[bytes | memoryview] = [head]
        for buffer in buffers:
            if len(buffer) <= _JOIN:
                small.append(buffer)
                continue
            self._tls.write(b"".join(small))
            small = []
            for at in range(0, len(buffer), _PIECE):
                self._tls.write(buffer[at : at + _PIECE])
                yield self._tls.take()
        if small:
            self._tls.write(b"".join(small))
            yield self._tls.take()
