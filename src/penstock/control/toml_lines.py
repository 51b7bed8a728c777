"""At which line of a TOML text each of its keys stands, for errors to say.

The text was read by `tomllib` already, so that it is taken to be valid here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TypeAlias

Path: TypeAlias = tuple[str | int, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY = re.compile(r'[ \t]*(?:"((?:\\.|[^"\\])*)"|\'([^\']*)\'|([A-Za-z0-9_-]+))[ \t]*(\.)?')
_STRING = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|' + r"'''.*?'{3,5}|" + r'"(?:\\.|[^"\\])*"|' + r"'[^']*'", re.S
)
_OTHER = re.compile(r"[^,\]}#\r\n]+")


def line_of(text: str, path: Sequence[str | int]) -> int:
    """The line of a key; of the nearest one around it, if it is not written itself."""
    lines = dict(_Walk(text).lines())
    wanted = tuple(path)
    while wanted and wanted not in lines:
        wanted = wanted[:-1]
    return lines.get(wanted, 1)


class _Walk:
    """One reading of a text, from its beginning to its end."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0
        self._counted, self._line = 0, 1
        self._arrays: dict[Path, int] = {}
        """By its path, how many `[[tables]]` an array has so far."""

    def lines(self) -> Iterator[tuple[Path, int]]:
        table: Path = ()
        while self._blank():
            line = self._here()
            if self._skip("[["):
                table = self._resolved(self._key(), one_more=True)
                self._skip("]]")
                yield table, line
            elif self._skip("["):
                table = self._resolved(self._key())
                self._skip("]")
                yield table, line
            else:
                yield from self._pair(table)

    def _pair(self, table: Path) -> Iterator[tuple[Path, int]]:
        line = self._here()
        path = table + self._key()
        yield path, line
        self._skip("=")
        self._blank()
        yield from self._value(path)

    def _value(self, path: Path) -> Iterator[tuple[Path, int]]:
        if self._skip("["):
            index = 0
            while self._blank() and not self._skip("]"):
                yield (*path, index), self._here()
                yield from self._value((*path, index))
                index += 1
                self._blank()
                self._skip(",")
        elif self._skip("{"):
            while self._blank() and not self._skip("}"):
                yield from self._pair(path)
                self._blank()
                self._skip(",")
        elif found := (_STRING.match(self._text, self._at) or _OTHER.match(self._text, self._at)):
            self._at = found.end()
        else:
            raise ValueError(f"no value at line {self._here()}")

    def _key(self) -> tuple[str, ...]:
        parts = []
        while found := _KEY.match(self._text, self._at):
            self._at = found.end()
            parts.append(next(part for part in found.groups()[:3] if part is not None))
            if not found[4]:
                return tuple(parts)
        raise ValueError(f"no key at line {self._here()}")

    def _resolved(self, key: Sequence[str], *, one_more: bool = False) -> Path:
        """The path of a header, in which an array stands for its newest table."""
        path: Path = ()
        for number, part in enumerate(key, 1):
            path = (*path, part)
            if one_more and number == len(key):
                self._arrays[path] = self._arrays.get(path, 0) + 1
            if count := self._arrays.get(path):
                path = (*path, count - 1)
        return path

    def _blank(self) -> bool:
        """Go on to what is not blank; False at the end."""
        found = _BLANK.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return self._at < len(self._text)

    def _skip(self, sign: str) -> bool:
        if self._text.startswith(sign, self._at):
            self._at += len(sign)
            return True
        return False

    def _here(self) -> int:
        self._line += self._text.count("\n", self._counted, self._at)
        self._counted = self._at
        return self._line
