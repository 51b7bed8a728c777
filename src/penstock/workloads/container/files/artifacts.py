"""What a job left in its output folder, taken over by the worker. Blocking code, for a thread.

Only plain files are taken, with names that can be asked for. No link is followed, on no step of
a path. The content is copied: nothing that the container had open, linked or mapped can change
what was kept. What is not taken is told, with the reason.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import BinaryIO

from penstock.core.artifact import MAX_ARTIFACTS
from penstock.workloads.container.config import InputRules
from penstock.workloads.container.files.clearing import remove_tree
from penstock.workloads.container.files.kept import flush
from penstock.workloads.container.files.tree import FOLDER, BadFile, Tree
from penstock.workloads.container.job import OutputFile
from penstock.workloads.container.protocol.paths import checked_path

MAX_FILES = MAX_ARTIFACTS
MAX_ENTRIES = 100_000
"""Of all kinds, that are looked at."""
_TOLD = 100
"""Of how many that were skipped the reason is told."""
_SHOWN = 200
_PIECE = 1 << 20
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a device",
    stat.S_IFCHR: "a device",
}


class Collected:
    """What was taken and what was not, under caps."""

    def __init__(self, limit: int) -> None:
        self.artifacts: list[OutputFile] = []
        self._limit = limit
        self._left = limit
        self._skipped: list[str] = []
        self._untold = 0

    def add(self, artifact: OutputFile) -> None:
        self.artifacts.append(artifact)
        self._left -= artifact.size

    def skip(self, path: str, reason: str) -> None:
        if len(self._skipped) < _TOLD:
            self._skipped.append(f"{_readable(path)}: {reason}")
        else:
            self._untold += 1

    def problem(self, status: os.stat_result) -> str:
        """Why a file of that kind and size is not taken; empty if it is."""
        if not stat.S_ISREG(status.st_mode):
            return f"is {_KINDS.get(stat.S_IFMT(status.st_mode), 'something')}, not a file"
        if status.st_nlink != 1:
            return "has more than one name (it is hard-linked)"
        if len(self.artifacts) >= MAX_FILES:
            return f"is one too many: at most {MAX_FILES} files are kept"
        if status.st_size > self._left:
            return f"is too large: of {self._limit} bytes in all {self._left} are left"
        return ""

    @property
    def skipped(self) -> tuple[str, ...]:
        return (*self._skipped, *([f"and {self._untold} more"] if self._untold else []))


def collect(output: Path, kept: Path, limit: int) -> Collected:
    """Copy the files of `output` to the folder `kept`, which is durable when this returns.

    While `output` is there this can be done again from the start; if it is not, what was kept
    before is told again.
    """
    collected = Collected(limit)
    try:
        source = os.open(output, FOLDER)
    except FileNotFoundError:
        with suppress(FileNotFoundError), _opened(kept) as folder:
            Walk(collected, None).go(folder)
        return collected
    try:
        remove_tree(kept)
        rules = InputRules(max_files=MAX_FILES, max_file_bytes=limit, max_bytes=limit)
        with Tree(kept, rules) as tree:
            Walk(collected, tree).go(source)
    finally:
        os.close(source)
    _make_durable(kept, collected.artifacts)
    return collected


class Walk:
    """Through a folder, copying into a tree if there is one."""

    def __init__(self, collected: Collected, tree: Tree | None) -> None:
        self._collected = collected
        self._tree = tree
        self._looked_at = 0

    def go(self, folder: int, above: str = "") -> None:
        for name in self._names(folder, above):
            path = above + name
            try:
                checked_path(path)
            except ValueError as error:
                self._collected.skip(path, f"its path {error}")
                continue
            try:
                self._take(folder, name, path)
            except BadFile as error:
                self._collected.skip(path, str(error))
            except OSError as error:
                self._collected.skip(path, f"can't be read: {error.strerror}")

    def _names(self, folder: int, above: str) -> list[str]:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, MAX_ENTRIES - self._looked_at)]
            self._looked_at += len(names)
            if self._looked_at >= MAX_ENTRIES and next(entries, None) is not None:
                self._collected.skip(above or ".", f"has more than {MAX_ENTRIES} entries in all")
        return sorted(names)

    def _take(self, folder: int, name: str, path: str) -> None:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISDIR(status.st_mode):
            with _opened(name, folder) as inner:
                self.go(inner, f"{path}/")
        elif problem := self._collected.problem(status):
            self._collected.skip(path, problem)
        else:
            self._keep(folder, name, path)

    def _keep(self, folder: int, name: str, path: str) -> None:
        with open(os.open(name, _FILE, dir_fd=folder), "rb", buffering=0) as source:
            # Of what is open now, whatever the name meant before.
            if problem := self._collected.problem(os.fstat(source.fileno())):
                self._collected.skip(path, problem)
                return
            digest, size = sha256(), 0
            for piece in self._copied(source, path):
                digest.update(piece)
                size += len(piece)
        self._collected.add(OutputFile(path, size, digest.hexdigest()))

    def _copied(self, source: BinaryIO, path: str) -> Iterator[bytes]:
        if self._tree is None:
            yield from iter(lambda: source.read(_PIECE), b"")
            return
        with self._tree.file(path) as file:
            while piece := source.read(_PIECE):
                file.write(piece)
                yield piece


def open_artifact(kept: Path, path: str) -> BinaryIO:
    """A file that was collected. Raises FileNotFoundError for anything else."""
    try:
        *above, name = checked_path(path).split("/")
        folder = os.open(kept, FOLDER)
        for part in above:
            try:
                inner = os.open(part, FOLDER, dir_fd=folder)
            finally:
                os.close(folder)
            folder = inner
        try:
            handle = os.open(name, _FILE, dir_fd=folder)
        finally:
            os.close(folder)
    except (ValueError, OSError) as error:
        raise FileNotFoundError(f"there is no artifact {path!r}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise FileNotFoundError(f"there is no artifact {path!r}")
    return open(handle, "rb")


def _make_durable(kept: Path, artifacts: list[OutputFile]) -> None:
    # All after the last was written: most are then made durable together with the first.
    folders = {kept.parent, kept}
    for artifact in artifacts:
        path = kept / artifact.path
        flush(path)
        folders.update(above for above in path.parents if above.is_relative_to(kept))
    for folder in folders:
        flush(folder)


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
