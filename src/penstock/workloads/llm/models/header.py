"""The header of a GGUF file: a few facts by key, and the table of tensors.

The file may be anybody's. Nothing is believed that the file is too short for, nothing is read
beyond the header, and what is kept is small, whatever the header claims.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable
from typing import BinaryIO

from penstock.workloads.llm.models.quants import TENSOR_TYPES

Value = int | float | bool | str | tuple[int, ...]

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_CHUNK = 1 << 20
_LONGEST_KEY = 65_535
_LONGEST_TEXT = 1 << 20
_LONGEST_LIST = 65_536
_MOST_STRINGS = 1 << 24
"""In all lists together, as each has to be looked at."""
_MOST_KEYS, _MOST_TENSORS = 1 << 16, 1 << 20
_KEY_BYTES, _TENSOR_BYTES = 8 + 1 + 4 + 1, 8 + 4 + 4 + 8
"""The least that one of each takes."""
_DIMENSIONS = 4
_STRING, _ARRAY = 8, 9
_NUMBERS: dict[int, struct.Struct] = {
    kind: struct.Struct("<" + code)
    for kind, code in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
    }.items()
}  # fmt: skip
_WHOLE = {0, 1, 2, 3, 4, 5, 10, 11}
_U32, _U64 = _NUMBERS[4], _NUMBERS[10]


class Malformed(Exception):
    """What is wrong with a file, as the end of a sentence that begins with its name."""


class Header:
    """What was read. Raises Malformed."""

    def __init__(self, file: BinaryIO, size: int, wanted: Callable[[str], bool]) -> None:
        self.size = size
        self.metadata: dict[str, Value] = {}
        """Of the wanted keys alone. A list is kept if it is short and of whole numbers."""
        self.parameters = 0
        self.bytes_by_type: Counter[str] = Counter()
        self.needed = 0
        """How long the file has to be for its tensors."""
        self._wanted, self._strings = wanted, 0
        self._cursor = _Cursor(file, size)
        self._read()

    def _read(self) -> None:
        if self.size < len(MAGIC) or self._cursor.take(len(MAGIC)) != MAGIC:
            raise Malformed("is no GGUF file: it does not begin as one")
        self.version = self._cursor.number(_U32)
        if self.version not in _VERSIONS:
            raise Malformed(_about_version(self.version))
        tensors = self._count("tensors", _MOST_TENSORS, _TENSOR_BYTES)
        keys = self._count("keys", _MOST_KEYS, _KEY_BYTES)
        for _ in range(keys):
            self._read_key()
        self._read_tensors(tensors)

    def _count(self, what: str, most: int, least: int) -> int:
        count = self._cursor.number(_U64)
        if count > most or count * least > self.size:
            raise Malformed(f"is damaged: it claims {count} {what}")
        return count

    def _read_key(self) -> None:
        cursor = self._cursor
        key = cursor.text(_LONGEST_KEY)
        if key in self.metadata:
            raise Malformed(f"is damaged: it has the key {key[:80]!r} twice")
        value = self._read_value(self._wanted(key))
        if value is not None:
            self.metadata[key] = value

    def _read_value(self, wanted: bool) -> Value | None:
        cursor = self._cursor
        kind = cursor.number(_U32)
        if kind in _NUMBERS:
            read = cursor.value(_NUMBERS[kind])
            return read if wanted else None
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
            if self._strings > _MOST_STRINGS:
                raise Malformed(f"is damaged: it claims a list of {count} strings")
            cursor.skip_strings(count)
            return None
        if kind not in _NUMBERS:
            raise Malformed(f"is damaged: it has a list of the unknown type {kind}")
        each = _NUMBERS[kind]
        if wanted and kind in _WHOLE and count <= _LONGEST_LIST:
            data = cursor.take(count * each.size)
            return tuple(int(number) for (number,) in each.iter_unpack(data))
        cursor.skip(count * each.size)
        return None

    def _read_tensors(self, count: int) -> None:
        end = 0
        for _ in range(count):
            end = max(end, self._read_tensor())
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise Malformed(f"is damaged: it aligns its tensors to {str(alignment)[:20]}")
        at = self._cursor.position
        self.needed = at + -at % alignment + end if count else at

    def _read_tensor(self) -> int:
        """Where it ends, counted from where tensors begin."""
        cursor = self._cursor
        cursor.skip(cursor.number(_U64))
        dimensions = cursor.number(_U32)
        if dimensions > _DIMENSIONS:
            raise Malformed(f"is damaged: it has a tensor of {dimensions} dimensions")
        weights = 1
        for _ in range(dimensions):
            weights *= cursor.number(_U64)
        kind, offset = cursor.number(_U32), cursor.number(_U64)
        # Of a type that is newer than this table only the place is known.
        name, block, length = TENSOR_TYPES.get(kind, (f"type {kind}", 1, 0))
        long = -(-weights // block) * length
        self.parameters += weights
        self.bytes_by_type[name] += long
        return offset + long


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
        return int(self.value(form))

    def value(self, form: struct.Struct) -> int | float | bool:
        self._have(form.size)
        (value,) = form.unpack_from(self._buffer, self._at)
        self._at += form.size
        found: int | float | bool = value
        return found

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
