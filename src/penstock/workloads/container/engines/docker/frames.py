"""The two output streams of a container, told apart.

On an attached connection each piece has eight bytes in front: which stream it is of, three
zeros, and its length. A piece may come in any number of reads.
"""

from __future__ import annotations

from penstock.workloads.container.engine import Chunk
from penstock.workloads.container.job import Stream

HEAD = 8
_STREAMS = {0: Stream.STDOUT, 1: Stream.STDOUT, 2: Stream.STDERR}


class NoFrame(Exception):
    """These bytes are not what an attached connection carries."""


class Frames:
    """Feed it what was read."""

    def __init__(self) -> None:
        self._head = b""
        self._left = 0
        self._stream = Stream.STDOUT

    def feed(self, data: bytes) -> list[Chunk]:
        """What it held; neighbours of one stream are one chunk."""
        runs: list[tuple[Stream, list[memoryview]]] = []
        view = memoryview(data)
        at = 0
        while at < len(view):
            if not self._left:
                at = self._read_head(view, at)
                continue
            part = view[at : at + self._left]
            at += len(part)
            self._left -= len(part)
            if runs and runs[-1][0] is self._stream:
                runs[-1][1].append(part)
            else:
                runs.append((self._stream, [part]))
        return [Chunk(stream, b"".join(parts)) for stream, parts in runs]

    def _read_head(self, view: memoryview, at: int) -> int:
        missing = HEAD - len(self._head)
        self._head += view[at : at + missing]
        if len(self._head) == HEAD:
            stream = _STREAMS.get(self._head[0])
            if stream is None or self._head[1:4] != b"\0\0\0":
                raise NoFrame(f"{self._head!r} is no head of a frame")
            self._stream = stream
            self._left = int.from_bytes(self._head[4:], "big")
            self._head = b""
        return at + min(missing, len(view) - at)
