"""One safetensors file: its header, and single tensors of it.

The library maps the whole file, and the tensors it gives keep that map alive: what was once
touched counts as the process's memory for as long as one of them is used. Here each tensor is
read into memory of its own.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.workloads.pipes.weights.refusing import invalid, not_found, not_supported

_LONGEST_HEADER = 100_000_000
"""As in the library."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True)
class TensorLocation:
    """Where a tensor is."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    """From the file's beginning."""
    size: int

    @property
    def values(self) -> int:
        return math.prod(self.shape)


class TensorFile:
    """The header is read at once and believed in nothing that the file is too short for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.places: dict[str, TensorLocation] = {}
        try:
            with path.open("rb") as file:
                self._read_header(file.read(8), file, os.fstat(file.fileno()).st_size)
        except FileNotFoundError:
            raise not_found(path, "does not exist") from None
        except OSError as error:
            raise invalid(path, f"can't be read: {error.strerror}") from error

    def read(self, name: str) -> torch.Tensor:
        place = self.places[name]
        dtype = _DTYPES.get(place.dtype)
        if dtype is None:
            raise not_supported(
                self.path, f"has {name} as {place.dtype}: only plain floats are taken"
            )
        tensor = torch.empty(place.shape, dtype=dtype)
        if place.size:
            read_into(self.path, place.offset, tensor.reshape(-1).view(torch.uint8))
        return tensor

    def _read_header(self, start: bytes, file: Any, size: int) -> None:
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > _LONGEST_HEADER:
            raise invalid(self.path, "is not a safetensors file: it does not begin as one")
        if 8 + length > size:
            raise invalid(self.path, f"is cut off: {size} bytes, and its header alone needs more")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            self.places = {name: _place(entry, 8 + length) for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise invalid(self.path, "is damaged: its header can't be read") from error
        needed = max((place.offset + place.size for place in self.places.values()), default=0)
        if needed > size:
            raise invalid(self.path, f"is cut off: {size} bytes, and {needed} are needed")


def _place(entry: Any, base: int) -> TensorLocation:
    begin, end = entry["data_offsets"]
    shape = tuple(int(one) for one in entry["shape"])
    place = TensorLocation(str(entry["dtype"]), shape, base + begin, end - begin)
    known = _DTYPES.get(place.dtype)
    if begin < 0 or end < begin or any(one < 0 for one in shape):
        raise ValueError
    if known is not None and place.values * known.itemsize != place.size:
        raise ValueError
    return place


def read_into(path: Path, offset: int, tensor: torch.Tensor) -> None:
    """Fills a tensor of bytes."""
    left = memoryview(tensor.numpy())
    with path.open("rb", buffering=0) as file:
        file.seek(offset)
        while left:
            got = file.readinto(left)
            if not got:
                raise invalid(path, "became shorter while it was read")
            left = left[got:]
