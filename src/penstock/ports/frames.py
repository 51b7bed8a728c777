"""Messages on a stream of bytes: four bytes of length, and then the message."""

from __future__ import annotations

from collections.abc import Iterator


def framed(message: bytes) -> bytes:
    return len(message).to_bytes(4, "big") + message


class FrameBuffer:
    """Bytes as they arrive; whole messages as they are complete."""

    def __init__(self, max_size: int | None = None) -> None:
        self.max_size = max_size
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Raises ValueError for a message that is longer than max_size."""
        rest = self._rest
        rest += data
        while len(rest) >= 4:
            length = int.from_bytes(rest[:4], "big")
            if self.max_size is not None and length > self.max_size:
                raise ValueError(f"a frame of {length} bytes")
            end = 4 + length
            if len(rest) < end:
                return
            message = bytes(rest[4:end])
            del rest[:end]
            yield message
