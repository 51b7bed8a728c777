"""What is kept of one stream: its first bytes and its last, in segments.

A segment is a run of the stream that knows the offset of its first byte. The first one holds
the head; each later one is filled and followed by the next, and those that have fallen behind
the tail are removed. So at any moment the segments alone tell how long the stream was and which
bytes of it are there: nothing else has to be kept in step with them, and a process that is
killed between any two instructions leaves no contradiction.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Lock
from typing import Protocol

from msgspec import Struct

log = logging.getLogger(__name__)

CHARACTER = 4
"""Bytes of the longest character in UTF-8: whether one is cut can be told from the three bytes
in front of a cut and the one behind it, so those are kept too."""
SMALLEST = 64 << 10
"""Bytes of a segment at least, so that a small limit does not mean a file per write."""


class Readable(Protocol):
    def read(self, at: int, count: int) -> bytes: ...


class Segment(Protocol):
    @property
    def start(self) -> int: ...

    @property
    def size(self) -> int: ...

    def append(self, data: memoryview) -> None:
        """Raises OSError; what was written before it counts."""

    def opened(self) -> AbstractContextManager[Readable]:
        """What it holds now, to be read although it may be removed meanwhile."""

    def sync(self) -> None: ...

    def close(self) -> None: ...

    def remove(self) -> None: ...


class BatchStore(Protocol):
    """Where segments are."""

    def found(self) -> list[Segment]: ...

    def begin(self, start: int) -> Segment: ...


class MemorySegment:
    def __init__(self, start: int) -> None:
        self.start = start
        self._data = bytearray()

    @property
    def size(self) -> int:
        return len(self._data)

    def append(self, data: memoryview) -> None:
        self._data += data

    def opened(self) -> AbstractContextManager[Readable]:
        return nullcontext(self)

    def read(self, at: int, count: int) -> bytes:
        return bytes(self._data[at : at + count])

    def sync(self) -> None: ...

    def close(self) -> None: ...

    def remove(self) -> None: ...


class Memory:
    def found(self) -> list[Segment]:
        return []

    def begin(self, start: int) -> Segment:
        return MemorySegment(start)


class _Reading:
    def __init__(self, handle: int) -> None:
        self._handle = handle

    def read(self, at: int, count: int) -> bytes:
        return os.pread(self._handle, count, at)


class FileSegment:
    def __init__(self, path: Path, start: int, size: int = 0) -> None:
        self.start = start
        self.size = size
        self._path = path
        self._handle = -1

    def append(self, data: memoryview) -> None:
        if self._handle < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._handle = os.open(self._path, flags, 0o600)
        while data:
            written = os.write(self._handle, data)
            self.size += written
            data = data[written:]

    @contextmanager
    def opened(self) -> Iterator[Readable]:
        handle = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield _Reading(handle)
        finally:
            os.close(handle)

    def sync(self) -> None:
        flush(self._path)

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def remove(self) -> None:
        self.close()
        with suppress(FileNotFoundError):
            self._path.unlink()


class Folder:
    """Files `<name>.<offset of the first byte>`; a file's size is the segment's."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._name = name
        self._pattern = re.compile(rf"{re.escape(name)}\.([0-9]+)", re.ASCII)

    def found(self) -> list[Segment]:
        found = [
            FileSegment(self._path / entry.name, int(match[1]), entry.stat().st_size)
            for entry in os.scandir(self._path)
            if (match := self._pattern.fullmatch(entry.name))
        ]
        return sorted(found, key=lambda segment: segment.start)

    def begin(self, start: int) -> Segment:
        return FileSegment(self._path / f"{self._name}.{start}", start)


class Piece(Struct, frozen=True):
    """A run of bytes that is kept."""

    start: int
    data: bytes
    before: bytes = b""
    """Up to three bytes in front of it, though they don't count as kept."""
    after: bytes = b""

    @property
    def stop(self) -> int:
        return self.start + len(self.data)


