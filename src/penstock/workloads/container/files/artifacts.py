"""The artifacts of a job: what it left in its output folder, and logs that are not in its result.

Only plain files are taken, with names that can be asked for. No link is followed, on no step of
a path. The content is copied into the blob store: nothing that the container had open, linked or
mapped can change what was kept. What is not taken is told, with the reason.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO, cast

from penstock.core.artifact import MAX_ARTIFACTS, Artifact
from penstock.core.errors import InvalidRequest, TooLarge
from penstock.ports.blobs import Blobs, BlobStat, Source, artifact_of, keep_artifact
from penstock.workloads.container.files.output import Output
from penstock.workloads.container.files.tree import FOLDER
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

_Found = tuple[str, BinaryIO]
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
        with closing(OutputFiles(output, self._limit, self).files()) as files:
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
                await self.add(log_name(stream), upload.result(), _LOG)
                return
        shown, kept = text.encode(), output.count(stream).kept
        is_short = kept == len(shown)
        reads = output.reader(stream).read
        if not is_short or await in_thread_if(kept > _LARGE, reads, kept) != shown:
            await self.add(log_name(stream), output.reader(stream), _LOG)

    async def add(
        self, name: str, source: Source | BlobStat, media_type: str | None = None
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
            else:
                stored = await keep_artifact(self._blobs, name, source, media_type)
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


class OutputFiles:
    """The files of an output folder, each opened safely. Blocking code, for a thread."""

    def __init__(self, output: Path, limit: int, collector: ArtifactCollector) -> None:
        self._output, self._limit, self._left = output, limit, limit
        self._skip = collector.skip
        self._entries = 0

    def files(self) -> Generator[_Found, None, None]:
        """Each path, and the file; what can't be taken is skipped."""
        with suppress(FileNotFoundError), _opened(self._output) as folder:
            yield from self._walk(folder)

    def _walk(self, folder: int, above: str = "") -> Generator[_Found, None, None]:
        for name in self._names(folder, above):
            path = above + name
            try:
                checked_path(path)
            except ValueError as error:
                self._skip(path, f"its path {error}")
                continue
            try:
                yield from self._take(folder, name, path)
            except OSError as error:
                self._skip(path, f"can't be read: {error.strerror}")

    def _names(self, folder: int, above: str) -> list[str]:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, MAX_ENTRIES - self._entries)]
            self._entries += len(names)
            if self._entries >= MAX_ENTRIES and next(entries, None) is not None:
                self._skip(above or ".", f"has more than {MAX_ENTRIES} entries in all")
        return sorted(names)

    def _take(self, folder: int, name: str, path: str) -> Generator[_Found, None, None]:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            with _opened(name, folder) as inner:
                yield from self._walk(inner, f"{path}/")
        elif problem := self._problem(status):
            self._skip(path, problem)
        else:
            with open(os.open(name, _FILE, dir_fd=folder), "rb") as file:
                # Of what is open now, whatever the name meant before.
                status = os.fstat(file.fileno())
                if problem := self._problem(status):
                    self._skip(path, problem)
                    return
                self._left -= status.st_size
                yield path, cast("BinaryIO", Sized(file, status.st_size))

    def _problem(self, status: os.stat_result) -> str:
        """Why a file of that kind and size is not taken; empty if it is."""
        if not stat.S_ISREG(status.st_mode):
            return f"is {_KINDS.get(stat.S_IFMT(status.st_mode), 'something')}, not a file"
        if status.st_nlink != 1:
            return "has more than one name (it is hard-linked)"
        if status.st_size > self._left:
            return f"is too large: of {self._limit} bytes in all {self._left} are left"
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


@contextmanager
def _opened(name: str | Path, above: int | None = None) -> Iterator[int]:
    folder = os.open(name, FOLDER, dir_fd=above)
    try:
        yield folder
    finally:
        os.close(folder)


def _readable(path: str) -> str:
    text = os.fsencode(path).decode(errors="backslashreplace")
    text = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


# -- while the container runs ------------------------------------------------------------------

MAX_LEVELS = 255
ENDLESS = 1 << 62
"""What a tree weighs that has more levels: nothing can be hidden down there."""
FREE_ENTRIES = 10_000
_BLOCK = 4096


class Hidden(Exception):
    """There is a folder that this process may not look into: its container's user made it."""

    def __init__(self, size: int) -> None:
        super().__init__("a folder can't be looked into")
        self.size = size
        """Bytes of all that can be seen."""


def weight(path: Path) -> int:
    """Bytes of all files, as long as they say they are; of a file that has far more room set
    aside than it is long, that room. Entries beyond `FREE_ENTRIES` count a block each, for
    they take room too. Follows no link, and what vanishes meanwhile does not count.
    Raises Hidden if a folder can't be looked into."""
    try:
        folders = [os.open(path, FOLDER)]
    except FileNotFoundError:
        return 0
    scale = Scale()
    hidden = False
    try:
        levels = [_weigh(folders[-1], scale)]
        while levels:
            if not levels[-1]:
                levels.pop()
                os.close(folders.pop())
            elif len(levels) == MAX_LEVELS:
                return ENDLESS
            else:
                name = levels[-1].pop()
                try:
                    folders.append(os.open(name, FOLDER, dir_fd=folders[-1]))
                    levels.append(_weigh(folders[-1], scale))
                except PermissionError:
                    hidden = True
                except (FileNotFoundError, NotADirectoryError):
                    pass
    finally:
        for folder in folders:
            os.close(folder)
    if hidden:
        raise Hidden(scale.total)
    return scale.total


class Scale:
    def __init__(self) -> None:
        self.total = 0
        self._entries = 0

    def put(self, status: os.stat_result) -> None:
        self._entries += 1
        if self._entries > FREE_ENTRIES:
            self.total += _BLOCK
        if stat.S_ISREG(status.st_mode):
            self.total += _room(status)


def _room(status: os.stat_result) -> int:
    room, size = status.st_blocks * 512, status.st_size
    # Some file systems set aside as much again for a file that grows.
    return room if room > 2 * size + (1 << 20) else size


def _weigh(folder: int, scale: Scale) -> list[str]:
    """Put its entries on the scale; the names of folders in it."""
    inner = []
    with os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                scale.put(status)
                if stat.S_ISDIR(status.st_mode):
                    inner.append(entry.name)
    return inner
