"""Nodes of this machine, as files in the data folder: whoever looks for one finds its address."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec import Struct


class NodePlace(Struct, frozen=True, kw_only=True):
    """Where a node of this data folder listens, and which process it is."""

    node_id: str
    address: str
    pid: int
    model: str = ""


@contextmanager
def kept(folder: Path, place: NodePlace) -> Iterator[None]:
    """A file for it, as long as it runs."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file = folder / f"{place.node_id}.json"
    new = folder / f".{place.node_id}.{place.pid}"
    new.write_bytes(msgspec.json.encode(place))
    new.replace(file)
    try:
        yield
    finally:
        with suppress(OSError):
            if _read(file) == place:
                file.unlink()


def places(folder: Path) -> list[NodePlace]:
    """Those whose processes are there, the youngest first. What others left is removed."""
    found = []
    for file in sorted(folder.glob("*.json"), key=_age):
        place = _read(file)
        if place is not None and _lives(place.pid):
            found.append(place)
        else:
            with suppress(OSError):
                file.unlink()
    return found


def _age(file: Path) -> float:
    try:
        return -file.stat().st_mtime
    except OSError:
        return 0.0


def _read(file: Path) -> NodePlace | None:
    try:
        return msgspec.json.decode(file.read_bytes(), type=NodePlace)
    except (OSError, msgspec.MsgspecError):
        return None


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
