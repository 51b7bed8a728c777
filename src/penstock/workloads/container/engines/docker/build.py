"""Building an image: what is sent, and which images it needs.

An engine fetches a base that is not here, whatever it is told; so the bases are looked up first.
"""

from __future__ import annotations

import asyncio
import os
import stat
import tarfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from penstock.workloads.container.engine import BuildFailed, BuildPlan

_PIECE = 1 << 20
_CPU_PERIOD = 100_000
_DIRECTIVES = ("escape", "syntax", "check")


def build_query(plan: BuildPlan) -> dict[str, str | int]:
    """Nothing is shared with other builds: not even what they had in common."""
    return {
        "t": plan.tag,
        "version": 1,
        "dockerfile": "Dockerfile",
        "networkmode": "none",
        "nocache": 1,
        "rm": 1,
        "forcerm": 1,
        "memory": plan.memory,
        "memswap": plan.memory,
        "cpuperiod": _CPU_PERIOD,
        "cpuquota": round(plan.cpus * _CPU_PERIOD),
        "shmsize": 16 << 20,
    }


def bases(dockerfile: str) -> list[str]:
    """The images that it starts from or copies from. Raises BuildFailed for one that only the
    build itself could tell."""
    stages: set[str] = set()
    found: dict[str, None] = {}
    count = 0
    for words in _instructions(dockerfile):
        verb = words[0].upper()
        flags = dict(_flag(word) for word in words[1:] if word.startswith("--"))
        plain = [word for word in words[1:] if not word.startswith("--")]
        if verb == "FROM" and plain:
            _add(plain[0], stages, found)
            stages.add(str(count))
            count += 1
            if len(plain) == 3 and plain[1].upper() == "AS":
                stages.add(plain[2].lower())
        elif verb in ("COPY", "ADD", "ONBUILD") and (copied := flags.get("from")):
            _add(copied, stages, found)
        elif verb == "RUN" and "mount" in flags:
            raise BuildFailed("RUN --mount is not supported")
    return list(found)


def _add(name: str, stages: set[str], found: dict[str, None]) -> None:
    if "$" in name:
        raise BuildFailed(f"an image must be named plainly, not as {name!r}")
    if name.lower() not in stages and name != "scratch":
        found[name] = None


def _flag(word: str) -> tuple[str, str]:
    name, _, value = word.lstrip("-").partition("=")
    return name.lower(), value


def _instructions(dockerfile: str) -> Iterator[list[str]]:
    """Each instruction's words, its continued lines joined."""
    escape, pending = "\\", ""
    top = True
    for line in dockerfile.splitlines():
        text = line.strip()
        if text.startswith("#"):
            name, _, value = text[1:].partition("=")
            if top and name.strip().lower() == "escape":
                escape = value.strip()
            top = top and name.strip().lower() in _DIRECTIVES
            continue
        top = False
        if not text and pending:
            continue
        if text.endswith(escape):
            pending += text[: -len(escape)] + " "
            continue
        if words := (pending + text).split():
            yield words
        pending = ""
    if words := pending.split():
        yield words


async def packed(folder: Path) -> AsyncIterator[bytes]:
    """A folder as a tar archive, piece by piece; everything belongs to root."""
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
