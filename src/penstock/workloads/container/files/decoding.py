"""Bytes that are kept of a stream, as text: no character is cut, whatever was left out.

Wrong bytes become U+FFFD exactly where a decoder that had read the whole stream would have put
it. A character of which only a part is kept is left out as a whole.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence

from penstock.workloads.container.files.kept import Piece

_Decoder = getincrementaldecoder("utf-8")


def decoded(total: int, pieces: Sequence[Piece], *, ended: bool) -> str:
    """The text, with a line where bytes are missing. Before the end an unfinished last character
    is not there yet."""
    text: list[str] = []
    shown = 0
    for piece in pieces:
        skip = _begun_before(piece.before, piece.data)
        if skip == len(piece.data):
            continue
        _tell_gap(text, piece.start + skip - shown)
        body, rest = _decode(piece.data[skip:])
        text.append(body)
        shown = piece.stop - len(rest)
        if rest and (ended if piece.stop == total else _ends_in_front_of(piece.after, rest)):
            text.append(rest.decode(errors="replace"))
            shown = piece.stop
        elif piece.stop == total:
            shown = total
    _tell_gap(text, total - shown)
    return "".join(text)


def _tell_gap(text: list[str], count: int) -> None:
    if count:
        if (last := next((part for part in reversed(text) if part), "")) and last[-1] != "\n":
            text.append("\n")
        text.append(f"[… {count:,} byte{'s' if count > 1 else ''} left out …]\n")


def _decode(data: bytes) -> tuple[str, bytes]:
    """The text, and the bytes of an unfinished character at its end."""
    decoder = _Decoder("replace")
    text, rest = decoder.decode(data), decoder.getstate()[0]
    if len(wrong := rest.decode(errors="replace")) > 1:
        # Half a surrogate: the decoder waits for its third byte, though none can mend it.
        return text + wrong, b""
    return text, rest


def _begun_before(before: bytes, data: bytes) -> int:
    """How many bytes at the start of `data` belong to a character that begins in `before`."""
    # Three bytes are enough: no character is longer than four, and a byte that can begin one
    # can't be inside another.
    _, rest = _decode(before[_last_start(before) :])
    if not rest:
        return 0
    count = 0
    while count < len(data) and _may_go_on(rest, data[count : count + 1]):
        rest += data[count : count + 1]
        count += 1
    return count


def _last_start(before: bytes) -> int:
    """Where the last byte is that is not inside a character."""
    starts = (at for at in range(len(before) - 1, -1, -1) if before[at] & 0xC0 != 0x80)
    return next(starts, len(before))


def _ends_in_front_of(after: bytes, rest: bytes) -> bool:
    """Whether an unfinished character is wrong already, by the byte that comes next."""
    return bool(after) and not _may_go_on(rest, after)


def _may_go_on(begun: bytes, byte: bytes) -> bool:
    """Whether the byte can follow in a character that is not finished."""
    return bool(_decode(begun)[1]) and len((begun + byte).decode(errors="replace")) == 1
