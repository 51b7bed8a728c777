"""The header of a GGUF file: metadata by key, and the table of tensors.

The file may be anybody's. Nothing is believed that the file is too short for, nothing is read
beyond the header, and lists of strings (vocabularies) are passed over: the reader of the `gguf`
package keeps an array for each word, which takes seconds and hundreds of megabytes.
"""

from __future__ import annotations

import math
import os
import re
import stat
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import BinaryIO, NamedTuple

Value = int | float | bool | str | tuple[int | float, ...]

SUFFIX = ".gguf"
MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_CHUNK = 1 << 20
_LONGEST_KEY = 65_535
_LONGEST_TEXT = 1 << 20
_LONGEST_LIST = 65_536
_MAX_STRINGS = 1 << 24
"""In all lists together, as each has to be looked at."""
_MAX_NUMBERS = 1 << 20
"""In all lists that are kept: as Python objects they take eight times their space."""
_MAX_KEYS, _MAX_TENSORS, _MAX_PARTS = 1 << 16, 1 << 20, 10_000
_MAX_VALUES = 1 << 44
_KEY_BYTES, _TENSOR_BYTES = 8 + 1 + 4 + 1, 8 + 4 + 4 + 8
"""The least that one of each takes."""
_DIMENSIONS = 4
_FLOAT, _STRING, _ARRAY = 6, 8, 9
_NUMBERS: dict[int, struct.Struct] = {
    kind: struct.Struct("<" + code)
    for kind, code in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
    }.items()
}  # fmt: skip
_U32, _U64 = _NUMBERS[4], _NUMBERS[10]
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

TENSOR_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34), 9: ("Q8_1", 32, 36), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 15: ("Q8_K", 256, 292), 16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98), 19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110), 22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136), 24: ("I8", 1, 1), 25: ("I16", 1, 2),
    26: ("I32", 1, 4), 27: ("I64", 1, 8), 28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56), 30: ("BF16", 1, 2), 34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17), 40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}  # fmt: skip
"""A tensor's type: its name, and how many weights are a block of how many bytes."""


class Malformed(Exception):
    """What is wrong with a file, as the end of a sentence that begins with its name."""


class GgufTensor(NamedTuple):
    """The place of one tensor."""

    path: Path
    name: str
    kind: int
    """A key of TENSOR_TYPES, or a type that is newer than that table."""
    shape: tuple[int, ...]
    """In the order that torch has it: rows first."""
    offset: int
    """From the beginning of the file."""
    size: int
    """Bytes; 0 if the type is unknown."""

    @property
    def values(self) -> int:
        return math.prod(self.shape)

    @property
    def type_name(self) -> str:
        return TENSOR_TYPES[self.kind][0] if self.kind in TENSOR_TYPES else f"type {self.kind}"


