"""Artifacts in Python: read, open or save the files that a job left."""

from __future__ import annotations

import asyncio
import io
import os
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from penstock.app.client import EngineCalls
from penstock.core.artifact import Artifact
from penstock.core.errors import NotFound, UnreadablePointer
from penstock.core.job import Job
from penstock.ports.blobs import PART
from penstock.ports.engine_api import EngineApi


class ArtifactHandle:
    """One file that a job left. `read` and `save` have async twins with an `a` before the name."""

    __slots__ = ("_engine", "artifact")

    def __init__(self, engine: EngineCalls, artifact: Artifact) -> None:
        self._engine, self.artifact = engine, artifact

    @property
    def name(self) -> str:
        return self.artifact.name

    @property
    def size(self) -> int:
        return self.artifact.size

    @property
    def sha256(self) -> str:
        return self.artifact.sha256

    @property
    def media_type(self) -> str:
        return self.artifact.media_type

    def __repr__(self) -> str:
        return f"<artifact {self.name!r}, {self.size:,} bytes>"

    def read(self) -> bytes:
        """All of its content, in memory. Raises UnreadablePointer if it is damaged."""
        return b"".join(self._engine.each(self._pieces()))

    async def aread(self) -> bytes:
        return b"".join([piece async for piece in self._engine.aeach(self._pieces())])

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write it to a file, or below a folder under the last part of its name; returns where.

        The file is there when all of it is, and its SHA-256 was checked. It is read in parts.
        """
        target = target_of(self.artifact, path)
        with _draft(target) as file:
            for piece in self._engine.each(self._pieces()):
                file.write(piece)
        return target

    async def asave(self, path: str | os.PathLike[str]) -> Path:
        target = target_of(self.artifact, path)
        return await save(self._engine.aeach(self._pieces()), target)

    def _pieces(self) -> AsyncIterator[bytes]:
        return pieces_of(self._engine.api, self.artifact)

    def open(self) -> BinaryIO:
        """A file object that reads what is asked for, and can seek. It does not check the
        SHA-256."""
        return io.BufferedReader(_Reader(self._engine, self.artifact), PART)


class _Reader(io.RawIOBase):
    def __init__(self, engine: EngineCalls, artifact: Artifact) -> None:
        self._engine, self._artifact = engine, artifact
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._artifact.size}[whence]
        if base + offset < 0:
            raise ValueError(f"can't seek to {base + offset}")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        left = max(0, self._artifact.size - self._at)
        start, length = self._at, min(len(buffer), left)
        if not length:
            return 0
        pointer = self._artifact.pointer
        data = self._engine.run(lambda api: api.read_blob(pointer, start, length))
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def artifact_of(job: Job, name: str) -> Artifact:
    """The artifact with this name. Raises NotFound, with the names there are."""
    left = job.result.artifacts if job.result is not None else ()
    for artifact in left:
        if artifact.name == name:
            return artifact
    names = ", ".join(one.name for one in left[:5]) + (", …" if len(left) > 5 else "")
    raise NotFound(
        f"job {job.job_id} left no artifact {name!r}",
        hint=f"it left {names}" if names else "it left none",
    )


async def pieces_of(api: EngineApi, artifact: Artifact) -> AsyncIterator[bytes]:
    """The content in parts; the last one only after the SHA-256 of all was checked.

    Raises UnreadablePointer if the content ends early, or is not what was left.
    """
    seen, at = sha256(), 0
    while at < artifact.size:
        piece = await api.read_blob(artifact.pointer, at, PART)
        at += len(piece)
        await asyncio.to_thread(seen.update, piece)
        if not piece or (at >= artifact.size and seen.hexdigest() != artifact.sha256):
            raise UnreadablePointer(
                "artifact", f"{artifact.name} is damaged: its SHA-256 does not match"
            )
        yield piece


def target_of(artifact: Artifact, path: str | os.PathLike[str]) -> Path:
    """The file that is meant: a path, or below a folder the last part of the name."""
    target = Path(path)
    return target / artifact.name.rpartition("/")[2] if target.is_dir() else target


def targets(artifacts: Iterable[Artifact], folder: Path) -> dict[Artifact, Path]:
    """Where each lies below a folder, under its whole name. Makes the folders between; a link
    there is not followed out of it."""
    root = folder.resolve()
    found = {}
    for artifact in artifacts:
        path = root / artifact.name
        if not path.parent.resolve().is_relative_to(root):
            raise UnreadablePointer("artifact", f"{artifact.name} would lie outside of {folder}")
        path.parent.mkdir(parents=True, exist_ok=True)
        found[artifact] = path
    return found


async def save(pieces: AsyncIterator[bytes], path: Path) -> Path:
    """Write an artifact to a file, whole or not at all."""
    with _draft(path) as file:
        async for piece in pieces:
            await asyncio.to_thread(file.write, piece)
    return path


@contextmanager
def _draft(path: Path) -> Iterator[BinaryIO]:
    """A file beside `path` that takes its place at the end; a pipe or device is written to."""
    if path.exists() and not path.is_file():
        with path.open("wb") as file:
            yield file
        return
    draft = path.with_name(f".{secrets.token_hex(8)}.part")
    try:
        with draft.open("xb") as file:
            yield file
        draft.replace(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