class Kept:
    """The first and the last bytes of a stream: half of `limit` each, the odd one first.

    Any thread may read while one writes. A disk that is full costs bytes, never an error: they
    are counted, and missing.
    """

    def __init__(self, shelf: BatchStore, limit: int) -> None:
        self._shelf = shelf
        self._head = (max(limit, 1) + 1) // 2
        self._tail = max(limit, 1) // 2
        self._most = max(self._tail + CHARACTER - 1, SMALLEST)
        self._segments = shelf.found()
        self._lock = Lock()
        self.total = max(map(_end, self._segments), default=0)
        """Bytes that the stream had so far."""

    def write(self, data: bytes) -> None:
        with self._lock:
            at, self.total = self.total, self.total + len(data)
            try:
                self._keep(at, memoryview(data))
            except OSError as error:
                log.warning("output of a job can't be kept: %s", error)
                self._give_up()
            self._drop()

    def kept(self) -> int:
        with self._lock:
            return sum(stop - start for start, stop in self._ranges())

    def take(self, offset: int, limit: int) -> tuple[int, bytes]:
        """The first kept bytes at or after the offset, and where they begin."""
        with ExitStack() as files:
            with self._lock:
                for start, stop in self._ranges():
                    if stop > offset:
                        at = max(start, offset)
                        parts = self._opened(files, at, min(stop, at + max(limit, 0)))
                        break
                else:
                    return self.total, b""
            return at, _read(parts)

    def pieces(self, most: int | None = None) -> tuple[int, list[Piece]]:
        """How long the stream is, and all that is kept of it, or as much as a stream with that
        limit would have kept."""
        with ExitStack() as files:
            with self._lock:
                total = self.total
                found = [
                    (
                        start,
                        self._opened(files, start, stop),
                        self._opened(files, max(start - CHARACTER + 1, 0), start),
                        self._opened(files, stop, stop + 1),
                    )
                    for start, stop in self._ranges(most)
                ]
            return total, [Piece(start, *map(_read, parts)) for start, *parts in found]

    def sync(self) -> None:
        with self._lock:
            segments = [segment for segment in self._segments if segment.size]
        for segment in segments:
            # It may have fallen behind the tail since.
            with suppress(FileNotFoundError):
                segment.sync()

    def close(self) -> None:
        with self._lock:
            for segment in self._segments:
                segment.close()

    def remove(self) -> None:
        with self._lock:
            for segment in self._segments:
                segment.remove()
            self._segments, self.total = [], 0

    def _keep(self, at: int, data: memoryview) -> None:
        while data:
            if at > self._head and len(data) > self._most:
                # What is in front of that would fall behind the tail at once.
                at, data = at + len(data) - self._most, data[-self._most :]
            segment, room = self._open_end(at)
            segment.append(data[:room])
            at, data = at + room, data[room:]

    def _open_end(self, at: int) -> tuple[Segment, int]:
        """The segment into which the byte at `at` goes, and how many go there."""
        if self._segments and _end(last := self._segments[-1]) == at:
            if (room := self._capacity(last) - last.size) > 0:
                return last, room
            last.close()
        self._segments.append(segment := self._shelf.begin(at))
        return segment, self._capacity(segment)

    def _capacity(self, segment: Segment) -> int:
        return self._most if segment.start else self._head + 1

    def _give_up(self) -> None:
        """Let the next write begin a segment of its own."""
        if self._segments:
            self._segments[-1].close()
            if not self._segments[-1].size:
                self._segments.pop().remove()

    def _drop(self) -> None:
        first = self.total - self._tail - CHARACTER + 1
        while len(self._segments) > 2 and _end(behind := self._segments[1]) <= first:
            behind.remove()
            del self._segments[1]

    def _ranges(self, most: int | None = None) -> list[tuple[int, int]]:
        """Runs of bytes that are there and count as kept."""
        runs: list[tuple[int, int]] = []
        head, rest = self._head, self._tail
        if most is not None:
            head, rest = min(head, (max(most, 1) + 1) // 2), min(rest, max(most, 1) // 2)
        tail = max(head, self.total - rest)
        for segment in self._segments:
            for low, high in ((0, head), (tail, self.total)):
                start, stop = max(segment.start, low), min(_end(segment), high)
                if runs and runs[-1][1] == start < stop:
                    runs[-1] = (runs[-1][0], stop)
                elif start < stop:
                    runs.append((start, stop))
        return runs

    def _opened(self, files: ExitStack, start: int, stop: int) -> list[tuple[Readable, int, int]]:
        return [
            (files.enter_context(segment.opened()), low - segment.start, high - low)
            for segment in self._segments
            if (low := max(segment.start, start)) < (high := min(_end(segment), stop))
        ]


def _read(parts: list[tuple[Readable, int, int]]) -> bytes:
    return b"".join(file.read(at, count) for file, at, count in parts)


def _end(segment: Segment) -> int:
    return segment.start + segment.size


def flush(path: Path) -> None:
    """Make a file's content, or a folder's entries, durable."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
