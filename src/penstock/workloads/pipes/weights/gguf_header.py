"""The header of a GGUF file: facts by key, and where each tensor is.

gguf's own reader keeps an array for every word of the vocabulary, which takes seconds and
hundreds of megabytes; a node that has layers alone has no use for the words. Nothing is believed
that the file is too short for.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from penstock.workloads.pipes.weights.refusing import invalid, not_found, not_supported

Value = int | float | bool | str | tuple[int | float, ...]

_VERSIONS = (2, 3)
_CHUNK = 1 << 20
_LONGEST_TEXT = 1 << 20
_LONGEST_LIST = 1 << 16
_MOST_KEYS, _MOST_TENSORS, _MOST_STRINGS = 1 << 16, 1 << 20, 1 << 24
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    kind: struct.Struct("<" + code)
    for kind, code in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
    }.items()
}  # fmt: skip
_U32, _U64, _FLOAT = _NUMBERS[4], _NUMBERS[10], 6


@dataclass(frozen=True)
class GgufTensor:
    """One tensor's place. `shape` is the way round that torch has it."""

    path: Path
    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    offset: int
    """From the file's beginning."""
    size: int

    @property
    def values(self) -> int:
        return math.prod(self.shape)


class GgufHeader:
    """Of the keys only those that are wanted are kept, and of lists only short ones of numbers."""

    def __init__(self, path: Path, wanted: Callable[[str], bool]) -> None:
        self.path = path
        self.metadata: dict[str, Value] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._wanted = wanted
        try:
            with path.open("rb") as file:
                self._cursor = _Cursor(path, file, os.fstat(file.fileno()).st_size)
                self._read()
        except FileNotFoundError:
            raise not_found(path, "does not exist") from None
        except OSError as error:
            raise invalid(path, f"can't be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise invalid(path, "is damaged: it has text that is not UTF-8") from error

    def _read(self) -> None:
        cursor = self._cursor
        if cursor.size < 4 or cursor.take(4) != b"GGUF":
            raise invalid(self.path, "is no GGUF file: it does not begin as one")
        version = cursor.number(_U32)
        if version not in _VERSIONS:
            raise not_supported(self.path, f"is a GGUF of version {version}, not 2 or 3")
        tensors, keys = cursor.number(_U64), cursor.number(_U64)
        if tensors > _MOST_TENSORS or keys > _MOST_KEYS:
            raise self._damaged(f"it claims {tensors} tensors and {keys} keys")
        for _ in range(keys):
            self._read_key()
        found = [self._read_tensor() for _ in range(tensors)]
        self._place(found)

    def _read_key(self) -> None:
        cursor = self._cursor
        key = cursor.text()
        wanted, kind = self._wanted(key), cursor.number(_U32)
        value: Value | None = None
        if kind in _NUMBERS:
            value = _number(kind, cursor.take(_NUMBERS[kind].size))[0]
        elif kind == _STRING and wanted:
            value = cursor.text()
        elif kind == _STRING:
            cursor.skip(cursor.number(_U64))
        elif kind == _ARRAY:
            value = self._read_list(wanted)
        else:
            raise self._damaged(f"it has a value of the unknown type {kind}")
        if wanted and value is not None:
            self.metadata[key] = value

    def _read_list(self, wanted: bool) -> Value | None:
        cursor = self._cursor
        kind, count = cursor.number(_U32), cursor.number(_U64)
        if kind == _STRING and count <= _MOST_STRINGS:
            cursor.skip_strings(count)
        elif kind in _NUMBERS and wanted and count <= _LONGEST_LIST:
            return _number(kind, cursor.take(count * _NUMBERS[kind].size))
        elif kind in _NUMBERS:
            cursor.skip(count * _NUMBERS[kind].size)
        else:
            raise self._damaged(f"it has a list of {count} of type {kind}")
        return None

    def _read_tensor(self) -> GgufTensor:
        """With its offset from where tensors begin."""
        cursor = self._cursor
        name, dimensions = cursor.text(), cursor.number(_U32)
        if dimensions > 4:
            raise self._damaged(f"{name[:80]} has {dimensions} dimensions")
        shape = tuple(reversed([cursor.number(_U64) for _ in range(dimensions)]))
        number, offset = cursor.number(_U32), cursor.number(_U64)
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise not_supported(
                self.path, f"has {name[:80]} in the unknown type {number}"
            ) from None
        block, length = GGML_QUANT_SIZES[kind]
        if shape and shape[-1] % block:
            raise self._damaged(f"{name[:80]} has rows of {shape[-1]}, no multiple of {block}")
        return GgufTensor(self.path, name, kind, shape, offset, math.prod(shape) // block * length)

    def _place(self, found: list[GgufTensor]) -> None:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._damaged("it aligns its tensors to no power of two")
        base = self._cursor.position + -self._cursor.position % alignment
        for one in found:
            if one.name in self.tensors:
                raise self._damaged(f"it has {one.name[:80]} twice")
            end = base + one.offset + one.size
            if end > self._cursor.size:
                raise invalid(
                    self.path, f"is cut off: {self._cursor.size} bytes, and {end} are needed"
                )
            at = base + one.offset
            self.tensors[one.name] = GgufTensor(
                one.path, one.name, one.kind, one.shape, at, one.size
            )

    def _damaged(self, why: str) -> Exception:
        return invalid(self.path, f"is damaged: {why}")


def _number(kind: int, data: bytes) -> tuple[int | float, ...]:
    """A float32 comes as the shortest decimal that means it: 1e-05, as a config.json has it."""
    values = (value for (value,) in _NUMBERS[kind].iter_unpack(data))
    return tuple(float(f"{value:.7g}") if kind == _FLOAT else value for value in values)


class _Cursor:
    """Goes through a file from its beginning, and never past its end."""

    def __init__(self, path: Path, file: BinaryIO, size: int) -> None:
        self._path, self._file, self.size = path, file, size
        self._chunk, self._begin, self._at = b"", 0, 0

    @property
    def position(self) -> int:
        return self._begin + self._at

    def take(self, count: int) -> bytes:
        self._reach(count)
        if self._at + count > len(self._chunk):
            self._begin, self._at = self.position, 0
            self._file.seek(self._begin)
            self._chunk = self._file.read(max(count, _CHUNK))
            if len(self._chunk) < count:
                raise invalid(self._path, "became shorter while it was read")
        self._at += count
        return self._chunk[self._at - count : self._at]

    def skip(self, count: int) -> None:
        self._reach(count)
        self._at += count

    def number(self, kind: struct.Struct) -> int:
        value: int = kind.unpack(self.take(kind.size))[0]
        return value

    def text(self) -> str:
        length = self.number(_U64)
        if length > _LONGEST_TEXT:
            raise invalid(self._path, f"is damaged: it claims a text of {length} bytes")
        return self.take(length).decode()

    def skip_strings(self, count: int) -> None:
        """There are hundreds of thousands, so the common case has no calls."""
        unpack = _U64.unpack_from
        while count:
            chunk, at, last = self._chunk, self._at, len(self._chunk) - 8
            while count and at <= last:
                at += 8 + unpack(chunk, at)[0]
                count -= 1
            self._reach(at - self._at)
            self._at = at
            if count:
                self.skip(self.number(_U64))
                count -= 1

    def _reach(self, count: int) -> None:
        if self.position + count > self.size:
            raise invalid(self._path, f"is cut off: {self.size} bytes, which end within its header")