class GgufHeader:
    """The header of one file. Of the keys only the wanted ones are kept, and of lists only short
    ones of numbers. Raises Malformed, and OSError if the file can't be read."""

    def __init__(self, path: Path, wanted: Callable[[str], bool]) -> None:
        self.path = path
        self.metadata: dict[str, Value] = {}
        self.tensors: dict[str, GgufTensor] = {}
        self._wanted, self._strings, self._numbers = wanted, 0, 0
        with open_regular(path) as file:
            self.size = os.fstat(file.fileno()).st_size
            self._cursor = _Cursor(file, self.size)
            self._read()

    def _read(self) -> None:
        if self.size < len(MAGIC) or self._cursor.take(len(MAGIC)) != MAGIC:
            raise Malformed("is not a GGUF file: it does not begin as one")
        version = self._cursor.number(_U32)
        if version not in _VERSIONS:
            raise Malformed(_about_version(version))
        tensors = self._count("tensors", _MAX_TENSORS, _TENSOR_BYTES)
        keys = self._count("keys", _MAX_KEYS, _KEY_BYTES)
        for _ in range(keys):
            self._read_key()
        self._place([self._read_tensor() for _ in range(tensors)])

    def _count(self, what: str, most: int, least: int) -> int:
        count = self._cursor.number(_U64)
        if count > most or count * least > self.size:
            raise Malformed(f"is damaged: it claims {count} {what}")
        return count

    def _read_key(self) -> None:
        key = self._cursor.text(_LONGEST_KEY)
        if key in self.metadata:
            raise Malformed(f"is damaged: it has the key {key[:80]!r} twice")
        value = self._read_value(self._wanted(key))
        if value is not None:
            self.metadata[key] = value

    def _read_value(self, wanted: bool) -> Value | None:
        cursor = self._cursor
        kind = cursor.number(_U32)
        if kind in _NUMBERS:
            data = cursor.take(_NUMBERS[kind].size)
            return _numbers(kind, data)[0] if wanted else None
        if kind == _STRING:
            if wanted:
                return cursor.text(_LONGEST_TEXT)
            cursor.skip(cursor.number(_U64))
            return None
        if kind == _ARRAY:
            return self._read_list(wanted)
        raise Malformed(f"is damaged: it has a value of the unknown type {kind}")

    def _read_list(self, wanted: bool) -> Value | None:
        cursor = self._cursor
        kind, count = cursor.number(_U32), cursor.number(_U64)
        if kind == _STRING:
            self._strings += count
            if self._strings > _MAX_STRINGS:
                raise Malformed(f"is damaged: it claims a list of {count} strings")
            cursor.skip_strings(count)
            return None
        if kind not in _NUMBERS:
            raise Malformed(f"is damaged: it has a list of the unknown type {kind}")
        size = count * _NUMBERS[kind].size
        if wanted and count <= _LONGEST_LIST:
            self._numbers += count
            if self._numbers > _MAX_NUMBERS:
                raise Malformed("is damaged: it has lists of numbers for more models than one")
            return _numbers(kind, cursor.take(size))
        cursor.skip(size)
        return None

    def _read_tensor(self) -> GgufTensor:
        """With its offset from where tensors begin."""
        cursor = self._cursor
        name, dimensions = cursor.text(_LONGEST_KEY), cursor.number(_U32)
        if dimensions > _DIMENSIONS:
            raise Malformed(f"is damaged: {name[:80]} has {dimensions} dimensions")
        shape = tuple(reversed([cursor.number(_U64) for _ in range(dimensions)]))
        kind, offset = cursor.number(_U32), cursor.number(_U64)
        _, block, length = TENSOR_TYPES.get(kind, ("", 1, 0))
        if shape and shape[-1] % block:
            raise Malformed(
                f"is damaged: {name[:80]} has rows of {shape[-1]}, no multiple of {block}"
            )
        size = math.prod(shape) // block * length
        return GgufTensor(self.path, name, kind, shape, offset, size)

    def _place(self, tensors: list[GgufTensor]) -> None:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise Malformed(f"is damaged: it aligns its tensors to {str(alignment)[:20]}")
        start = self._cursor.position + -self._cursor.position % alignment
        end = max((start + one.offset + one.size for one in tensors), default=0)
        if end > self.size:
            raise Malformed(
                f"is cut off: its tensors end at {end:,} bytes and it has {self.size:,}"
            )
        for one in tensors:
            if one.values > _MAX_VALUES:  # of an unknown type: its size says nothing
                raise Malformed(f"is damaged: {one.name[:80]} claims {one.values} values")
            if one.name in self.tensors:
                raise Malformed(f"is damaged: it has the tensor {one.name[:80]!r} twice")
            self.tensors[one.name] = one._replace(offset=start + one.offset)


