"""The artifacts of a job: what it left in its output folder, and logs that are not in its result.

Only plain files are taken, with names that can be asked for. No link is followed, on no step of
a path. The content is copied into the blob store: nothing that the container had open, linked or
mapped can change what was kept. What is not taken is told, with the reason.
"""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, cast

from penstock.core.artifact import MAX_ARTIFACTS, Artifact
from penstock.core.errors import InvalidRequest, TooLarge
from penstock.ports.blobs import Blobs, BlobStat, Source, artifact_of, keep_artifact
from penstock.workloads.container.files.output import Output
from penstock.workloads.container.files.tree import Walk
from penstock.workloads.container.job import Stream, log_name
from penstock.workloads.container.protocol.paths import checked_path
from penstock.workloads.container.timeouts import in_thread, in_thread_if

MAX_ENTRIES = 100_000
"""Of all kinds, that are looked at."""
_TOLD = 100
"""Of how many that were skipped the reason is told."""
_SHOWN = 200
_LARGE = 256 << 10
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_LOG = "text/plain"

_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}


class ArtifactCollector:
    """Stores the files of one job in the blob store, if there is one. While the output folder is
    there, all can be done again from the start."""

    def __init__(self, blobs: Blobs | None, limit: int) -> None:
        """`limit`: bytes that may be taken from the output folder in all."""
        self._blobs = blobs
        self._limit = limit
        self.artifacts: list[Artifact] = []
        self._skipped: list[str] = []
        self._untold = 0

    @property
    def skipped(self) -> tuple[str, ...]:
        """What was not taken, each with the reason."""
        return (*self._skipped, *([f"and {self._untold} more"] if self._untold else []))

    def skip(self, path: str, reason: str) -> None:
        if len(self._skipped) < _TOLD:
            self._skipped.append(f"{_readable(path)}: {reason}")
        else:
            self._untold += 1

    async def add_folder(self, output: Path) -> None:
        """All files of the output folder. The container has ended."""
        with closing(output_files(output, self._limit, self.skip)) as files:
            while (found := await in_thread(next, files, None)) is not None:
                await self.add(*found)

    async def add_log(
        self, stream: Stream, text: str, output: Output, upload: asyncio.Task[BlobStat] | None
    ) -> None:
        """What was written, where the result's text does not have all of it as it was. An `upload`
        that failed is done again: the store may have been away."""
        if upload is not None:
            await asyncio.wait((upload,))
            if upload.exception() is None:
                await self.add(log_name(stream), upload.result())
                return
        shown, kept = text.encode(), output.count(stream).kept
        if kept == len(shown):
            # Without a gap: else the text would have a line that says so.
            page = await in_thread_if(kept > _LARGE, output.page, stream, 0, kept)
            if page.data == shown:
                return
        await self.add(log_name(stream), output.pieces(stream), _LOG)

    async def add(
        self, name: str, source: Source | BlobStat | AsyncIterator[bytes], media_type: str = ""
    ) -> None:
        """Store it; not in the place of another of that name."""
        try:
            if any(one.name == name for one in self.artifacts):
                return
            if self._blobs is None:
                raise TooLarge("artifacts", "there is nowhere to keep it")
            if len(self.artifacts) >= MAX_ARTIFACTS:
                raise TooLarge("artifacts", f"a job may leave {MAX_ARTIFACTS:,} files")
            if isinstance(source, BlobStat):
                stored = artifact_of(name, source)
            elif isinstance(source, AsyncIterator):
                stored = artifact_of(name, await self._blobs.put_stream(source, media_type))
            else:
                stored = await keep_artifact(self._blobs, name, source, media_type or None)
            self.artifacts.append(stored)
        except InvalidRequest as error:
            self.skip(name, error.problem)
        finally:
            if hasattr(source, "close"):
                source.close()


class LogUploads:
    """Stores the streams that are too long for the result, their heads while they are written: to
    compute a digest takes its time."""

    def __init__(self, blobs: Blobs, output: Output, most: int) -> None:
        self._blobs, self._output, self._left = blobs, output, dict.fromkeys(Stream, most)
        self.tasks: dict[Stream, asyncio.Task[BlobStat]] = {}
        output.listen(self._hear)

    def _hear(self, stream: Stream, data: bytes) -> None:
        self._left[stream] -= len(data)
        if self._left[stream] < 0 and stream not in self.tasks:
            storing = self._blobs.put_stream(self._output.pieces(stream), _LOG)
            self.tasks[stream] = asyncio.create_task(storing)


def output_files(
    output: Path, limit: int, skip: Callable[[str, str], None]
) -> Generator[tuple[str, BinaryIO], None, None]:
    """The files of an output folder, each with its path and opened safely; what can't be taken is
    skipped. Blocking code, for a thread."""
    left, bad = limit, set()

    def on_error(path: str, error: OSError) -> None:
        if path or error.errno != errno.ENOENT:
            skip(path or ".", f"can't be read: {error.strerror}")

    for entry in Walk(output, on_error, most=MAX_ENTRIES, enter=lambda path: path not in bad):
        try:
            checked_path(entry.path)
        except ValueError as error:
            bad.add(entry.path)
            skip(entry.path, f"its path {error}")
            continue
        if stat.S_ISDIR(entry.status.st_mode):
            continue
        status = entry.status
        try:
            if not (problem := _problem(status, limit, left)):
                with open(os.open(entry.name, _FILE, dir_fd=entry.folder), "rb") as file:
                    # Of what is open now, whatever the name meant before.
                    status = os.fstat(file.fileno())
                    if not (problem := _problem(status, limit, left)):
                        left -= status.st_size
                        yield entry.path, cast("BinaryIO", Sized(file, status.st_size))
        except OSError as error:
            problem = f"can't be read: {error.strerror}"
        if problem:
            skip(entry.path, problem)


def _problem(status: os.stat_result, limit: int, left: int) -> str:
    """Why a file of that kind and size is not taken; empty if it is."""
    if not stat.S_ISREG(status.st_mode):
        return f"is {_KINDS.get(stat.S_IFMT(status.st_mode), 'something')}, not a file"
    if status.st_nlink != 1:
        return "has more than one name (it is hard-linked)"
    if status.st_size > left:
        return f"is too large: of {limit} bytes in all {left} are left"
    return ""


class Sized:
    """A file that must not have grown since it was measured."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._left = file, size

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise TooLarge("artifacts", "grew while it was collected")
        return data


def _readable(path: str) -> str:
    text = os.fsencode(path).decode(errors="backslashreplace")
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"
