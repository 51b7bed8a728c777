"""A container's output as it comes: as log lines, and byte for byte for who is attached."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable

from penstock.workloads.container.job import Stream

_LONGEST = 8192
"""Characters after which a line that does not end is told anyway."""


class Lines:
    """Tells whole lines of each stream, up to so many bytes of it; what ends without a newline is
    told at the end."""

    def __init__(self, tell: Callable[[str, str], None], most: int) -> None:
        self._tell, self._most = tell, most
        self._heard = {stream: _Half() for stream in Stream}

    def hear(self, stream: Stream, data: bytes) -> None:
        half = self._heard[stream]
        if half.taken >= self._most:
            return
        half.taken += len(data)
        half.text += half.decode(data)
        *whole, half.text = half.text.split("\n")
        while len(half.text) > _LONGEST:
            whole.append(half.text[:_LONGEST])
            half.text = half.text[_LONGEST:]
        for line in whole:
            self._tell(line.removesuffix("\r"), stream.value)
        if half.taken >= self._most:
            self._tell(
                f"more than {self._most:,} bytes: of what follows only the end is kept",
                "warning",
            )

    def end(self) -> None:
        for stream, half in self._heard.items():
            half.text += half.decode(b"", True)
            if half.text:
                self._tell(half.text, stream.value)
                half.text = ""


class _Half:
    """What is known of a line that has not ended."""

    def __init__(self) -> None:
        self.text = ""
        self.taken = 0
        self.decode = getincrementaldecoder("utf-8")("replace").decode


class Pieces:
    """Tells every byte of each stream, up to so many, to who is attached to the job."""

    def __init__(self, stream: Callable[[str], None], most: int) -> None:
        self._stream, self._left = stream, dict.fromkeys(Stream, most)

    def hear(self, stream: Stream, data: bytes) -> None:
        """After the limit nothing: who reads must not take what follows for what is next."""
        if (left := self._left[stream]) >= len(data):
            self._left[stream] = left - len(data)
            self._stream(stream.value + " " + data.decode("latin-1"))
        else:
            self._left[stream] = 0


def read_piece(text: str) -> tuple[str, bytes]:
    """The stream, and its bytes."""
    stream, _, data = text.partition(" ")
    return stream, data.encode("latin-1", "replace")
