"""A form with one file in it (multipart/form-data), read as it comes: the file is never whole in
memory, and its fields may stand before or after it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from penstock.api.decoding import explain, fields_of
from penstock.api.problems import Refused, malformed
from penstock.core.errors import InvalidRequest

if TYPE_CHECKING:
    from penstock.api.call import Call

FORM = "multipart/form-data"
_MOST_FIELDS = 32
_MOST_BYTES = 64 << 10
"""Of all fields together, the file not counted."""

S = TypeVar("S", bound=msgspec.Struct)
Sink = Callable[[bytes], Awaitable[None]]


class _Form:
    """What was read: the fields, among them the name of the file, and pieces of its content."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self._headers: dict[bytes, bytearray] = {}
        self._header = b""
        self._name = ""
        self._is_file = False
        self._value = bytearray()
        self._size = 0
        self._pieces: list[bytes] = []
        self.is_complete = False

    def take_pieces(self) -> list[bytes]:
        """Of the file, what came since."""
        pieces, self._pieces = self._pieces, []
        return pieces

    # -- what the parser tells --------------------------------------------------------

    def on_part_begin(self) -> None:
        self._headers, self._value, self._header = {}, bytearray(), b""

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        self._headers.setdefault(self._header.lower(), bytearray()).extend(data[start:end])

    def on_header_end(self) -> None:
        self._header = b""

    def on_headers_finished(self) -> None:
        from python_multipart.multipart import parse_options_header

        said = bytes(self._headers.get(b"content-disposition", b""))
        _, options = parse_options_header(said)
        self._name = _text("name", options.get(b"name", b""))
        if not self._name:
            raise malformed("a part of the form has no name")
        self._is_file = b"filename" in options
        if self._is_file and self._name != "file":
            raise InvalidRequest(self._name[:100], "is a file", hint="the field 'file' is for that")
        if self._name == "file" and not self._is_file:
            raise InvalidRequest("file", "is not a file", hint="give the part a filename")
        if self._is_file:
            self._keep(options[b"filename"])

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._pieces.append(data[start:end])
            return
        self._size += end - start
        if self._size > _MOST_BYTES:
            raise InvalidRequest(self._name[:100], f"the fields have more than {_MOST_BYTES} bytes")
        self._value += data[start:end]

    def on_part_end(self) -> None:
        if not self._is_file:
            self._keep(bytes(self._value))

    def _keep(self, value: bytes) -> None:
        if self._name in self.fields:
            raise InvalidRequest(self._name[:100], "is given twice", hint="give it once")
        if len(self.fields) >= _MOST_FIELDS:
            raise InvalidRequest("form", f"has more than {_MOST_FIELDS} fields")
        self.fields[self._name] = _text(self._name, value)

    def on_end(self) -> None:
        self.is_complete = True


async def read_form(call: Call, kind: type[S], sink: Sink) -> S:
    """The form as `kind`, whose `file` is the name of the file; `sink` got its content. Unknown
    fields are ignored. Raises Refused or InvalidRequest, and whatever `sink` raises."""
    from python_multipart.exceptions import MultipartParseError
    from python_multipart.multipart import MultipartParser

    form = _Form()
    callbacks: Any = {name: getattr(form, name) for name in vars(_Form) if name.startswith("on_")}
    parser = MultipartParser(_boundary(call), callbacks)
    async with aclosing(call.parts(paced=True)) as parts:
        async for part in parts:
            try:
                parser.write(part)
            except MultipartParseError as error:
                raise malformed(f"the form can't be read: {error}") from None
            for piece in form.take_pieces():
                await sink(piece)
    if not form.is_complete:
        raise malformed("the form is cut off: its closing boundary did not come")
    given = {name: form.fields[name] for name in fields_of(kind) if name in form.fields}
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise explain(str(error), given, kind) from None


def _boundary(call: Call) -> bytes:
    from python_multipart.multipart import parse_options_header

    kind, options = parse_options_header(call.header(b"content-type"))
    if kind.lower() != FORM.encode():
        raise Refused(415, "WRONG_TYPE", "the body is not a form", hint=f"say Content-Type: {FORM}")
    boundary = options.get(b"boundary", b"")
    if not 1 <= len(boundary) <= 200:
        raise malformed("the Content-Type names no boundary")
    return boundary


def _text(name: str, value: bytes) -> str:
    try:
        text = value.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(name[:100], "is not UTF-8") from None
    if "\x00" in text:
        raise InvalidRequest(name[:100], "has a control character")
    return text
