"""A folder as a tar archive, made while it is sent."""

from __future__ import annotations

import asyncio
import os
import stat
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

_PIECE = 1 << 20


async def packed(folder: Path) -> AsyncIterator[bytes]:
    """Piece by piece; everything belongs to root."""
    pieces = _pieces(folder)
    while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
        yield piece


def _pieces(folder: Path) -> Iterator[bytes]:
    gathered = bytearray()
    for path in sorted(folder.rglob("*")):
        for piece in _entry(path, path.relative_to(folder).as_posix()):
            gathered += piece
            if len(gathered) >= _PIECE:
                yield bytes(gathered)
                gathered.clear()
    yield bytes(gathered) + bytes(2 * tarfile.BLOCKSIZE)


def _entry(path: Path, name: str) -> Iterator[bytes]:
    facts = path.lstat()
    entry = tarfile.TarInfo(name)
    entry.mode = stat.S_IMODE(facts.st_mode) & 0o755 | 0o444
    if stat.S_ISDIR(facts.st_mode):
        entry.type = tarfile.DIRTYPE
        yield entry.tobuf(tarfile.PAX_FORMAT)
    elif stat.S_ISLNK(facts.st_mode):
        entry.type = tarfile.SYMTYPE
        entry.linkname = os.readlink(path)
        yield entry.tobuf(tarfile.PAX_FORMAT)
    elif stat.S_ISREG(facts.st_mode):
        entry.size = facts.st_size
        yield entry.tobuf(tarfile.PAX_FORMAT)
        yield from _content(path, entry.size)


def _content(path: Path, size: int) -> Iterator[bytes]:
    """Exactly that many bytes, whatever happens to the file meanwhile, and up to a whole block."""
    left = size
    with path.open("rb") as file:
        while left:
            piece = file.read(min(left, _PIECE)).ljust(min(left, _PIECE), b"\0")
            left -= len(piece)
            yield piece
    yield bytes(-size % tarfile.BLOCKSIZE)
