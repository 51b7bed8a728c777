"""What a container writes: both streams of one job, kept head and tail, read while they grow."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import BinaryIO, cast

from msgspec import Struct

from penstock.workloads.container.files.decoding import decoded
from penstock.workloads.container.files.kept import Folder, Kept, Memory, flush
from penstock.workloads.container.job import Stream, StreamCount

log = logging.getLogger(__name__)

_MISSED = "missed"
_FAR = 1 << 62


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


class Output:
    """Half of the limit is kept from a stream's start and half from its end, whatever is written;
    what lies between is counted. In a folder every write is in a file when it returns, so that
    a worker that is killed loses nothing of what it took.

    A write waits for nobody who reads. Reading is safe in any thread.
    """

    def __init__(self, folder: Path | None, limit: int, *, go_on: bool = False) -> None:
        if folder is not None:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        self._folder = folder
        self._kept = {
            stream: Kept(Memory() if folder is None else Folder(folder, stream), limit)
            for stream in Stream
        }
        if not go_on:
            self._forget()
        self._gap = folder is not None and (folder / _MISSED).exists()
        self._ended = self._closed = False
        self._listeners: list[Callable[[Stream, bytes], None]] = []
        self._lock = Lock()
        self._waiting: dict[asyncio.Future[None], tuple[Stream, int]] = {}

    @classmethod
    def reopen(cls, folder: Path, limit: int) -> Output:
        """What an earlier process kept, to be read or to be gone on with. Whether more will come
        is not known from the files: who knows that nothing does says `end`."""
        return cls(folder, limit, go_on=True)

    def _forget(self) -> None:
        for kept in self._kept.values():
            kept.remove()
        if self._folder is not None:
            (self._folder / _MISSED).unlink(missing_ok=True)

    def write(self, stream: Stream, data: bytes) -> None:
        if self._closed:
            raise ValueError("the output is closed")
        self._kept[stream].write(data)
        for heard in self._listeners:
            try:
                heard(stream, data)
            except Exception:
                # Who listens can't stop a container.
                log.exception("a listener to a job's output failed")
        if self._waiting:
            self._wake()

    def missed(self) -> None:
        """Note that bytes were lost while no worker was there."""
        self._gap = True
        if self._folder is not None:
            (self._folder / _MISSED).touch(mode=0o600)

    def end(self) -> None:
        """Nothing more comes: whoever waits is woken."""
        self._ended = True
        self._wake()

    def flush(self) -> None:
        """What was written is durable when this returns. It blocks: meant for a thread."""
        for kept in self._kept.values():
            kept.sync()
        if self._folder is not None:
            flush(self._folder)

    def count(self, stream: Stream) -> StreamCount:
        kept = self._kept[stream]
        return StreamCount(kept.total, kept.kept(), self._gap)

    def page(self, stream: Stream, offset: int, limit: int) -> LogPage:
        """Up to `limit` bytes without a gap, the first that are kept at or after the offset;
        a negative one counts from the end, one beyond the end is the end."""
        kept, ended = self._kept[stream], self._ended
        asked = max(kept.total + offset, 0) if offset < 0 else min(offset, kept.total)
        at, data = kept.take(asked, limit)
        after = at + len(data)
        return LogPage(stream, at, data, after, at - asked, ended and after >= kept.total)

    async def more(self, stream: Stream, offset: int, timeout: float) -> None:
        """Until there is a byte at or after the offset, or the end, or the time is over."""
        came = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._ready(stream, offset):
                return
            self._waiting[came] = (stream, offset)
        try:
            with suppress(TimeoutError):
                await asyncio.wait_for(came, timeout)
        finally:
            with self._lock:
                self._waiting.pop(came, None)

    def text(self, stream: Stream, most: int | None = None) -> str:
        """What is kept, or of that the first and the last bytes, as UTF-8; a line tells what was
        left out."""
        return decoded(*self._kept[stream].pieces(most), ended=self._ended)

    def reader(self, stream: Stream) -> BinaryIO:
        """All bytes that are kept, from the start and from the end, as a file."""
        return cast("BinaryIO", OutputReader(self, stream))

    def listen(self, heard: Callable[[Stream, bytes], None]) -> None:
        """Hear every write from now on, also of what is not kept."""
        self._listeners.append(heard)

    def close(self) -> None:
        """Let go of files and of whoever waits; what is kept can still be read."""
        self._closed = True
        for kept in self._kept.values():
            kept.close()
        self._wake()

    def _ready(self, stream: Stream, offset: int) -> bool:
        total = self._kept[stream].total
        return self._ended or self._closed or total > max(offset, 0)

    def _wake(self) -> None:
        with self._lock:
            ready = [came for came, what in self._waiting.items() if self._ready(*what)]
            for came in ready:
                del self._waiting[came]
        for came in ready:
            # Its loop may be closed by now; then nobody waits.
            with suppress(RuntimeError):
                came.get_loop().call_soon_threadsafe(_come, came)


class OutputReader(io.RawIOBase):
    def __init__(self, output: Output, stream: Stream) -> None:
        self._output, self._stream, self._at = output, stream, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        page = self._output.page(self._stream, self._at, size if size >= 0 else _FAR)
        self._at = page.next
        return page.data


def _come(came: asyncio.Future[None]) -> None:
    if not came.done():
        came.set_result(None)
