"""What a container writes: both streams of one job, kept head and tail, read while they grow.

A stream is kept in segments. A segment is a run of the stream that knows the offset of its first
byte. The first one holds the head; each later one is filled and followed by the next, and those
that have fallen behind the tail are removed. So at any moment the segments alone tell how long the
stream was and which bytes of it are there: nothing else has to be kept in step with them, and a
process that is killed between any two instructions leaves no contradiction.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Lock

from msgspec import Struct
from msgspec.structs import replace

from penstock.workloads.container.job import Stream, StreamCount
from penstock.workloads.container.timeouts import in_thread

SMALLEST = 64 << 10
"""Bytes of a segment at least, so that a small limit does not mean a file per write."""
_MISSED = "missed"
_FAR = 1 << 62
_PIECE = 4 << 20

log = logging.getLogger(__name__)


class LogPage(Struct, frozen=True):
    """Some of a stream, from an offset on."""

    stream: Stream
    offset: int
    """Of the first byte of `data`, counted from the first that the container wrote."""
    data: bytes
    next: int
    """The offset to ask for next."""
    skipped: int = 0
    """Bytes between the offset asked for and `offset` that are not kept."""
    end: bool = False
    """Nothing will come after `next`."""
    cut: bool = False
    """The byte at `next` is not kept."""

    @property
    def text(self) -> str:
        return self.data.decode(errors="replace")

    def whole(self, *, ragged: bool = False) -> LogPage:
        """The same without a character at its end whose rest may come, and, after a gap or where it
        begins anywhere (`ragged`), without the rest of one whose beginning is not there."""
        lead = _rest_of_character(self.data) if ragged or self.skipped else 0
        held = 0 if self.end or self.cut else _unfinished(self.data[lead:])
        return replace(
            self,
            offset=self.offset + lead,
            data=self.data[lead : len(self.data) - held],
            next=self.next - held,
            skipped=self.skipped + lead,
        )


class Output:
    """Half of the limit is kept from a stream's start and half from its end, whatever is written;
    what lies between is counted. Every write is in a file when it returns, so that a worker that is
    killed loses nothing of what it took.

    A write waits for nobody who reads. Writing and waiting belong to one event loop; reading is
    safe in any thread.
    """

    def __init__(self, folder: Path, limit: int, *, go_on: bool = False) -> None:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        self._missed = folder / _MISSED
        self._logs = {stream: HeadTailLog(folder, stream, limit) for stream in Stream}
        if not go_on:
            for kept in self._logs.values():
                kept.remove()
            self._missed.unlink(missing_ok=True)
        self._gap = self._missed.exists()
        self._ended = self._closed = False
        self._listeners: list[Callable[[Stream, bytes], None]] = []
        self._news = asyncio.Event()
        """Set, and replaced, when something was written or nothing more comes."""

    @classmethod
    def reopen(cls, folder: Path, limit: int) -> Output:
        """What an earlier process kept, to be read or to be gone on with. Whether more will come
        is not known from the files: who knows that nothing does says `end`."""
        return cls(folder, limit, go_on=True)

    def write(self, stream: Stream, data: bytes) -> None:
        if self._closed:
            raise ValueError("the output is closed")
        self._logs[stream].write(data)
        for heard in self._listeners:
            try:
                heard(stream, data)
            except Exception:
                # Who listens can't stop a container.
                log.exception("a listener to a job's output failed")
        self._wake()

    def missed(self) -> None:
        """Note that bytes were lost while no worker was there."""
        self._gap = True
        self._missed.touch(mode=0o600)

    def end(self) -> None:
        """Nothing more comes: whoever waits is woken."""
        self._ended = True
        self._wake()

    def count(self, stream: Stream) -> StreamCount:
        kept = self._logs[stream]
        return StreamCount(kept.total, kept.kept(), self._gap)

    def page(self, stream: Stream, offset: int, limit: int) -> LogPage:
        """Up to `limit` bytes without a gap, the first that are kept at or after the offset;
        a negative one counts from the end, one beyond the end is the end."""
        kept, ended = self._logs[stream], self._ended
        asked = max(kept.total + offset, 0) if offset < 0 else min(offset, kept.total)
        at, data, stop = kept.take(asked, limit)
        after, total = at + len(data), kept.total
        end, cut = ended and after >= total, after == stop < total
        return LogPage(stream, at, data, after, at - asked, end, cut)

    async def more(self, stream: Stream, offset: int, timeout: float | None = None) -> None:
        """Until there is a byte at or after the offset, or the end, or the time is over."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while not (
                    self._ended or self._closed or self._logs[stream].total > max(offset, 0)
                ):
                    await self._news.wait()

    def text(self, stream: Stream, most: int | None = None) -> str:
        """What is kept, or of that the first and the last bytes, as UTF-8; a line tells what was
        left out."""
        return decoded(*self._logs[stream].pieces(most), ended=self._ended)

    async def pieces(self, stream: Stream) -> AsyncIterator[bytes]:
        """All bytes that are kept, each as soon as that is certain: the head while it is written,
        the rest after the end."""
        head, at = self._logs[stream].head, 0
        while not (self._ended or self._closed):
            size = min(_PIECE, head - at)
            await self.more(stream, at + size - 1 if size else _FAR)
            page = await in_thread(self.page, stream, at, size)
            if page.offset != at:
                head = at  # a disk that was full took some
            elif page.data:
                at = page.next
                yield page.data
        while (page := await in_thread(self.page, stream, at, _PIECE)).data:
            at = page.next
            yield page.data

    def listen(self, heard: Callable[[Stream, bytes], None]) -> None:
        """Hear every write from now on, also of what is not kept."""
        self._listeners.append(heard)

    def close(self) -> None:
        """Let go of files and of whoever waits; what is kept can still be read."""
        self._closed = True
        for kept in self._logs.values():
            kept.close()
        self._wake()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