def part_paths(path: Path) -> list[Path]:
    """All files of a model, in order: of a split one all its parts, whichever of them is given.
    Raises Malformed."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match["stem"], int(match["count"])
    if not 1 <= count <= _MAX_PARTS:
        raise Malformed(f"is named as one of {count} parts")
    return [path.with_name(part_name(stem, n, count)) for n in range(1, count + 1)]


def part_name(stem: str, number: int, count: int) -> str:
    """The file name of a part (from 1), as llama.cpp finds it; of a whole model, STEM.gguf."""
    return f"{stem}-{number:05}-of-{count:05}{SUFFIX}" if count > 1 else f"{stem}{SUFFIX}"


def stem_of(file: str) -> str:
    """The name of a model's file without the number of its part and its suffix."""
    match = _PART.fullmatch(file)
    if match is not None:
        return match["stem"]
    return file[: -len(SUFFIX)] if file.lower().endswith(SUFFIX) else file


def is_later_part(file: str) -> bool:
    """Whether a file's name says that it is a part of a model, and not the first."""
    match = _PART.fullmatch(file)
    return match is not None and int(match["number"]) != 1


def open_regular(path: Path) -> BinaryIO:
    """A FIFO is not waited for. Raises Malformed if it is not a regular file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Malformed("is not a regular file")
    return os.fdopen(descriptor, "rb", buffering=0)


def _numbers(kind: int, data: bytes) -> tuple[int | float, ...]:
    """A float32 comes as the shortest decimal that means it: 1e-05, as a config.json has it."""
    values = (value for (value,) in _NUMBERS[kind].iter_unpack(data))
    return tuple(float(f"{value:.7g}") if kind == _FLOAT else value for value in values)


class _Cursor:
    """Goes through a file from its beginning, and never past its end."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self._buffer = b""
        self._start = self._at = 0  # where the buffer is in the file, and we in the buffer

    @property
    def position(self) -> int:
        return self._start + self._at

    def take(self, count: int) -> bytes:
        self._have(count)
        taken = self._buffer[self._at : self._at + count]
        self._at += count
        return taken

    def skip(self, count: int) -> None:
        if count <= len(self._buffer) - self._at:
            self._at += count
            return
        self._check(count)
        self._start, self._buffer, self._at = self.position + count, b"", 0

    def number(self, form: struct.Struct) -> int:
        self._have(form.size)
        (value,) = form.unpack_from(self._buffer, self._at)
        self._at += form.size
        return int(value)

    def text(self, most: int) -> str:
        length = self.number(_U64)
        self._check(length)
        if length > most:
            raise Malformed(f"is damaged: it has a text of {length} bytes where few are usual")
        return self.take(length).decode("utf-8", "replace")

    def skip_strings(self, count: int) -> None:
        """A vocabulary is hundreds of thousands of them, so this loop is a tight one."""
        unpack, buffer, at = _U64.unpack_from, self._buffer, self._at
        last = len(buffer) - 8
        for _ in range(count):
            if at > last:
                self._at = at
                self._have(8)
                buffer, at, last = self._buffer, self._at, len(self._buffer) - 8
            at += 8 + unpack(buffer, at)[0]
            if at > last + 8:
                self._at = last + 8
                self.skip(at - self._at)
                buffer, at, last = self._buffer, self._at, len(self._buffer) - 8
        self._at = at

    def _have(self, count: int) -> None:
        """See to it that the buffer holds the next `count` bytes."""
        if len(self._buffer) - self._at >= count:
            return
        self._check(count)
        self._start, self._at = self.position, 0
        self._file.seek(self._start)
        self._buffer = self._file.read(min(max(count, _CHUNK), self._size - self._start))
        if len(self._buffer) < count:
            raise Malformed("is cut off inside its header")

    def _check(self, count: int) -> None:
        if count > self._size - self.position:
            raise Malformed("is cut off inside its header, or damaged")


def _about_version(version: int) -> str:
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *_VERSIONS):
        return "is a big-endian GGUF file, made for other machines than this one"
    if version < _VERSIONS[0]:
        return f"is of version {version} of GGUF, which llama.cpp no longer reads"
    return f"is of version {version} of GGUF, and only {_VERSIONS[0]} and {_VERSIONS[-1]} are known"