# -- one stream ---------------------------------------------------------------------------------


class Segment:
    """A file `<name>.<offset of the first byte>`; its size is the segment's."""

    def __init__(self, path: Path, start: int, size: int = 0) -> None:
        self.start = start
        self.size = size
        self._path = path
        self._handle = -1

    @property
    def end(self) -> int:
        return self.start + self.size

    def append(self, data: memoryview) -> None:
        """Raises OSError; what was written before it counts."""
        if self._handle < 0:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
            self._handle = os.open(self._path, flags, 0o600)
        while data:
            written = os.write(self._handle, data)
            self.size += written
            data = data[written:]

    def opened(self, files: ExitStack) -> int:
        """What it holds now, to be read although it may be removed meanwhile."""
        handle = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        files.callback(os.close, handle)
        return handle

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1

    def remove(self) -> None:
        self.close()
        with suppress(FileNotFoundError):
            self._path.unlink()


_Part = tuple[int, int, int]
"""An open file, an offset in it, and a number of bytes."""


class HeadTailLog:
    """The first and the last bytes of a stream: half of `limit` each, the odd one first.

    Any thread may read while one writes. A disk that is full costs bytes, never an error: they
    are counted, and missing.
    """

    def __init__(self, folder: Path, name: str, limit: int) -> None:
        self._folder, self._name = folder, name
        self.head = (max(limit, 1) + 1) // 2
        """Bytes of the start that are kept whatever follows."""
        self._tail = max(limit, 1) // 2
        self._most = max(self._tail, SMALLEST)
        self._segments = self._found()
        self._lock = Lock()
        self.total = max((segment.end for segment in self._segments), default=0)
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

    def take(self, offset: int, limit: int) -> tuple[int, bytes, int]:
        """The first kept bytes at or after the offset, where they begin, and where the run of
        kept bytes ends."""
        with ExitStack() as files:
            with self._lock:
                for start, stop in self._ranges():
                    if stop > offset:
                        at = max(start, offset)
                        parts = self._opened(files, at, min(stop, at + max(limit, 0)))
                        break
                else:
                    return self.total, b"", self.total
            return at, _read(parts), stop

    def pieces(self, most: int | None = None) -> tuple[int, list[tuple[int, bytes]]]:
        """How long the stream is, and all that is kept of it, or as much as a stream with that
        limit would have kept, each run of bytes with its offset."""
        with ExitStack() as files:
            with self._lock:
                total = self.total
                runs = self._ranges(most)
                found = [(start, self._opened(files, start, stop)) for start, stop in runs]
            return total, [(start, _read(parts)) for start, parts in found]

    def close(self) -> None:
        with self._lock:
            for segment in self._segments:
                segment.close()

    def remove(self) -> None:
        with self._lock:
            for segment in self._segments:
                segment.remove()
            self._segments, self.total = [], 0

    def _found(self) -> list[Segment]:
        pattern = re.compile(rf"{re.escape(self._name)}\.([0-9]+)", re.ASCII)
        found = [
            Segment(self._folder / entry.name, int(match[1]), entry.stat().st_size)
            for entry in os.scandir(self._folder)
            if (match := pattern.fullmatch(entry.name))
        ]
        return sorted(found, key=lambda segment: segment.start)

    def _keep(self, at: int, data: memoryview) -> None:
        while data:
            if at > self.head and len(data) > self._most:
                # What is in front of that would fall behind the tail at once.
                at, data = at + len(data) - self._most, data[-self._most :]
            segment, room = self._open_end(at)
            segment.append(data[:room])
            at, data = at + room, data[room:]

    def _open_end(self, at: int) -> tuple[Segment, int]:
        """The segment into which the byte at `at` goes, and how many go there."""
        if self._segments and (last := self._segments[-1]).end == at:
            if (room := self._capacity(last) - last.size) > 0:
                return last, room
            last.close()
        segment = Segment(self._folder / f"{self._name}.{at}", at)
        self._segments.append(segment)
        return segment, self._capacity(segment)

    def _capacity(self, segment: Segment) -> int:
        return self._most if segment.start else self.head

    def _give_up(self) -> None:
        """Let the next write begin a segment of its own."""
        if self._segments:
            self._segments[-1].close()
            if not self._segments[-1].size:
                self._segments.pop().remove()

    def _drop(self) -> None:
        first = self.total - self._tail
        while len(self._segments) > 2 and (behind := self._segments[1]).end <= first:
            behind.remove()
            del self._segments[1]

    def _ranges(self, most: int | None = None) -> list[tuple[int, int]]:
        """Runs of bytes that are there and count as kept."""
        runs: list[tuple[int, int]] = []
        head, rest = self.head, self._tail
        if most is not None:
            head, rest = min(head, (max(most, 1) + 1) // 2), min(rest, max(most, 1) // 2)
        tail = max(head, self.total - rest)
        for segment in self._segments:
            for low, high in ((0, head), (tail, self.total)):
                start, stop = max(segment.start, low), min(segment.end, high)
                if runs and runs[-1][1] == start < stop:
                    runs[-1] = (runs[-1][0], stop)
                elif start < stop:
                    runs.append((start, stop))
        return runs

    def _opened(self, files: ExitStack, start: int, stop: int) -> list[_Part]:
        return [
            (segment.opened(files), low - segment.start, high - low)
            for segment in self._segments
            if (low := max(segment.start, start)) < (high := min(segment.end, stop))
        ]


def _read(parts: list[_Part]) -> bytes:
    return b"".join(os.pread(handle, count, at) for handle, at, count in parts)


# -- as text ------------------------------------------------------------------------------------

_Decoder = getincrementaldecoder("utf-8")


def decoded(total: int, pieces: Sequence[tuple[int, bytes]], *, ended: bool) -> str:
    """The text, with a line where bytes are missing. No character is cut there: one of which only a
    part is kept is left out as a whole. Before the end an unfinished last character is not there
    yet."""
    text, shown = "", 0
    for start, data in pieces:
        lead = _rest_of_character(data) if start > shown else 0
        is_last = start + len(data) == total
        held = 0 if is_last and ended else _unfinished(data[lead:])
        text = _with_gap(text, start + lead - shown)
        text += data[lead : len(data) - held].decode(errors="replace")
        shown = start + len(data) - (0 if is_last else held)
    return _with_gap(text, total - shown)


def _with_gap(text: str, count: int) -> str:
    if not count:
        return text
    line = "" if text.endswith("\n") or not text else "\n"
    return f"{text}{line}[… {count:,} byte{'s' if count > 1 else ''} left out …]\n"


def _rest_of_character(data: bytes) -> int:
    """How many bytes at the start can't begin a character: three at most."""
    return next((at for at, byte in enumerate(data[:3]) if byte & 0xC0 != 0x80), len(data[:3]))


def _unfinished(data: bytes) -> int:
    """How many bytes at the end begin a character that goes on behind them."""
    decoder = _Decoder("replace")
    decoder.decode(data[-3:])
    return len(decoder.getstate()[0])


# -- for whoever follows the job ---------------------------------------------------------------

_LONGEST_LINE = 8192
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
        while len(half.text) > _LONGEST_LINE:
            whole.append(half.text[:_LONGEST_LINE])
            half.text = half.text[_LONGEST_LINE:]
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
